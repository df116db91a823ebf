"""A batch that is put together of many tensors: of what was sampled from a replay buffer, or gathered step by step of a rollout.

Which ones it is put together of is another list in each step, and so is what they came of. What it holds is all that a loss reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanscope.program.calls import Call, Leaf
from nanscope.program.ops import JOINS
from nanscope.program.program import Program

MANY = 8  # more than a prompt and its answer, or what is accumulated


def joins_many(name: str, args: tuple[Any, ...]) -> bool:
    """Does a call put many tensors together?"""
    return name in JOINS and bool(args) and isinstance(args[0], (list, tuple)) and len(args[0]) >= MANY


def begun_at_joins(program: Program) -> Program:
    """Return a program as it begins with what was put together of many tensors without a gradient; itself if nothing was."""
    joins = [call for call in program.calls if joins_many(call.name, call.args)]
    if not joins:
        return program
    without = set(program.without_gradient())
    begun = {call.outs[0]: call for call in joins if call.outs[0] in without}
    calls = tuple(call for call in program.calls if call.outs[0] not in begun)
    leaves = (_leaf_of(program, value, call) for value, call in begun.items() if value is not None)
    return replace(program, leaves=(*program.leaves, *leaves), calls=calls).slice()


def _leaf_of(program: Program, value: int, call: Call) -> Leaf:
    site = program.site_of(call)
    return Leaf(value, None if site is None else site.name, "cut", False)
