"""The faults of the atlas are what they say."""

from __future__ import annotations

from dataclasses import fields

import pytest
from torch import Tensor

from nanscope.atlas.batch import faulty, healthy
from nanscope.atlas.faults import FAULTS, Fault, FaultKind, Where

LOG_RATIOS = {
    "log_probs": lambda batch: batch.log_probs - batch.old_log_probs,
    "old_log_probs": lambda batch: batch.log_probs - batch.old_log_probs,
    "ref_log_probs": lambda batch: batch.ref_log_probs - batch.log_probs,
    "rollout_log_probs": lambda batch: batch.old_log_probs - batch.rollout_log_probs,
}
VALUES = {FaultKind.NAN: float("nan"), FaultKind.NEGATIVE_INFINITY: float("-inf")}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_what_it_says_and_nothing_else(fault: Fault) -> None:
    """One element of one tensor differs from the healthy batch, masked or counted as told, and gives the log-ratio that it names."""
    before, after = healthy(fault.advantage), faulty(fault)
    differs = {part.name: where_different(getattr(before, part.name), getattr(after, part.name)) for part in fields(before)}
    assert [name for name, places in differs.items() if places] == [fault.tensor]
    assert after.log_probs.requires_grad and after.advantages[0] == fault.advantage
    if fault.kind is FaultKind.EMPTY:
        rows = {row for row, _ in differs["mask"]}
        assert not after.mask[sorted(rows)].any() and (rows == {0} if fault.where is Where.ROW else rows == {0, 1, 2})
        return
    ((row, column),) = differs[fault.tensor]
    assert row == 0 and bool(before.mask[row, column]) == (fault.where is Where.VALID)
    changed = getattr(after, fault.tensor)[row, column].item()
    if fault.kind in VALUES:
        assert changed == VALUES[fault.kind] or (fault.kind is FaultKind.NAN and changed != changed)
    else:
        wanted = float(fault.kind.replace("−", "-"))
        assert LOG_RATIOS[fault.tensor](after)[row, column].item() == pytest.approx(wanted, abs=1e-4)


def where_different(a: Tensor, b: Tensor) -> list[tuple[int, ...]]:
    return [tuple(place) for place in (a.detach() != b.detach()).nonzero().tolist()]
