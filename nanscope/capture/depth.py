"""Listens inside modules, where the tape sleeps: of each call the extrema of what it makes, and where the first infinity came from.

Nothing that a model computes is held: of a tensor two numbers are taken, on a GPU as scalars that stay there until somebody asks. An
infinity that a call makes of finite numbers is an overflow. Whether anything came of it is not known here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from nanscope.capture.entries import Operator, tensors_of
from nanscope.capture.log import RING
from nanscope.capture.sites import NOWHERE, Author, Authors, Place, above_handler
from nanscope.capture.source import apart
from nanscope.program.local import is_plain, memory_of
from nanscope.program.ops import DATA_FACTORIES, SELECTORS, SILENT, Flow, flow_of
from nanscope.torch_inside import has_schema

CALLS = 1 << 14  # of one step that are listened to
COLLECTIVES = ("c10d.", "_c10d")
ABOVE = 3  # of our own functions, above whoever makes a call

Read = tuple[Operator, frozenset[int]]  # a call between `before` and `after`, and the numbers of what had written what it reads


@dataclass(slots=True)
class Measured:
    """What one call made. low, high: its extrema. reads: numbers of the marks of what it read. makes: it computes, and moves nothing."""

    op: str
    dtype: torch.dtype
    low: Tensor
    high: Tensor
    reads: frozenset[int]
    place: Place
    makes: bool


@dataclass(frozen=True, slots=True)
class Room:
    """How near a call came to the end of its dtype. bits: doublings that were left."""

    bits: float
    op: str
    dtype: torch.dtype
    place: Place


@dataclass(frozen=True, slots=True)
class Sounding:
    """What was heard before one backward pass. overflows: calls that made an infinity of finite numbers, with place. room: the least."""

    overflows: tuple[tuple[str, Place], ...] = ()
    room: Room | None = None

    def joined(self, other: Sounding) -> Sounding:
        """Return what both come to."""
        rooms = [one.room for one in (self, other) if one.room is not None]
        both = {(op, *apart(*place)): (op, place) for op, place in (*self.overflows, *other.overflows)}
        return Sounding(tuple(both.values()), min(rooms, key=lambda room: room.bits, default=None))


@dataclass(slots=True)
class Heard:
    """What a listener has noted. marks: still on the device. settled: what those before came to."""

    marks: list[Measured] = field(default_factory=list)
    settled: Sounding = Sounding()

    def settle(self) -> None:
        """Make room for another call of a model: not all of them are differentiated."""
        if self.marks and self.marks[0].low.is_cpu:
            self.settled = self.ask()
            self.marks.clear()
        elif len(self.marks) > CALLS // 2:
            self.marks.clear()

    def ask(self) -> Sounding:
        """Return what it comes to, in one transfer for each dtype."""
        return self.settled.joined(self._sounding())

    def _sounding(self) -> Sounding:
        low, high = _numbers([mark.low for mark in self.marks]), _numbers([mark.high for mark in self.marks])
        bad = {number for number, pair in enumerate(zip(low, high, strict=True)) if not all(map(math.isfinite, pair))}
        overflows, room = list[tuple[str, Place]](), Room(math.inf, "", torch.float32, NOWHERE)
        for number, mark in enumerate(self.marks):
            if not mark.makes:
                continue
            size = max(abs(low[number]), abs(high[number]))
            if number not in bad and size > 0:
                bits = math.log2(torch.finfo(mark.dtype).max) - math.log2(size)
                room = Room(bits, mark.op, mark.dtype, mark.place) if bits < room.bits else room
            elif math.isinf(size) and bad.isdisjoint(mark.reads):
                overflows.append((mark.op, mark.place))
        return Sounding(tuple(overflows), room if room.op else None)


def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    found = [0.0] * len(scalars)
    kinds = {(scalar.dtype, scalar.device) for scalar in scalars}
    for dtype, device in kinds:
        places = [place for place, scalar in enumerate(scalars) if (scalar.dtype, scalar.device) == (dtype, device)]
        for place, number in zip(places, torch.stack([scalars[place] for place in places]).double().tolist(), strict=True):
            found[place] = number
    return found


class Depth:
    """Stands in for a tape while a model is called. broken: why it listens no more, "" while all is well."""

    def __init__(self) -> None:
        self.operators: dict[int, Operator] = {}  # by the identity of an overload, which an operator holds
        self.broken = ""
        self._heard = Heard()
        self._wrote: dict[int, frozenset[int]] = {}  # address of memory → numbers of the marks of what is in it
        self._authors = Authors()

    def begin(self) -> None:
        """A model is called: what lay in memory before may be something else by now."""
        self._wrote.clear()
        self._heard.settle()

    def take(self) -> Heard:
        """Return what was heard so far, and begin anew."""
        heard, self._heard, self.broken = self._heard, Heard(), ""
        self._wrote.clear()
        return heard

    def look_up(self, func: Any) -> Operator | None:
        """Add what there is to know of an overload to `operators`; None if it is not one."""
        if not has_schema(func):  # a higher-order operator
            return None
        if len(self.operators) >= RING:
            self.operators.clear()  # somebody makes operators as he goes
        operator = self.operators[id(func)] = Operator.of(func)
        return operator

    def before(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Read | None:
        """Note what a call is about to read; None if nothing is asked of it."""
        if operator.name in SILENT or operator.overload.startswith(COLLECTIVES) or len(self._heard.marks) >= CALLS:
            return None
        reads = frozenset[int]()
        for tensor in tensors_of([args, list(kwargs.values())] if kwargs else args):
            reads |= self._known(tensor)
        return operator, reads

    def after(self, noting: Read, args: tuple[Any, ...], result: Any) -> None:
        """Measure what the call made."""
        operator, reads = noting
        if operator.view and not operator.mutable:
            return
        made = tensors_of(args[:1] if operator.mutable else result)
        unknown = operator.name in DATA_FACTORIES
        name = operator.name.rstrip("_")
        makes = flow_of(name) not in (Flow.MOVE, Flow.CREATE) and name not in SELECTORS and not _is_infinite(args)
        for tensor in made:
            if unknown:
                self._wrote.pop(memory_of(tensor), None)
            elif _is_measured(tensor):
                self._measure(name, tensor, reads, makes, operator.mutable)

    def _known(self, tensor: Tensor) -> frozenset[int]:
        """The marks of what is in a tensor; what came in from outside and is no weight is measured when it is first read."""
        if not _is_measured(tensor):
            return frozenset()
        known = self._wrote.get(memory_of(tensor))
        if known is not None:
            return known
        if isinstance(tensor, nn.Parameter):
            known = self._wrote[memory_of(tensor)] = frozenset()
            return known
        return self._measure("input", tensor, frozenset(), False, False)

    def _measure(self, name: str, tensor: Tensor, reads: frozenset[int], makes: bool, adds: bool) -> frozenset[int]:
        memory, marks = memory_of(tensor), self._heard.marks
        low, high = torch.aminmax(tensor.detach())
        marks.append(Measured(name, tensor.dtype, low, high, reads, self._place() if makes else NOWHERE, makes))
        number = frozenset((len(marks) - 1,))
        self._wrote[memory] = known = number | self._wrote.get(memory, number) if adds else number
        return known

    def _place(self) -> Place:
        frame: FrameType | None = sys._getframe(ABOVE)
        while frame is not None:
            author, _ = self._authors.of(frame.f_code)
            if author is Author.RELAY and (issuer := above_handler(frame)) is not None:
                frame = issuer
            elif author:
                return frame.f_code, frame.f_lasti
            else:
                frame = frame.f_back
        return NOWHERE


def _is_measured(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1 and is_plain(tensor) and tensor.numel() > 0 and memory_of(tensor) > 0


def _is_infinite(args: Sequence[Any]) -> bool:
    """Does the code itself give an infinity?"""
    return any(isinstance(arg, float) and math.isinf(arg) for arg in _flat(args))


def _flat(args: Sequence[Any]) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _flat(arg)
        else:
            yield arg
