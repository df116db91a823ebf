"""Reproduction: loss and gradients apart, bit for bit or how far off, and in the same words everywhere."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from recorded import record
from torch import Tensor, nn
from verdicts import incident_of

import nanscope
from nanscope.replay.reproduction import NOT_COMPARED, Reproduction
from nanscope.replay.tries import replay
from nanscope.report.html import render_html
from nanscope.report.terminal import render_text
from nanscope.report.tried import reproduction
from nanscope.verdict.diagnose import diagnose
from nanscope.verdict.incident import Verdict

INF = math.inf

WORDS = (
    (Reproduction(0.0, 0.0), True, True, "reproduces bit for bit"),
    (Reproduction(0.0, None), True, True, "loss reproduces bit for bit"),
    (Reproduction(0.0, 3.1e-7, 1e-4), True, False, "loss bit for bit, gradients within 3e-07"),
    (Reproduction(2e-8, 4e-6, 1e-4), True, False, "loss within 2e-08, gradients within 4e-06"),
    (Reproduction(2e-8, 0.0, 1e-4), True, False, "loss within 2e-08, gradients bit for bit"),
    (Reproduction(0.0, 1.0, 1e-4), True, False, "loss bit for bit, gradients off by 100 %"),
    (Reproduction(0.0, INF, 1e-4), True, False, "loss bit for bit, gradients not finite in the same places"),
    (Reproduction(1e-3, 0.0, 1e-4), False, False, "does not reproduce"),
    (Reproduction(INF, 0.0, 1e-4), False, False, "does not reproduce"),
    (NOT_COMPARED, None, None, ""),
    (
        Reproduction(1e-7, None, 1e-4, "NVIDIA H100"), True, False,
        "loss within 1e-07 (recorded on NVIDIA H100, replayed on the CPU: other kernels add in another order)",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("found", "holds", "exact", "words"), WORDS, ids=[row[3] or "nothing" for row in WORDS])
def test_what_came_out_again_is_said_exactly(found: Reproduction, holds: bool | None, exact: bool | None, words: str) -> None:
    """Neither "bit for bit" over gradients that are not, nor "does not" over what is only rounded otherwise."""
    assert (found.holds, found.exact, found.words) == (holds, exact, words)
    incident = incident_of(reproduction=found)
    data = json.loads(json.dumps(Verdict((incident,)).to_json(), allow_nan=False))["incidents"][0]
    assert (data["reproduces"], data["reproduction"]["exact"], data["reproduction"]["words"]) == (holds, exact, words)
    assert words in render_html(Verdict((incident,))) and words in reproduction(incident)


def loss(x: Tensor, mask: Tensor) -> Tensor:
    return (torch.exp(x) * mask).sum()


def test_gradients_are_compared_apart_from_the_loss() -> None:
    """One that was changed by 3e-7 is told in the row, the verdict and the page, and the loss is not blamed."""
    recorded = record(loss, torch.tensor([0.5, 99.0]).requires_grad_(), torch.tensor([1.0, 0.0]))
    (name,) = (leaf.id for leaf in recorded.program.leaves if leaf.diff)
    grad = recorded.run.grads[name]
    changed = torch.where(torch.isfinite(grad), grad * (1 + 3e-7), grad)
    for kept, words in (
        (grad, "reproduces bit for bit"),
        (changed, "loss bit for bit, gradients within "),
        (grad[:1], "not finite in the same"),
    ):
        snapshot = recorded.snapshot(grads={name: kept})
        incident = diagnose(snapshot)
        assert words in incident.rows[0].note == incident.reproduction.words
        assert words in " ".join(render_text(Verdict((incident,))).split()) or len(words) > 30  # a narrow column folds it


def test_a_gpus_step_is_told_within_its_rounding() -> None:
    """Its loss is not that of a CPU to the last bit; that is no transient fault."""
    recorded = record(lambda x: x.exp().sum(), torch.tensor([0.5, 1.0]).requires_grad_())
    elsewhere = recorded.snapshot(loss=recorded.loss * (1 + 2e-7), environment={"device": "NVIDIA H100"})
    found = replay(elsewhere)
    assert found.reproduces is True and not found.reproduction.exact
    assert found.rows[0].note.startswith("loss within ") and "recorded on NVIDIA H100, replayed on the CPU" in found.rows[0].note
    other = dataclasses.replace(elsewhere, loss=recorded.loss * 1.5)
    assert replay(other).reproduces is False


def test_a_gradient_that_the_program_cannot_make_alone_is_no_measure(tmp_path: object) -> None:
    """The loss reads logits and what a module made of them: of the logits autograd gives more than the program does."""
    head, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
    with nanscope.watch(head, out=str(tmp_path)) as scope:
        logits = head(torch.randn(5, 4))
        hard = criterion(logits, torch.zeros(5, dtype=torch.long))
        (hard + (torch.exp(logits * 1e3) * 0.0).sum()).backward()
    (incident,) = scope.verdict.incidents
    assert incident.reproduction.exact is True and incident.rows[0].note == "reproduces bit for bit"
