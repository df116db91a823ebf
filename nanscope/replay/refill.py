"""The narrowest change of a recorded program: other numbers for the operands of its origin, at the elements that do the harm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from nanscope.locate.spike import JUMP
from nanscope.program.calls import Call, Leaf, Ref
from nanscope.program.ops import DIVISIONS, Flow, flow_of
from nanscope.program.program import Program
from nanscope.program.summary import broadcasts
from nanscope.replay.patch import Patch, Variant


@dataclass(frozen=True, slots=True)
class Fed:
    """One operand of the origin's call, or of a sibling's. bad: where the result does the harm, with the dimensions that the call has
    taken away; content: the operand's own numbers."""

    position: int
    bad: Tensor
    content: Tensor

    @property
    def where(self) -> Tensor | None:
        """Where it goes into bad elements of the result, None if the two do not broadcast, or it is a mask."""
        if self.content.dtype is torch.bool or self.content.is_complex():
            return None
        if broadcasts(self.bad.shape, self.content.shape):
            return self.bad.expand(self.content.shape)
        if not broadcasts(self.content.shape, self.bad.shape):
            return None
        return self.bad.int().sum_to_size(self.content.shape) > 0


Filling: TypeAlias = Callable[[Fed], tuple[Tensor, Tensor] | None]  # of one operand: where, and by which numbers; None leaves it


def refilled(patch: Patch, filling: Filling, name: str, label: str, *, alike: bool = False) -> Variant | None:
    """Return the program with other numbers in the operands of its origin, those of its siblings included; None if none is changed.

    alike: see `offending`.
    """
    program, tensors = patch.program, patch.tensors
    touched = False
    for out in [patch.program.calls[index].outs[0] for index in patch.siblings()]:
        bad = None if out is None else offending(patch, out, alike=alike)
        if out is None or bad is None or not bool(bad.any()):
            continue
        for position in (0, 1):
            index = program.producers.get(out)
            arg = program.calls[index].args[position] if index is not None and position < len(program.calls[index].args) else None
            if index is None or not isinstance(arg, Ref) or arg.id not in patch.values:
                continue
            content = patch.values[arg.id]
            if flow_of(patch.call.op) is Flow.POINTWISE and content.dim() < bad.dim() and broadcasts(content.shape, bad.shape):
                content = content.expand(bad.shape)  # one number for many elements, the healthy ones included
            filled = filling(Fed(position, _with_dims(bad, program.calls[index], content), content))
            if filled is None:
                continue
            call = program.calls[index]
            program, fresh = _filled(program, tensors, arg.id, *filled, index)
            args = tuple(Ref(fresh) if place == position else other for place, other in enumerate(call.args))
            program = replace(program, calls=(*program.calls[: index + 1], replace(call, args=args), *program.calls[index + 2 :]))
            touched = True
    return Variant(name, label, program, tensors) if touched else None


def _with_dims(bad: Tensor, call: Call, content: Tensor) -> Tensor:
    """What a sum over some dimensions has made, with these as 1."""
    given = call.args[1] if len(call.args) > 1 else ()
    dims = [dim for dim in (given if isinstance(given, tuple) else (given,)) if isinstance(dim, int) and not isinstance(dim, bool)]
    if not bad.dim() or bad.dim() + len(dims) != content.dim() or broadcasts(bad.shape, content.shape):
        return bad
    for dim in sorted(dim % content.dim() for dim in dims):
        bad = bad.unsqueeze(dim)
    return bad


def leaf_refilled(patch: Patch, numbers: Tensor, name: str, label: str) -> Variant:
    """Return the program with other numbers for the bad elements of what came in."""
    value = patch.origin.value_id
    mended = torch.where(offending(patch, value), numbers, patch.values[value])
    return Variant(name, label, patch.program, {**patch.tensors, value: mended})


def _filled(program: Program, tensors: dict[int, Tensor], value: int, bad: Tensor, numbers: Tensor, index: int) -> tuple[Program, int]:
    """Put in, before a call, what gives a value these numbers where it is bad. Returns the id of the result, too."""
    mark, filling, fresh = (program.new_id() + n for n in range(3))
    call = program.calls[index]
    mended = Call("aten.where.self", (Ref(mark), Ref(filling), Ref(value)), (), (fresh,), call.site, call.grad)
    tensors[mark], tensors[filling] = bad.clone(), numbers
    leaves = (*program.leaves, Leaf(mark, "offending", "data", False), Leaf(filling, "neutral", "data", False))
    return replace(program, leaves=leaves, calls=(*program.calls[:index], mended, *program.calls[index:])), fresh


def numbers(content: Tensor, neutral: float, shift: float = 0.0) -> Tensor:
    """Return numbers around a shift beside a neutral one, no two alike: a softmax does not see what is added to a whole row."""
    if not shift:  # all are alike, and take no memory
        one = torch.tensor(neutral if content.is_floating_point() else math.ceil(neutral), dtype=content.dtype, device=content.device)
        return one.expand(content.shape)
    found = neutral + shift * torch.linspace(0.5, 1.5, content.numel(), device=content.device).reshape(content.shape)
    return (found if content.is_floating_point() else found.ceil()).to(content.dtype)


def stands_out(content: Tensor, value: float) -> bool:
    """Is a value out of all proportion to the others of its tensor?"""
    return content.is_floating_point() and bool(content.numel()) and abs(value) > _edge(content)


def _out(content: Tensor) -> Tensor:
    return content.abs() > _edge(content)


def _edge(content: Tensor) -> float:
    """What stands out is beyond this: of numbers of which most are 0, beside the others."""
    sizes = content.detach().double().abs()
    sizes = sizes[sizes > 0]
    return JUMP * float(sizes.median()) if sizes.numel() else math.inf


def offending(patch: Patch, value: int, *, alike: bool = False) -> Tensor:
    """Return where a value is what does the harm: not finite; if the origin is a finite number, that one, and what stands out with it.

    alike: only what is as bad as the origin is; another infinity beside a NaN may stand there on purpose (a vocabulary mask).
    """
    content, worst = patch.values[value], patch.origin.value
    if math.isfinite(worst):
        bad = content == worst
        if value == patch.origin.value_id:
            bad[patch.origin.index] = True  # half precision was shown rounded
        return bad | _out(content) if stands_out(content, worst) else bad
    if not alike:
        return ~torch.isfinite(content)
    if math.isnan(worst):
        return torch.isnan(content)
    return torch.isinf(content) if patch.op in DIVISIONS else content == worst
