"""Feeding: which tensors others were computed from, by the graph alone."""

from __future__ import annotations

import torch

from nanscope.capture.feeding import feeding


def test_what_another_was_computed_from_is_found() -> None:
    """Through any number of calls, at the right output of a call with several, and at a parameter."""
    weight = torch.ones(2, requires_grad=True)
    logits = weight * 2
    low, high = logits.sin().split(1)
    loss = low.exp()
    assert feeding({0: weight, 1: logits, 2: low, 3: high, 4: loss}) == {0, 1, 2}
    assert feeding({3: high, 4: loss}) == set()
    assert feeding({0: weight}) == set() == feeding({0: torch.ones(2)})


def test_siblings_do_not_feed_each_other() -> None:
    """Two results of one call."""
    low, high = (torch.ones(2, requires_grad=True) * 2).unbind()
    assert feeding({0: low, 1: high}) == set()
