"""What the recording of a step has settled is said, so that nobody takes it for tried."""

from __future__ import annotations

from dataclasses import replace

import pytest
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


def made_here(logps):
    mask = torch.ones(2, 3)
    mask[0, 2] = 0
    old_logps = logps.detach().clone()
    return (torch.exp(logps - old_logps) * mask).sum() / mask.sum()


def test_a_mask_that_the_step_makes_and_a_policy_that_has_not_moved_are_told() -> None:
    """Neither came in, so neither was varied."""
    mask, alike = settled(made_here, torch.randn(2, 3).requires_grad_())
    assert mask == "mask was made in the step, of nothing that came in; another one was not tried"
    assert alike.startswith("logps - old_logps (test_fixed.py:") and alike.endswith("a policy that has moved on was not tried")


def in_one_line(logps, old_logps):
    ratio = logps - old_logps
    if ratio.max() > 10: ratio = ratio.clamp(max=10)  # noqa: E701  # fmt: skip
    return torch.exp(ratio).mean()


def in_an_expression(logps, old_logps):
    ratio = (logps - old_logps).clamp(max=10) if logps.max() > 10 else logps - old_logps
    return torch.exp(ratio).mean()


@pytest.mark.parametrize(("loss", "decided"), [(in_one_line, "if ratio.max() > 10"), (in_an_expression, "if logps.max() > 10")])
def test_a_branch_in_one_line_is_told_like_any_other(loss, decided: str) -> None:
    """And so is one within an expression."""
    (branch,) = settled(loss, torch.randn(2, 3).requires_grad_(), torch.randn(2, 3))
    assert branch.startswith(f"the branches of `{decided}` (test_fixed.py:")
