"""Parts of a model, and the numbers of the nodes that autograd made in each."""

from __future__ import annotations

import torch
from torch import nn

from nanscope.capture.parts import MOST, Parts
from nanscope.torch_inside import number_of


def test_a_part_has_the_nodes_that_were_made_in_it() -> None:
    """Also one that is called twice, and one inside another."""
    parts, inner, outer = Parts(), nn.Tanh(), nn.Sequential()
    x = torch.ones(2, requires_grad=True)
    parts.enter(outer)
    parts.enter(inner)
    a = torch.tanh(x)
    parts.leave(inner)
    b = a * 2
    parts.leave(outer)
    c = b + 1
    spans = {module: range(begin, end) for begin, end, module in parts.take()}
    made = {name: number_of(tensor.grad_fn) for name, tensor in (("a", a), ("b", b), ("c", c))}
    assert [made["a"] in spans[inner], made["b"] in spans[inner], made["b"] in spans[outer], made["c"] in spans[outer]] == [
        True,
        False,
        True,
        False,
    ]
    assert parts.take() == []


def test_what_never_returned_is_left_out() -> None:
    """A checkpoint begins parts that never return; what is around them does."""
    parts, lost, outer = Parts(), nn.Tanh(), nn.Sequential()
    parts.enter(outer)
    parts.enter(lost)
    parts.leave(outer)
    parts.leave(lost)
    assert [module for _, _, module in parts.take()] == [outer]


def test_what_nobody_differentiates_is_not_kept_for_ever() -> None:
    """A loop that samples with gradients enabled."""
    parts, module = Parts(), nn.Tanh()
    for _ in range(MOST + 1):
        parts.enter(module)
        parts.leave(module)
    parts.begin()
    assert parts.take() == []
