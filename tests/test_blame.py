"""What stands behind an overflow: the element of a tensor that is far out of that tensor's own range, and heals it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from recorded import Recorded, record
from torch import Tensor

import nanscope
from nanscope.locate.observe import observe
from nanscope.report.html import render_html
from nanscope.report.terminal import render_text
from nanscope.snapshot.observation import Blame, Observation
from nanscope.verdict.diagnose import diagnose
from nanscope.verdict.incident import Verdict

ROWS, TOKENS = 6, 12
Batch = dict[str, Tensor]


def batch(dtype: torch.dtype = torch.float32) -> Batch:
    """Log-probs of policies that are near each other, of which the last tokens of two rows do not count."""
    generator = torch.Generator().manual_seed(3)
    log_probs = -3 * torch.rand(ROWS, TOKENS, generator=generator) - 0.1
    old = log_probs + 0.1 * torch.randn(ROWS, TOKENS, generator=generator)
    mask = torch.ones(ROWS, TOKENS)
    mask[2, 9:], mask[4, 7:] = 0, 0
    adv = torch.randn(ROWS, 1, generator=generator)
    tensors = {"log_probs": log_probs, "old_log_probs": old, "advantages": adv, "mask": mask}
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def ppo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(log_probs - old_log_probs)
    return -(ratio * advantages * mask).sum() / mask.sum()


def gspo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(((log_probs - old_log_probs) * mask).sum(-1, keepdim=True))
    return -(ratio * advantages).mean()


def shifted(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    gap = log_probs[:, 1:] - old_log_probs.flip(0)[:, :-1]
    return (gap.exp() * mask[:, 1:]).sum()


def squared(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return ((log_probs - advantages).square() * mask).mean()


def scaled(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (log_probs / old_log_probs * mask).mean()


def written(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    reported = old_log_probs * 1.0
    reported[3, 8] = -200.0
    return ppo(log_probs, reported, advantages, mask)


def logarithm(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (-log_probs).log().sum()


@dataclass(frozen=True)
class Case:
    """What is put where in a batch, and what is to blame: name and index. row: a whole one. None: nothing."""

    name: str
    loss: Callable[..., Tensor]
    put: tuple[tuple[str, tuple[int | slice, ...], float], ...]
    blamed: tuple[str, tuple[int, ...]] | None
    row: bool = False
    dtype: torch.dtype = torch.float32


CASES = (
    Case("of a token", ppo, (("old_log_probs", (3, 8), -200.0),), ("old_log_probs", (3, 8))),
    Case("of a token that does not count", ppo, (("old_log_probs", (4, 9), -200.0),), ("old_log_probs", (4, 9))),
    Case("of the policy", ppo, (("log_probs", (1, 1), 150.0),), ("log_probs", (1, 1))),
    Case("further out of two", ppo, (("old_log_probs", (3, 8), -200.0), ("log_probs", (3, 8), -14.0)), ("old_log_probs", (3, 8))),
    Case("of a sequence", gspo, (("old_log_probs", (5, 2), -120.0),), ("old_log_probs", (5, 2))),
    Case("in another place", shifted, (("old_log_probs", (1, 4), -170.0),), ("old_log_probs", (1, 4))),
    Case("a row", ppo, (("old_log_probs", (3, slice(None)), -120.0),), ("old_log_probs", (3,)), row=True),
    Case("a square", squared, (("advantages", (2, 0), 1e25),), ("advantages", (2, 0))),
    Case("a tiny divisor", scaled, (("old_log_probs", (0, 3), 1e-41),), ("old_log_probs", (0, 3))),
    Case("in half precision", ppo, (("old_log_probs", (3, 8), -17.0),), ("old_log_probs", (3, 8)), dtype=torch.float16),
    Case("written by the code", written, (), ("old_log_probs", (3, 8))),
    Case("all of it", ppo, (("old_log_probs", (slice(None), slice(None)), -150.0),), None),
    Case("two of which each is enough", gspo, (("old_log_probs", (5, 2), -120.0), ("old_log_probs", (5, 3), -120.0)), None),
    Case("no overflow", ppo, (("old_log_probs", (3, 8), math.nan),), None),
    Case("the logarithm of 0", logarithm, (("log_probs", (0, 1), 0.0),), None),
)  # fmt: skip


def recorded_of(case: Case) -> Recorded:
    tensors = batch(case.dtype)
    for name, index, number in case.put:
        tensors[name][index] = number
    tensors["log_probs"].requires_grad_()
    return record(lambda: case.loss(**tensors))


def blame_in(recorded: Recorded) -> Blame | None:
    location = recorded.location
    assert location is not None
    return observe(location, recorded.trace).blame


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_element_that_is_out_of_range_is_found(case: Case) -> None:
    """By name and index, beside what is usual in its tensor; nothing where nothing is out of range."""
    recorded = recorded_of(case)
    blame = blame_in(recorded)
    if case.blamed is None:
        assert blame is None
        return
    assert blame is not None
    assert ((blame.name, blame.index), blame.row) == (case.blamed, case.row)
    assert blame.low <= blame.median <= blame.high
    assert not blame.low <= blame.value <= blame.high
    assert blame.role == case.blamed[0]


def test_what_is_usual_is_that_of_the_tokens_that_count() -> None:
    """Padding may hold anything."""
    tensors = batch()
    tensors["old_log_probs"][3, 8] = -200.0
    tensors["old_log_probs"][tensors["mask"] == 0] = -9000.0
    tensors["log_probs"][tensors["mask"] == 0] = -9000.0
    tensors["log_probs"].requires_grad_()
    blame = blame_in(record(lambda: ppo(**tensors)))
    assert blame is not None
    assert blame.index == (3, 8)
    assert blame.low > -4


def test_a_mask_is_not_to_blame() -> None:
    """That a token counts at all is not out of range, however few do."""
    tensors = batch()
    tensors["mask"].zero_()[3, 8] = 1.0

    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return torch.exp((log_probs - old_log_probs + 100) * mask).sum()

    tensors["log_probs"].requires_grad_()
    assert blame_in(record(lambda: loss(**tensors))) is None


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    """What is said of a step with an outlier."""
    tensors = batch()
    tensors["old_log_probs"][3, 8] = -200.0
    tensors["log_probs"].requires_grad_()
    with nanscope.watch(out=tmp_path_factory.mktemp("run")) as scope:
        ppo(**tensors).backward()  # type: ignore[no-untyped-call]
    return scope.verdict


def test_it_is_told_everywhere(verdict: Verdict) -> None:
    """In the sentence, in the terminal, on the page and in JSON."""
    words = "old_log_probs[3, 8] = −200, where its median is −"
    assert f"Behind it: {words}" in verdict.sentence
    assert words in " ".join(render_text(verdict).split())
    assert "behind it" in render_text(verdict)
    assert words in render_html(verdict)
    (found,) = verdict.to_json()["incidents"]
    assert set(found["blame"]) == {"name", "role", "index", "value", "median", "low", "high", "row"}
    assert (found["blame"]["role"], found["blame"]["value"]) == ("old_log_probs", -200.0)


def test_a_row_is_called_a_row() -> None:
    """No single element of it is named."""
    incident = diagnose(recorded_of(next(case for case in CASES if case.row)).snapshot())
    assert "Behind it: row [3] of old_log_probs is around −120, where the median of the others is −1" in incident.sentence


def test_it_travels_in_the_file() -> None:
    """Where the origin lies outside the file's program, nobody can work it out again."""
    blame = Blame("old", "old_log_probs", (3, 8), -200.0, -2.8, -6.1, -0.4)
    recorded = recorded_of(CASES[0])
    location = recorded.location
    assert location is not None
    seen = observe(location, recorded.trace)
    assert Observation.from_json(seen.to_json()).blame == seen.blame
    assert Observation().joined(Observation(blame=blame)).blame == blame


def test_an_element_whose_change_changes_what_is_picked_is_not_blamed(tmp_path: Path) -> None:
    """Rows that hold anything are picked: with an ordinary number, 0, in its place the bad one is not among them, and nothing fails."""
    weight, drift = torch.ones(3, requires_grad=True), torch.zeros(24, 3)
    drift[20:] = 200.0
    with nanscope.watch(out=tmp_path) as scope:
        rows = torch.nonzero(drift.abs().sum(1))[:, 0]
        torch.exp(drift[rows] * weight).sum().backward()
    assert (scope.verdict.incidents[0].origin.op, scope.verdict.gaps) == ("exp", ())


def test_what_a_list_of_rows_has_picked_is_called_so(tmp_path: Path) -> None:
    """A mini-batch: the element behind the overflow has another row in the whole tensor, and the mask is called what it is, too."""
    torch.manual_seed(0)
    policy = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with nanscope.watch(policy, out=tmp_path) as scope:
        states, mask = torch.randn(4, 8, 3), torch.ones(4, 8)
        with torch.no_grad():
            old = policy(states).squeeze(-1)
        old[3, 7], mask[3, 7] = -150.0, 0.0
        for rows in ([0, 2], [1, 3]):
            lp = policy(states[rows]).squeeze(-1)
            loss = (torch.exp(lp - old[rows]) * mask[rows]).sum() / mask[rows].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (incident,) = scope.verdict.incidents
    assert incident.blame is not None and (incident.blame.name, incident.blame.index) == ("old[rows]", (1, 7)), incident.blame
    assert "multiplied by mask[rows] = 0" in incident.sentence and "old[rows][1, 7] = −150" in incident.sentence, incident.sentence
