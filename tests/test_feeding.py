"""Feeding: which tensors others were computed from, by the graph alone."""

from __future__ import annotations

import torch
from torch import nn

from nanscope.capture.feeding import NEAR, feeding, parameters_behind
from nanscope.program.calls import Leaf
from nanscope.program.program import Program


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


def test_the_parameters_behind_what_nobody_recorded() -> None:
    """The program reads what an opaque call made of them; of what it reads itself it needs no telling."""
    behind, read = nn.Parameter(torch.eye(3)), nn.Parameter(torch.ones(3))
    made = torch.linalg.pinv(behind * 2)
    program = Program((Leaf(0, None, "opaque", True, "pinv"), Leaf(1, None, "parameter", True, "")), (), 0)
    assert parameters_behind(program, {0: made, 1: read}) == {id(behind): behind}


def test_no_long_way_is_gone_to_find_a_parameter() -> None:
    """A whole model may stand behind a call."""
    far = nn.Parameter(torch.ones(1))
    made = far * 1.0
    for _ in range(2 * NEAR):
        made = made * 1.0
    assert parameters_behind(Program((Leaf(0, None, "opaque", True, "call"),), (), 0), {0: made}) == {}
