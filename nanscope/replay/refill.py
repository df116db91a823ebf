"""The narrowest change of a recorded program: other numbers for the operands of its origin, at the elements that do the harm."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nanscope.locate.spike import JUMP
from nanscope.program.calls import Call, Leaf, Ref
from nanscope.program.cost import Allowance
from nanscope.program.ops import DIVISIONS, Flow, flow_of
from nanscope.program.perform import perform
from nanscope.program.program import Program
from nanscope.program.summary import broadcasts
from nanscope.replay.patch import Patch, Variant

OPERANDS = (0, 1)
RESULT = -1  # stands for the position of what a call has made


@dataclass(frozen=True, slots=True)
class Fed:
    """One operand of the origin's call, or of a sibling's, or its result. bad: where the result does the harm, with the dimensions that the
    call has taken away; content: the operand's own numbers."""

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


Numbers: TypeAlias = tuple[Tensor, Tensor]  # where an operand gets others, and which
Filling: TypeAlias = Callable[[Fed], Numbers | None]  # of one operand; None leaves it


@dataclass(frozen=True, slots=True)
class Mended:
    """What a call gets, or gives, in the place of what it did. bad: where its result does harm. numbers: by position."""

    bad: Tensor
    numbers: Mapping[int, Numbers]


Fill: TypeAlias = Callable[[Call, Tensor, Mapping[int, Tensor]], Mended | None]  # of a call, from its result and all values


def refilled(
    patch: Patch, filling: Filling, name: str, label: str, *, alike: bool = False, positions: Sequence[int] = OPERANDS
) -> Variant | None:
    """Return the program with other numbers in the operands of its origin, those of its siblings included; None if none is changed.

    alike: see `offending`. positions: of what is changed, operands and, last, the RESULT. Of siblings that read what others have made, as
    in layers one after the other, each is looked at with those before it mended: what had come to it does not count.
    """
    program, tensors = patch.program, patch.tensors
    filled = _others(patch, filling, alike, positions)
    for out, mended in filled.items():
        for position, (where, others) in mended.numbers.items():
            index = program.producers[out]
            call = program.calls[index]
            if position == RESULT:
                made = program.new_id()
                call = replace(call, outs=(made, *call.outs[1:]))
                program = replace(program, calls=(*program.calls[:index], call, *program.calls[index + 1 :]))
                program, _ = _filled(program, tensors, made, where, others, index + 1, out)
                continue
            arg = call.args[position]
            assert isinstance(arg, Ref)
            program, fresh = _filled(program, tensors, arg.id, where, others, index)
            args = tuple(Ref(fresh) if place == position else other for place, other in enumerate(call.args))
            program = replace(program, calls=(*program.calls[: index + 1], replace(call, args=args), *program.calls[index + 2 :]))
    return Variant(name, label, program, tensors) if filled else None


def harmful(patch: Patch, filling: Filling, alike: bool) -> dict[int, Tensor]:
    """Return where the results of the origin's call and its siblings do harm of themselves, by their ids. filling: mends their operands."""
    return {out: one.bad for out, one in _others(patch, filling, alike, OPERANDS).items()}


def _others(patch: Patch, filling: Filling, alike: bool, positions: Sequence[int]) -> dict[int, Mended]:
    """Return what the origin's call and its siblings get and give in the place of what they did, by their results."""
    fill = partial(_fill, patch, filling, alike, positions)
    return (_in_order if _follow_each_other(patch) else _as_recorded)(patch, fill)


def _follow_each_other(patch: Patch) -> bool:
    """Does one of the calls that the origin's line stands for read what another one has made?"""
    own, reached = set(patch.siblings()), set[int | None]()
    for index in range(min(own), max(own) + 1) if len(own) > 1 else ():
        call = patch.program.calls[index]
        reads = not reached.isdisjoint(call.inputs())
        if reads and index in own:
            return True
        if reads or index in own:
            reached.update(call.outs)
    return False


def _as_recorded(patch: Patch, fill: Fill) -> dict[int, Mended]:
    """Return what becomes of each sibling, by its result."""
    found: dict[int, Mended] = {}
    for call in [patch.program.calls[index] for index in patch.siblings()]:
        if (out := call.outs[0]) is not None and (own := fill(call, patch.values[out], patch.values)):
            found[out] = own
    return found


def _in_order(patch: Patch, fill: Fill) -> dict[int, Mended]:
    """Return the same of siblings that follow each other."""
    found: dict[int, Mended] = {}
    own = set(patch.siblings())

    def mending(
        call: Call,
        values: Mapping[int, Tensor],
        dtype: torch.dtype | None,
        device: torch.device,
        grad: bool,
        allowance: Allowance | None,
        index: int,
    ) -> list[Any]:
        made, out = perform(call, values, dtype, device, grad, allowance, index), call.outs[0]
        mended = fill(call, made[0], values) if index in own and out is not None else None
        if mended is None or out is None:
            return made
        found[out] = mended
        operands = {place: one for place, one in mended.numbers.items() if place != RESULT}
        content = {-1 - place: torch.where(*one, values[_read(call, place)]) for place, one in operands.items()}
        args = tuple(Ref(-1 - place) if place in operands else arg for place, arg in enumerate(call.args))
        made = perform(replace(call, args=args), ChainMap(content, dict(values)), dtype, device, grad, allowance, index)
        return [torch.where(*mended.numbers[RESULT], made[0]), *made[1:]] if RESULT in mended.numbers else made

    calls = patch.program.calls[: max(own) + 1]
    last = next(out for out in calls[-1].outs if out is not None)
    replace(patch.program, calls=calls, output=last).execute(patch.tensors, backward=False, ends=True, performer=mending)
    return found


def _fill(
    patch: Patch,
    filling: Filling,
    alike: bool,
    positions: Sequence[int],
    call: Call,
    result: Tensor,
    values: Mapping[int, Tensor],
) -> Mended | None:
    """Return what becomes of one call, None if nothing does. result: what it makes of values."""
    out = call.outs[0]
    assert out is not None
    bad = offending(patch, out, alike=alike, content=result)
    found: dict[int, Numbers] = {}
    for position in positions if bool(bad.any()) else ():
        value = _read(call, position)
        if position != RESULT and value not in values:
            continue
        content = result if position == RESULT else values[value]
        if flow_of(patch.call.op) is Flow.POINTWISE and content.dim() < bad.dim() and broadcasts(content.shape, bad.shape):
            content = content.expand(bad.shape)  # one number for many elements, the healthy ones included
        own = filling(Fed(position, _with_dims(bad, call, content), content))
        if own is not None:
            found[position] = own
    return Mended(bad, found) if found else None


def _read(call: Call, position: int) -> int:
    """The value that a call reads as an argument, −1 if that is none."""
    arg = call.args[position] if 0 <= position < len(call.args) else None
    return arg.id if isinstance(arg, Ref) else -1


def going_into(bad: Tensor, call: Call, content: Tensor) -> Tensor | None:
    """Return which elements of an operand go into bad ones of the result of a call, None if that cannot be told."""
    return Fed(0, _with_dims(bad, call, content), content).where


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


def _filled(
    program: Program, tensors: dict[int, Tensor], value: int, bad: Tensor, numbers: Tensor, index: int, made: int | None = None
) -> tuple[Program, int]:
    """Put in, before a call, what gives a value these numbers where it is bad. made: the id of the result, which is returned, too."""
    mark, filling, fresh = (program.new_id() + n for n in range(3))
    fresh = fresh if made is None else made
    call = program.calls[min(index, len(program.calls) - 1)]
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


def offending(patch: Patch, value: int, *, alike: bool = False, content: Tensor | None = None) -> Tensor:
    """Return where a value is what does the harm: not finite; if the origin is a finite number, that one, and what stands out with it.

    alike: only what is as bad as the origin is; another infinity beside a NaN may stand there on purpose (a vocabulary mask). content: of
    the value, where it is another one than was recorded.
    """
    content, worst = patch.values[value] if content is None else content, patch.origin.value
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
