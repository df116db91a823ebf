"""A fix of a spike puts its origin back among the rest of the batch: what is merely less harsh than the spike was mends nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import leaf, record
from torch import Tensor

from nanscope.replay.edits import parse_edit
from nanscope.replay.tries import replay
from nanscope.replay.usual import ROOM, shortest_within, usual_loss
from nanscope.report.tried import tried_json
from nanscope.snapshot.history import Entry
from nanscope.snapshot.observation import Kind, Observation, Row
from nanscope.snapshot.step import Snapshot
from nanscope.verdict.diagnose import diagnose

HARSH = [1e-4, 1e-5, 1e-7, 1e-9, 1e-11]  # of what the others have
SCALES = [1e-3, 1.0, 1e3]


def divided(logps: Tensor, rewards: Tensor, spread: Tensor) -> Tensor:
    advantages = rewards / spread
    return -(advantages * logps).mean()


def weighted(logps: Tensor, old: Tensor) -> Tensor:
    ratio = torch.exp(logps - old)
    return -ratio.mean()


def paid(logps: Tensor, rewards: Tensor) -> Tensor:
    return -(rewards * logps).mean()


def far_spread(harsh: float, scale: float) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    spread = (torch.rand(4, 5) * 0.5 + 0.2) * scale
    spread[1, 2] = harsh * scale
    return leaf(4, 5), torch.randn(4, 5) * scale, spread


def far_ratio(nats: float) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    logps = leaf(4, 5)
    old = logps.detach() + 0.1 * torch.randn(4, 5)
    old[2, 3] -= nats
    return logps, old


def on_policy(nats: float) -> tuple[Tensor, ...]:
    logps, old = far_ratio(nats)
    return logps, torch.where(old < logps - 5.0, old, logps).detach()


def far_reward(size: float) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    rewards = torch.rand(4, 5)
    rewards[1, 2] = size
    return leaf(4, 5), rewards


def spiked(loss: Callable[..., Tensor], args: tuple[Tensor, ...], usual: float | None = 1.0) -> Snapshot:
    history = () if usual is None else tuple(Entry(step, 0, 0.0, loss=usual) for step in range(1, 6))
    return record(loss, *args).snapshot(observation=Observation(Kind.SPIKE, scale="9 times the largest loss"), history=history)


def fix_of(snapshot: Snapshot, name: str) -> Row:
    return next(row for row in replay(snapshot).rows if row.id == name)


def largest_at_rest(args: tuple[Tensor, ...], loss: Callable[..., Tensor], index: tuple[int, int]) -> float:
    """The largest gradient of the elements beside the spike."""
    logps = args[0].detach().requires_grad_()
    (grad,) = torch.autograd.grad(loss(logps, *args[1:]), logps)
    grad[index] = 0.0
    return float(grad.abs().max())


CASES = [
    *(pytest.param(divided, far_spread(harsh, scale), (1, 2), "clamp_denominator", id=f"spread {harsh} · {scale}") for harsh in HARSH for scale in SCALES if harsh * scale < 1e-4),
    *(pytest.param(weighted, far_ratio(nats), (2, 3), "clamp_exponent", id=f"e^{nats}") for nats in (10.0, 25.0, 50.0, 80.0)),
    pytest.param(weighted, on_policy(30.0), (2, 3), "clamp_exponent", id="on policy"),
    *(pytest.param(paid, far_reward(size), (1, 2), "clamp_input", id=f"reward {size}") for size in (1e4, -1e9, 1e20)),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "args", "index", "name"), CASES)
def test_the_fix_of_a_spike_puts_it_among_the_others(
    loss: Callable[..., Tensor], args: tuple[Tensor, ...], index: tuple[int, int], name: str
) -> None:
    """However harsh it is, and whatever the numbers of a batch are like: the bound comes from these, and healthy elements stay."""
    row = fix_of(spiked(loss, args, usual=None), name)
    assert row.proven and row.largest is not None, row
    assert row.largest <= ROOM * largest_at_rest(args, loss, index)
    assert diagnose(spiked(loss, args, usual=None)).fixes[0].id == name


@pytest.mark.parametrize(
    ("loss", "args", "edit"),
    [(divided, far_spread(1e-11, 1.0), "clamp_denominator:1e-5"), (weighted, far_ratio(60.0), "clamp:20")],
    ids=["floor", "bound"],
)
def test_what_is_only_less_harsh_is_no_fix(loss: Callable[..., Tensor], args: tuple[Tensor, ...], edit: str) -> None:
    """A millionth of a spike may be a spike: the row says how far out it still is, and nothing ticks it."""
    asked = [(edit, parse_edit(edit))]
    for usual in (None, 1.0):
        snapshot = spiked(loss, args, usual)
        row = next(row for row in replay(snapshot, asked, full=False).rows if row.kind == "asked")
        assert not row.works and row.bad == 0 and "times" in row.note, row
        shown = next(one for one in tried_json(diagnose(snapshot, replayed=replay(snapshot, asked))) if one["kind"] == "asked")
        assert shown["outcome"].startswith("✗ ") and "times" in shown["outcome"]


def test_what_changes_nothing_is_said_to_leave_the_spike() -> None:
    """A bare cross leaves the reader to guess, since every number in the row is finite."""
    name = "clamp_denominator:1e-30"
    row = replay(spiked(divided, far_spread(1e-11, 1.0)), [(name, parse_edit(name))], full=False).rows[-1]
    assert not row.works and row.note == "still as large"


def test_without_anything_healthy_the_run_is_the_measure() -> None:
    """One scale divides everything: what the loss was before says whether it is healed."""

    def scaled(logps: Tensor, temperature: Tensor) -> Tensor:
        return (logps / temperature).mean()

    args = (leaf(4, 5), torch.tensor(1e-9))
    assert not fix_of(spiked(scaled, args, usual=0.5), "clamp_denominator").works


def test_what_came_in_far_out_and_finite_is_not_called_not_finite() -> None:
    """An entry that is a number is bounded, and not looked for among those that are none."""
    rows = replay(spiked(paid, far_reward(1e9))).rows
    assert [row.label for row in rows if "not finite" in row.label] == []


def test_the_shortest_number_of_a_range() -> None:
    """What stands in the source is short, and lies where it has to."""
    found = [shortest_within(*ends) for ends in ((0.014, 0.0281), (17.0, 19.3), (0.5, 1.0), (-0.9, -0.75))]
    assert found == [0.02, 19.0, 1.0, -0.8]
    assert shortest_within(0.123456, 0.1234567) == pytest.approx(0.123456, abs=1e-6)


def test_a_finite_spike_of_exp_is_not_said_to_overflow() -> None:
    """Nothing overflowed: everything is finite."""
    said = diagnose(spiked(weighted, far_ratio(30.0))).sentence
    assert "overflow" not in said.lower(), said


@pytest.mark.parametrize("bad", [{"ruined": "spike"}, {"nonfinite": True}, {"ruined": "spike", "nonfinite": True}])
def test_a_step_that_went_bad_is_no_usual_one(bad: dict[str, Any]) -> None:
    """The running one, which is the last, and others before it."""
    history = [Entry(1, 0, 0.0, loss=0.7), Entry(1, 0, 0.0, loss=-3.0), Entry(1, 0, 0.0, loss=900.0, **bad), Entry(1, 0, 0.0, loss=2.0)]
    assert usual_loss(history) == 3.0 and usual_loss(history[2:3]) is None
