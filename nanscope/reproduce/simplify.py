"""Plain numbers: 0, 1 and 0.5 wherever it fails alike with them, few digits elsewhere, float32 instead of rarer dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nanscope.locate.names import Names
from nanscope.program.calls import Ref
from nanscope.program.ops import DIVISIONS
from nanscope.reproduce.alike import Case, Failed, Seeded
from nanscope.reproduce.literals import APART
from nanscope.reproduce.literals import FEW as LISTED
from nanscope.reproduce.shorten import Edit

PLAIN = (0.0, 1.0, 0.5, -1.0)
DIGITS = (1, 2, 3, 4, 5)
FEW = 48  # elements of a leaf that are made simpler one by one


def simplifications(case: Case, failed: Failed, names: Names) -> Iterator[Edit]:
    """Yield what makes the numbers that come in simpler: all of a leaf, then halves of it, then, where few are left, one by one."""
    for leaf in case.program.leaves:
        tensor = case.tensors[leaf.id]
        if tensor.dtype in (torch.float64, torch.float16, torch.bfloat16):
            yield f"float32 {leaf.id}", _with(case, leaf.id, tensor.float())
    for leaf in sorted(case.program.leaves, key=lambda leaf: leaf.id in _of_origin(failed)):
        tensor = case.tensors[leaf.id]
        if tensor.is_complex() or not tensor.numel() or _is_plain(tensor):
            continue
        kinds = _kinds(tensor, divides=_divides(case, leaf.id))
        for number in (*kinds, *_own(tensor)):
            yield f"all {leaf.id} {number}", _with(case, leaf.id, torch.full_like(tensor, number))
        if tensor.numel() > 1:
            yield from _halves(case, leaf.id, tensor, kinds[0])
        yield from _one_by_one(case, leaf.id, tensor, kinds)


def _of_origin(failed: Failed) -> set[int]:
    """What the origin is made of by one call: its numbers are the last to be touched."""
    return {operand.id for operand in failed.origin.operands} | {failed.origin.value_id}


def _divides(case: Case, leaf: int) -> bool:
    """Is a leaf divided by? Then 0 is no plain number."""
    readers = case.program.readers(leaf)
    return any(call.name in DIVISIONS and call.args[DIVISIONS[call.name]] == Ref(leaf) for call in readers)


def _kinds(tensor: Tensor, *, divides: bool) -> tuple[float, ...]:
    if divides:
        return (1.0, 0.5) if tensor.is_floating_point() else (1,)
    if tensor.is_floating_point():
        return PLAIN
    return (1, 0)


def _own(tensor: Tensor) -> list[float]:
    """Its own extremes, in one digit: all of them may have a part in it."""
    if not tensor.is_floating_point():
        return []
    numbers = tensor.double()[torch.isfinite(tensor)]
    ends = [float(numbers.max()), float(numbers.min())] if numbers.numel() else []
    found = [float(f"{end:.0e}") for end in ends] + [_away(end) for end in ends if end]
    return [number for number in found if _holds(tensor.dtype, number)]


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Is a number within the range of a dtype? Rounded up, it may not be."""
    return not dtype.is_floating_point or abs(number) <= torch.finfo(dtype).max


def _away(number: float) -> float:
    """One digit, and no smaller."""
    unit = 10.0 ** math.floor(math.log10(abs(number)))
    return math.copysign(float(f"{math.ceil(abs(number) / unit) * unit:.0e}"), number)


def draws(case: Case, failed: Failed, names: Names) -> Iterator[Edit]:
    """Yield what draws the numbers of a leaf from a seed, where there are too many to be read."""
    for leaf in case.program.leaves:
        tensor = case.tensors[leaf.id]
        if leaf.id in case.drawn or not tensor.is_floating_point() or tensor.numel() <= LISTED or _apart(tensor) <= APART:
            continue
        numbers = tensor.double()[torch.isfinite(tensor)]
        if numbers.numel() > 1:
            for drawn in (Seeded(1.0, 0.0), Seeded(float(f"{float(numbers.std()):.1g}"), float(f"{float(numbers.mean()):.2g}"))):
                yield f"drawn {leaf.id} {drawn}", lambda leaf=leaf, tensor=tensor, drawn=drawn: _drawn(case, leaf.id, tensor, drawn)  # type: ignore[misc]


def _apart(tensor: Tensor) -> int:
    """How many elements are not as most are."""
    return tensor.numel() - int(torch.unique(tensor, return_counts=True)[1].max())


def _drawn(case: Case, leaf: int, tensor: Tensor, drawn: Seeded) -> Case:
    tensors = {**case.tensors, leaf: drawn.numbers(tensor.shape, tensor.dtype)}
    return Case(case.program, tensors, {**case.drawn, leaf: drawn})


def _is_plain(tensor: Tensor) -> bool:
    first = _words(float(tensor.flatten()[0]))
    return (
        first in map(_words, PLAIN[:3])
        and all(_words(number) == first for number in tensor.flatten()[:FEW].tolist())
        and bool((tensor == tensor.flatten()[0]).all())
    )


def _with(case: Case, leaf: int, tensor: Tensor) -> Callable[[], Case]:
    return lambda: Case(case.program, {**case.tensors, leaf: tensor})


def _halves(case: Case, leaf: int, tensor: Tensor, number: float) -> Iterator[Edit]:
    flat = tensor.flatten()
    length = flat.numel()
    while length > 1:
        length = math.ceil(length / 2)
        for start in range(0, flat.numel(), length):
            part = flat[start : start + length]
            if bool((part == number).all()):
                continue
            other = flat.clone()
            other[start : start + length] = number
            yield f"part {leaf} {start} {length}", _with(case, leaf, other.reshape(tensor.shape))
        if flat.numel() / length > 64:
            break


def _words(number: float) -> str:
    return repr(float(number))  # −0 is not 0 here


def _one_by_one(case: Case, leaf: int, tensor: Tensor, kinds: tuple[float, ...]) -> Iterator[Edit]:
    flat = tensor.flatten()
    plain = set(map(_words, kinds))
    other = [place for place, number in enumerate(flat.tolist()) if _words(number) not in plain]
    if len(other) > FEW:
        return
    for place in other:
        now = float(flat[place])
        rounded = [] if not math.isfinite(now) or not tensor.is_floating_point() else [float(f"{now:.{digits - 1}e}") for digits in DIGITS]
        for number in (*kinds, *(number for number in rounded if _holds(tensor.dtype, number))):
            changed = flat.clone()
            changed[place] = number
            if float(changed[place]) == now and math.copysign(1, now) == math.copysign(1, number):
                continue
            yield f"one {leaf} {place} {number}", _with(case, leaf, changed.reshape(tensor.shape))
