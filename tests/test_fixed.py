"""What the recording of a step has settled is said, so that nobody takes it for tried."""

from __future__ import annotations

from dataclasses import replace

import torch
from recorded import record
from torch import Tensor

from nanscope.foresight.fixed import fixed
from nanscope.locate.trace import Trace


def settled(loss, *data: Tensor, **changes: object) -> tuple[str, ...]:
    snapshot = replace(record(loss, *data).snapshot(), **changes)
    return fixed(snapshot, Trace.of(snapshot.program, snapshot.tensors))


def grouped(rewards, logps):
    groups = rewards.view(-1, 2)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    if rewards.sum() > 0:
        logps = logps * 2
    return -(advantages.reshape(-1, 1) * logps).mean() / len(rewards)


def test_a_group_and_a_branch_and_a_number_of_pythons_are_told() -> None:
    """With their lines."""
    size, number, branch = settled(grouped, torch.tensor([0.1, 0.9, 0.3, 0.2]), torch.randn(4, 3).requires_grad_())
    assert size.startswith("groups.std(1, keepdim=True) (test_fixed.py:") and size.endswith(
        "is over 2 elements; a group of one was not tried"
    )
    assert number.startswith("len(rewards) is 4, a number of Python's, and 0 was not tried (test_fixed.py:")
    assert branch.startswith("the branches of `if rewards.sum() > 0` (test_fixed.py:") and branch.endswith("the other was not tried")


def plain(logps, old_logps):
    return torch.exp(logps - old_logps).mean() / 2


def test_a_batch_of_one_row_is_told_and_one_of_two_is_not() -> None:
    """Nor is a number that stands in the source."""
    assert settled(plain, torch.randn(2, 3).requires_grad_(), torch.randn(2, 3)) == ()
    (row,) = settled(plain, torch.randn(1, 3).requires_grad_(), torch.randn(1, 3))
    assert row.startswith("the batch is one row")


def weighed(logps, ref_logps, beta):
    return logps.mean() + (ref_logps - logps).mean() * beta


def test_a_setting_of_zero_is_told() -> None:
    """As the code has it, and as the framework's settings say."""
    data = torch.randn(2, 3).requires_grad_(), torch.randn(2, 3)
    snapshot = record(lambda logps, ref_logps: weighed(logps, ref_logps, 0.0), *data).snapshot()
    (told,) = fixed(snapshot, Trace.of(snapshot.program, snapshot.tensors))
    assert told.startswith("beta is 0, so what it multiplies adds nothing to the loss (test_fixed.py:")
    (told,) = settled(plain, *data, objective={"key": "trl.grpo", "settings": {"beta": 0.0, "epsilon": 0.2, "scale": False}})
    assert told == "beta is 0 in the settings; what other values bring in was not tried"
