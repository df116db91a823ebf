"""Gradients that the trainer's code takes itself, by `torch.autograd.grad` or a transform of `torch.func`: of what, and for what.

force, = torch.autograd.grad(energy.sum(), x)          energy = x.square().sum(-1).sqrt(), and x is 0 somewhere
loss = (model(x) - force).square().mean()              force is no data: it went bad in the backward of that root

Nothing is wrapped. What the engine computes comes past the tape; at the first call of a pass the stack tells what is differentiated. The
calls themselves are not recorded: what they make is known to come of that pass, and a walk that is led to it goes on in its program.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from torch import Tensor

from nanscope.capture.entries import PLAIN, Handle, Value, still_there, tensors_of
from nanscope.capture.modules import Address
from nanscope.capture.source import variables
from nanscope.capture.values import key_of
from nanscope.program.calls import Call, Leaf, Ref
from nanscope.program.local import is_plain
from nanscope.program.program import Program, join
from nanscope.torch_inside import lowered

ENGINE = "_engine_run_backward"  # torch's function that each backward pass comes through
MOST = 8  # passes of which it is known what they differentiated
CROWD = 256  # results with which it is time to look for those that are gone

Part = tuple[Program, dict[int, Tensor]]


@dataclass(frozen=True, slots=True)
class Pass:
    """One of them, by the ids of values. seeds: what the outputs were weighted by."""

    outputs: tuple[int, ...] = ()
    seeds: tuple[int | None, ...] = ()
    inputs: tuple[int, ...] = ()


class Differentiated:
    """The passes of a tape. find: what is known of a tensor. read: leaves that came of one."""

    def __init__(self, find: Callable[[Tensor], Value | None]) -> None:
        self.read: dict[int, Pass] = {}
        self._find = find
        self._task = -1
        self._passes: deque[Pass] = deque(maxlen=MOST)
        self._made: dict[Address, tuple[Pass, Handle]] = {}
        self._crowd = CROWD

    @property
    def any(self) -> bool:
        """May a tensor be there that one of them has made?"""
        return bool(self._made)

    def inside(self, task: int, result: Any) -> None:
        """A call was made in a pass. task: its number."""
        if task != self._task:
            self._task = task
            self._passes.append(self._begun())
        for item in tensors_of(result):
            if is_plain(item):
                self._made[key_of(item, PLAIN)[:4]] = self._passes[-1], Handle(item)
        if len(self._made) > self._crowd:
            self._made = still_there(self._made)
            self._crowd = CROWD + 2 * len(self._made)

    def of(self, tensor: Tensor) -> Pass | None:
        """Return the pass that made a tensor, None if none did."""
        made = self._made.get(key_of(tensor, PLAIN)[:4]) if self._made else None
        return None if made is None or made[1].expired() else made[0]

    def roots(self) -> Iterator[int]:
        """Yield what was differentiated, as long as what came of it is there."""
        alive = {id(made) for made, handle in self._made.values() if not handle.expired()}
        for one in self._passes:
            if id(one) in alive or one in self.read.values():
                yield from (*one.outputs, *(seed for seed in one.seeds if seed is not None), *one.inputs)

    def forget(self) -> None:
        """A backward pass of the trainer's is over: who read what was made for it is gone."""
        self.read.clear()

    def keep(self, values: Container[int]) -> None:
        """Forget the leaves and results that are gone: where the trainer's code takes all gradients itself, no backward pass is over."""
        self.read = {leaf: made for leaf, made in self.read.items() if leaf in values}
        self._made = still_there(self._made)

    def _begun(self) -> Pass:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_name != ENGINE:
            frame = frame.f_back
        found = variables(frame) if frame is not None else {}
        outputs, args = found.get("t_outputs", ()), found.get("args", ())
        if len(args) < 4:
            return Pass()
        given = [self._id(tensor) for tensor in outputs]
        seeds = [self._id(tensor) for tensor in args[0]]
        known = [(out, seed) for out, seed in zip(given, seeds, strict=False) if out is not None]
        inputs = (self._id(tensor) for tensor in args[3] or ())
        return Pass(tuple(out for out, _ in known), tuple(seed for _, seed in known), tuple(one for one in inputs if one is not None))

    def _id(self, tensor: object) -> int | None:
        plain = lowered(tensor) if isinstance(tensor, Tensor) else None
        value = self._find(plain) if plain is not None and is_plain(plain) else None
        return None if value is None else value.id


def weighted(part: Part, gradient: Tensor) -> Part:
    """Return a program that ends in a scalar by which its value gets this gradient: what is bad of it, and gets none, it leaves out."""
    program, tensors = part
    seed = program.new_id()
    by_none, kept, product, total = range(seed + 1, seed + 5)
    calls = (
        *program.calls,
        Call("aten.eq.Scalar", (Ref(seed), 0), (), (by_none,), -1, True),
        Call("aten.masked_fill.Scalar", (Ref(program.output), Ref(by_none), 0), (), (kept,), -1, True),
        Call("aten.mul.Tensor", (Ref(kept), Ref(seed)), (), (product,), -1, True),
        Call("aten.sum.default", (Ref(product),), (), (total,), -1, True),
    )
    leaves = (*program.leaves, Leaf(seed, "grad_outputs", "data", False))
    return replace(program, leaves=leaves, calls=calls, output=total), {**tensors, seed: gradient}


def program_of(found: Pass, slice_of: Callable[[int], Part], tensor_of: Callable[[int], Tensor | None]) -> Part | None:
    """Return what a pass differentiated as a program, with gradients for what they were asked for; None if it is gone.

    slice_of: makes the program of a value, and its leaves; raises LookupError. tensor_of: what a value holds, if that is kept.
    """
    try:
        parts = [slice_of(out) for out in found.outputs]
    except LookupError:
        return None
    if not parts:
        return None
    program = join([part for part, _ in parts])
    tensors = {leaf: tensor for _, leaves in parts for leaf, tensor in leaves.items()}
    asked = {one: tensor for one in found.inputs if (tensor := tensor_of(one)) is not None}
    cut = {one: tensor for one, tensor in asked.items() if one in program.producers}
    tensors |= cut
    calls = [call for call in program.calls if cut.keys().isdisjoint(out for out in call.outs if out is not None)]
    leaves = [replace(leaf, diff=leaf.id in asked or leaf.origin == "module") for leaf in program.leaves]
    leaves += [Leaf(one, None, "data", True) for one in cut]
    total, new = -1, program.new_id()
    for out, seed in zip(found.outputs, found.seeds, strict=True):
        weight = None if seed is None else tensor_of(seed)
        if seed is not None and weight is not None and not bool((weight == 1).all()):
            if seed not in tensors:
                leaves.append(Leaf(seed, "grad_outputs", "data", False))
                tensors[seed] = weight
            calls.append(Call("aten.mul.Tensor", (Ref(out), Ref(seed)), (), (new,), -1, True))
            out, new = new, new + 1
        if total < 0:
            total = out
            continue
        calls += [
            Call("aten.sum.default", (Ref(total),), (), (new,), -1, True),
            Call("aten.sum.default", (Ref(out),), (), (new + 1,), -1, True),
            Call("aten.add.Tensor", (Ref(new), Ref(new + 1)), (), (new + 2,), -1, True),
        ]
        total, new = new + 2, new + 3
    whole = replace(program, leaves=tuple(leaves), calls=tuple(replace(call, grad=True) for call in calls), output=total).slice()
    return whole, {leaf.id: tensors[leaf.id] for leaf in whole.leaves if leaf.id in tensors}
