"""The loss that a kernel computed, written out: log-probs from what it was given, and its formula under a tape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import nanscope
from nanscope.capture.kernels import kernel_of, reopen, selected_log_probs, swallowed
from nanscope.frameworks.live import Glimpse
from nanscope.frameworks.rows import Kernel, LossSite
from nanscope.frameworks.table import FRAMEWORKS
from nanscope.replay.batch import loss_inputs
from nanscope.roles import Role

KERNELS = {site.function: site for framework in FRAMEWORKS for site in framework.sites if site.kernel is not None}
CHUNKED = KERNELS["LigerFusedLinearPPOBase.forward"]
TRITON = KERNELS["GrpoLossFunction.forward"]


@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 4),
    biased=st.booleans(),
    temperature=st.sampled_from([None, 1.0, 0.7]),
    seed=st.integers(0, 99),
)
def test_log_probs_are_those_of_the_whole_vocabulary(rows: int, tokens: int, biased: bool, temperature: float | None, seed: int) -> None:
    """From hidden states and the head, or from logits with one position more, one row at a time: the log-softmax at the ids."""
    generator = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(rows, tokens + 1, 5, generator=generator), torch.randn(7, 5, generator=generator)
    bias = torch.randn(7, generator=generator) if biased else None
    ids = torch.randint(0, 7, (rows, tokens), generator=generator)
    logits = hidden @ head.t() + (0 if bias is None else bias)
    wanted = torch.log_softmax(logits[:, :-1] / (temperature or 1.0), -1).gather(-1, ids[..., None])[..., 0]
    fused = Kernel("h", "ids", (), weight="w", bias="b")
    taken = {"h": hidden[:, :-1], "ids": ids, "w": head, **({} if bias is None else {"b": bias})}
    assert torch.allclose(selected_log_probs(fused, taken, temperature), wanted, atol=1e-6)
    assert torch.allclose(selected_log_probs(Kernel("z", "ids", ()), {"z": logits, "ids": ids}, temperature), wanted, atol=1e-6)


MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
BAD = {
    "nothing": (None, None, False),
    "a masked token": ("old_logp", (0, 2), False),
    "a token that counts": ("old_logp", (1, 2), True),
    "an advantage": ("advantages", (1,), True),
}


@pytest.mark.parametrize("place", BAD)
def test_only_a_token_that_counts_is_swallowed(place: str) -> None:
    """A Triton program whose mask is 0 returns before it reads; a NaN there is no finding."""
    name, index, wrong = BAD[place]
    taken = {"completion_mask": MASK, "old_logp": torch.zeros(2, 3), "advantages": torch.zeros(2)}
    if name is not None:
        taken[name][index] = torch.nan
    assert TRITON.kernel is not None and TRITON.kernel.drops_nan
    assert swallowed(TRITON.kernel, taken) is wrong


def formula(log_probs: Tensor, mask: Tensor, old: Tensor, clip: float) -> tuple[Tensor, str]:
    ratio = torch.exp(log_probs - old)
    loss = -(ratio.clamp(max=clip) * mask).sum()
    return loss, "metrics"


def seen_and_taken(**changes: Any) -> tuple[list[Glimpse], dict[str, Tensor]]:
    kernel = Kernel(
        "hidden", "ids", (("mask", Role.MASK), ("old", Role.OLD_LOG_PROBS)), weight="w", formula="formula",
        arguments=(("mask", "mask"), ("old", "old"), ("clip", "clip")),
    )  # fmt: skip
    site = LossSite("fw/kernel.py", "Kernel.forward", (), "liger.dapo", kernel=kernel)
    taken = {
        "hidden": torch.randn(2, 3, 4),
        "ids": torch.randint(0, 5, (2, 3)),
        "w": torch.randn(5, 4),
        "mask": MASK,
        "old": -torch.ones(2, 3),
    }
    return [Glimpse(site, {"formula": formula, "clip": 1.2})], {**taken, **changes}


def test_a_formula_becomes_a_program_with_roles() -> None:
    """The framework's own Python is run under a tape: the leaves are the batch, by role, and it runs again to the same loss."""
    glimpses, taken = seen_and_taken()
    opened = reopen(glimpses, taken, 1 << 20)
    assert opened is not None
    program, tensors = opened
    assert {leaf.name: leaf.role for leaf in program.leaves} == {"log_probs": "log_probs", "old": "old_log_probs", "mask": "mask"}
    assert next(leaf for leaf in program.leaves if leaf.name == "log_probs").diff
    log_probs = next(tensors[leaf.id] for leaf in program.leaves if leaf.name == "log_probs")
    run = program.execute(tensors)
    assert torch.equal(run.values[program.output], formula(log_probs, taken["mask"], taken["old"], 1.2)[0])


LACKING: dict[str, Callable[[], tuple[list[Glimpse], dict[str, Tensor]]]] = {
    "no kernel was seen": lambda: ([], {}),
    "the hidden states were not held": lambda: (
        seen_and_taken()[0],
        {name: t for name, t in seen_and_taken()[1].items() if name != "hidden"},
    ),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_was_not_held_cannot_be_opened(what: str) -> None:
    """Without the kernel, or without what its log-probs are computed from, there is nothing to write out."""
    assert reopen(*LACKING[what](), 1 << 20) is None
    assert kernel_of([]) is None


@pytest.mark.parametrize("budget", [1 << 28, 4000])
def test_hidden_states_beyond_the_budget_are_made_again(tmp_path: Path, budget: int) -> None:
    """A kernel's argument is held within the budget; a larger one is an output of the model, which is asked for it once more."""
    chunked = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")
    width = 200
    words, mix, head = nn.Embedding(11, width), nn.Linear(width, width), nn.Linear(width, 11, bias=False)
    model = nn.Sequential(words, mix, nn.Tanh())
    ids, mask = torch.randint(0, 11, (2, 5)), torch.ones(2, 5, dtype=torch.long)
    mask[0, 4] = 0
    old = torch.log_softmax(head(model(ids)), -1).gather(-1, ids[..., None])[..., 0].detach()
    old[0, 4] -= 200.0
    loss = chunked.LigerFusedLinearGRPOLoss(compiled=False, use_ref_model=False, beta=0.0)
    with nanscope.watch(nn.ModuleList([model, head]), out=tmp_path / "run", budget=budget) as scope:
        loss(model(ids), head.weight, ids, mask, torch.ones(2), old_per_token_logps=old)[0].backward()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.variable, incident.origin.index, incident.origin.masked) == ("coef_1", (0, 4), True)
    recorded = loss_inputs(nanscope.load(str(incident.snapshot)))
    assert torch.allclose(recorded.log_probs, torch.log_softmax(head(model(ids)), -1).gather(-1, ids[..., None])[..., 0], atol=1e-5)
    assert recorded.old_log_probs is not None and torch.equal(recorded.old_log_probs, old)
    assert ("kernel_opened" in {note.slug for note in incident.notes}) and incident.fixes[0].works
