"""A bad step becomes a healthy one with ordinary numbers in the place of those that ruined it, and nothing else is changed."""

from __future__ import annotations

import math

import torch
from recorded import record

from nanscope.foresight.ordinary import ordinary
from nanscope.locate.location import locate


def ratio(logps, old_logps):
    return torch.exp(logps - old_logps).mean()


def masked_mean(logps, mask):
    return (logps * mask).sum() / mask.sum()


def test_an_element_that_is_far_out_becomes_like_the_others() -> None:
    """Only that one is changed, to a number from the middle of the rest."""
    old = torch.tensor([-1.0, -2.0, -300.0, -1.5, -0.5])
    recorded = record(ratio, torch.full((5,), -1.0).requires_grad_(), old)
    trace, changed = ordinary(recorded.program, recorded.tensors)
    assert trace is not None and locate(trace) is None and changed == ("old_logps",)
    leaf = next(leaf.id for leaf in trace.program.leaves if leaf.name == "old_logps")
    now = trace.values[leaf]
    assert (now != old).tolist() == [False, False, True, False, False] and -2.0 <= float(now[2]) <= -0.5


def test_a_mask_that_selects_nothing_selects() -> None:
    """Where no other element says what is ordinary, its meaning does."""
    recorded = record(masked_mean, torch.randn(4).requires_grad_(), torch.zeros(4))
    trace, changed = ordinary(recorded.program, recorded.tensors)
    assert trace is not None and changed == ("mask",) and math.isfinite(float(trace.values[trace.program.output].detach()))


def written(logps):
    old = logps.detach() - 0.1
    old[1] = -300.0
    return torch.exp(logps - old).mean()


def test_what_the_code_itself_wrote_is_left_out() -> None:
    """The value that the loss reads is given, and not worked out."""
    recorded = record(written, torch.full((5,), -1.0).requires_grad_())
    trace, _ = ordinary(recorded.program, recorded.tensors)
    assert trace is not None and locate(trace) is None


def std_of_one(rewards, logps):
    return ((rewards - rewards.mean()) / rewards.std() * logps).sum()


def test_what_no_number_heals_stays_bad() -> None:
    """The std of one element is no number, whatever the element is."""
    recorded = record(std_of_one, torch.tensor([0.5]), torch.tensor([-1.0]).requires_grad_())
    trace, _ = ordinary(recorded.program, recorded.tensors)
    assert trace is None
