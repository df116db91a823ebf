"""Which cause is given: the first one whose facts hold and whose test removes the harm; of none, unknown, with what was tried."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from recorded import leaf, record
from torch import Tensor

from nanscope.causes import Cause
from nanscope.snapshot.observation import TEST
from nanscope.snapshot.step import Snapshot
from nanscope.verdict.because import because
from nanscope.verdict.diagnose import diagnose, examine

MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])


def overflowing(row: int) -> Snapshot:
    """An exponential that overflows in the last column, of which the first row is masked."""
    x = leaf(2, 3)
    with torch.no_grad():
        x[row, 2] = 99.0

    def loss(x: Tensor) -> Tensor:
        return (x.exp() * MASK).sum() / MASK.sum()

    return record(loss, x).snapshot()


def test_a_cause_is_given_with_its_test() -> None:
    """The test of the cause is the last one, and it stands in the rows."""
    incident = diagnose(overflowing(0))
    assert incident.cause is Cause.INF_TIMES_ZERO_MASK
    assert [(row.id, row.works) for row in incident.rows if row.kind == TEST] == [("inf_times_zero_mask", True)]


def test_a_cause_that_fits_and_whose_test_fails_is_not_given() -> None:
    """The token counts: whoever says that a mask takes it out is refuted by running it, and the next cause that fits is tested."""
    seen, replayed, _ = examine(overflowing(1))
    wrong = replace(seen, facts=replace(seen.facts, multiplied=True), origin=replace(seen.origin, masked=True))
    cause, tests = because(wrong, replayed)
    assert cause is Cause.EXP_OVERFLOW
    assert [(row.id, row.works) for row in tests] == [("inf_times_zero_mask", False), ("exp_overflow", True)]


def test_what_no_test_removes_is_unknown() -> None:
    """And what was tried is told."""
    seen, replayed, _ = examine(overflowing(0))
    failing = [replace(row, kind=TEST, id=str(cause), works=False) for row in replayed.rows[:1] for cause in Cause]
    cause, tests = because(seen, replace(replayed, rows=tuple(failing)))
    assert cause is Cause.UNKNOWN
    assert tests
    assert not any(row.works for row in tests)


def test_a_step_with_two_faults_needs_two_edits() -> None:
    """One edit uncovers the other fault, which is named; both together heal the step, and are the fix."""
    x = leaf(2, 3)
    with torch.no_grad():
        x[0, 2] = 99.0

    def loss(x: Tensor) -> Tensor:
        ratio = (x.exp() * MASK).sum() / MASK.sum()
        empty = MASK[:, 2:] * torch.tensor([[1.0], [0.0]])
        return ratio + ((x[:, 2:] * empty).sum(1) / empty.sum(1)).mean()

    incident = diagnose(record(loss, x).snapshot())
    first = incident.fixes[0]
    assert (incident.cause, first.id, first.proven) == (Cause.INF_TIMES_ZERO_MASK, "mask_before_op", True)
    assert "before dividing" in first.label
    assert first.loss is not None
    assert math.isfinite(first.loss)
    assert [note.slug for note in incident.notes] == ["second_fault"]
    assert any(row.id == first.id and not row.works and row.then.startswith("div at line") for row in incident.rows)


def test_one_fault_is_not_called_two() -> None:
    """Where one edit heals, no other is tried beside it."""
    incident = diagnose(overflowing(0))
    assert not incident.notes
    assert all("; and at line" not in fix.label for fix in incident.fixes)


def first_fix(snapshot: Snapshot) -> str:
    return diagnose(snapshot).fixes[0].id


def test_a_mask_of_the_code_is_filled_with_a_finite_number() -> None:
    """Where the code writes −inf itself, that is what people can change; where every row is masked, it is the mask that is wrong."""
    first = torch.tensor([[True], [False]])

    def own(x: Tensor) -> Tensor:
        scores = x.masked_fill(first, -math.inf)
        return scores.softmax(-1).sum()

    assert first_fix(record(own, leaf(2, 3)).snapshot()) == "finite_mask_fill"
    assert first_fix(record(lambda x: x.masked_fill(first, -math.inf).softmax(-1).sum(), leaf(2, 3)).snapshot()) == "finite_mask_fill"
    assert first_fix(record(lambda x: x.masked_fill(MASK < 2, -math.inf).softmax(-1).sum(), leaf(2, 3)).snapshot()) == "validate_config"


def test_a_temperature_that_half_precision_cannot_stand_is_a_setting() -> None:
    """float32 holds the quotient, and the gradient leaves the range all the same."""
    snapshot = record(
        lambda x: (x / 1e-5).log_softmax(-1)[:, 0].sum(), torch.linspace(0.5, 4, 6).reshape(2, 3).half().requires_grad_()
    ).snapshot()
    assert first_fix(snapshot) == "validate_config"
