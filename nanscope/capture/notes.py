"""Calls as they came: what was called, what it was given and has made. Nothing of it is understood before somebody asks.

Most of what a trainer computes outside of its models are numbers for its log, which nobody holds any more a moment later. To note such a
call costs a fraction of what it costs to understand it, that is to number its values and to find them again; and what nobody holds by the
time that somebody asks is never understood at all.

What tells a tensor from others at the time of the call is noted with it: how often it was written to, where it lay, whether it wanted a
gradient. Whoever writes to memory that others know asks first, and so only what writes unseen can change anything between a call and its
understanding. A write to what only waiting calls have made and know waits as well, and so does one to a list of tensors: no program has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from nanscope.capture.entries import Operator, tensors_of
from nanscope.capture.sites import Callers, Place
from nanscope.capture.values import Fleeting
from nanscope.program.numbers import is_finite
from nanscope.torch_inside import base_of, storage_uses, uses, writes_counted

LIGHT = 1 << 21  # bytes of a tensor that waits; a larger one is held for no longer than anybody needs it
WHOLE = 1 << 22  # and of the memory that a view which waits is a part of
WEIGHT = 1 << 24  # bytes of all that waits, read or made, and at most a sixteenth of what may be held
CALL = WEIGHT >> 10  # and what a call weighs by itself
ANYWAY = 8  # times as much may wait of what lasts for a step anyway
GRAPH = WEIGHT >> 6  # and one for each argument with a gradient, which may keep the activations of a model
ALIASED = 2  # holders of a piece of memory: a tensor, and who counts them
ENDS = 4  # numbers that may be losses which were thrown away, between two backward passes
FRAMES = 3  # of ours between a call and its noting
OURS = 3  # references to a result that nobody else holds: its note's, and two while they are counted

NOBODY = -1  # no call that waits

ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout})

Seen = tuple[int, int, torch.Size, bool]  # of an argument: how often it was written to, address, shape, whether it wanted a gradient
Made = tuple[int, int, torch.Size, tuple[int, ...]]  # of a result: how often it was written to, address, shape, strides


class RawCall(NamedTuple):
    """A call that was made. results: none of one that has written to a list, what was written to of one that has written to a tensor, and
    `Fleeting` ones of one that has read no tensor. seen: of each tensor among the arguments, in order. made: of each result.
    place: in the trainer's code. grad: was autograd on? module: the part of the model that it was made in. destroyed: a copy of what a
    write to the weights of a model that nobody trains has destroyed, see `Trailing`."""

    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Sequence[Any]
    seen: list[Seen]
    made: list[Made]
    place: Place
    grad: bool
    module: str
    destroyed: Tensor | None


Raw = tuple[Any, ...]  # what makes a `RawCall`: making it takes as long as all else


class Later:
    """What is done among calls that wait, when those before it have been understood. holds: tensors that it asks about."""

    __slots__ = ("act", "holds", "void")

    def __init__(self, act: Callable[[], object], void: Callable[[], object], holds: Sequence[Tensor] = ()) -> None:
        self.act, self.void, self.holds = act, void, holds


class SoFar:
    """How many calls there were at some moment: it is counted when somebody asks. number: None until then. settle: has it counted."""

    __slots__ = ("_settle", "number")

    def __init__(self, number: int | None, settle: Callable[[], None] = lambda: None) -> None:
        self.number, self._settle = number, settle

    @property
    def calls(self) -> int:
        """So many."""
        if self.number is None:
            self._settle()
        return self.number or 0


NONE = SoFar(0)


@dataclass(slots=True)
class Closed:
    """What is left of the calls of a step. calls: is there one that somebody may come back for? written: tensors that were written to as a
    list. later: what was to be done between the calls. before: those that he may come back for, where weights were written to after them,
    the last first: they are in no stretch. trailed: where that was."""

    calls: bool = False
    trailed: set[int] = field(default_factory=set)
    before: Sequence[RawCall | Later] = ()
    written: list[Tensor] = field(default_factory=list)
    later: list[Later] = field(default_factory=list)


class Notes:
    """The calls that wait to be understood. module: the part of the model that they are made in. budget: bytes that may be held. weight: of
    all that waits; with more than `most` it is time to understand it."""

    def __init__(self, callers: Callers, budget: int) -> None:
        self.pending: list[Any] = []  # of `Raw` and `Later`
        self.module = ""
        self._start = 0  # of the running stretch
        self.over: dict[int, Tensor] = {}  # what those have read that are left of an earlier step, and nobody will come back for
        self._callers = callers
        self._ends = 0  # since the last backward pass
        # Identities of what waiting calls read and made, which nothing else can have as long as they wait: which call has made it, if any.
        self._light: dict[int, int] = {}
        self._fleeting: dict[int, int] = {}  # the same of what was made of no tensor, which may be gone
        self.weight, self.most = 0, min(WEIGHT, budget >> 4)
        self.taken = 0  # times that what waits was taken

    def add(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, destroyed: Tensor | None = None) -> bool:
        """Note a call that was made and has written to no tensor that others know; False if it has to be understood at once."""
        results = (result,) if type(result) is Tensor or destroyed is not None else result if type(result) in (tuple, list) else ()
        if not (results or operator.mutable) or (kwargs and not ATOMS.issuperset(map(type, kwargs.values()))):
            return False
        seen: list[Seen] = []
        made: list[Made] = []
        fresh: list[int] = []
        weight = CALL
        try:
            read = self._read(args, seen, fresh, operator.lasting)
            if read < 0:
                return False
            for item in results:
                size = _size_of(item) if type(item) is Tensor or destroyed is not None else -1
                if size < 0 or (operator.counts and item.is_floating_point()):
                    return False
                weight += 0 if operator.view else size  # what it is a part of has been weighed
                writes = writes_counted(item) + operator.mutable  # a write is counted when it is over
                made.append((writes, item.data_ptr(), item.shape, item.stride()))
        except RuntimeError:  # no memory of its own, or in inference mode
            return False
        self.weight += weight + read + (0 if destroyed is None else destroyed.nbytes)
        light, number = self._light, len(self.pending)
        for known in fresh:
            light[known] = NOBODY
        if seen or not results or destroyed is not None:
            self._makes(operator, results, number)
        else:  # what a factory makes torch hands out as a copy if somebody else holds it
            results = [Fleeting(item) for item in results]
            self._fleeting |= {item.identity: number for item in results}
        place = self._callers.caller(FRAMES)
        self.pending.append((operator, args, kwargs, results, seen, made, place, torch.is_grad_enabled(), self.module, destroyed))
        if destroyed is not None:
            self.begin_stretch()
        return True

    def can_wait(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], lasting: bool) -> bool:
        """May a call wait with these arguments? Whoever writes asks before."""
        try:
            return ATOMS.issuperset(map(type, kwargs.values())) and self._read(args, [], [], lasting) >= 0
        except RuntimeError:  # no memory of its own, or in inference mode
            return False

    def _makes(self, operator: Operator, results: Sequence[Tensor], number: int) -> None:
        for item in results:
            if operator.mutable or id(item) not in self._light:  # who hands on an argument has not made that
                self._light[id(item)] = number

    def _read(self, args: Sequence[Any], seen: list[Seen], fresh: list[int], lasting: bool) -> int:
        """Note what tensors among arguments are at this moment, and return the bytes that are held for them alone; −1 if one of them, or
        another argument, cannot wait. fresh: takes the identities of those that no other waiting call holds. lasting: see `Operator`."""
        weight = 0
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                wanted = arg.requires_grad
                if id(arg) not in self._light:
                    if kind is Parameter or (lasting and not wanted):  # which the model holds, too; but not for ever, where no step comes
                        size = 0 if kind is Parameter else arg.nbytes // ANYWAY
                        size = size if arg.layout is torch.strided and not arg.is_nested else -1
                    else:
                        size = _size_of(arg)
                        if size >= 0 and base_of(arg) is not None:
                            whole = arg.untyped_storage().nbytes()
                            size = whole if whole <= WHOLE else -1
                    if size < 0:
                        return -1
                    weight += size
                    fresh.append(id(arg))
                if wanted and kind is Tensor:
                    weight += GRAPH
                seen.append((writes_counted(arg), arg.data_ptr(), arg.shape, wanted))
            elif kind not in ATOMS:
                inner = self._read(arg, seen, fresh, lasting) if kind in (list, tuple) else -1
                if inner < 0:
                    return -1
                weight += inner
        return weight

    def maker(self, tensor: Tensor) -> RawCall | None:
        """Return the call that waits and has made a tensor, None if there is none."""
        number = self._light.get(id(tensor), NOBODY)
        if number == NOBODY:
            number = self._fleeting.get(id(tensor), NOBODY)
            if number == NOBODY or not any(item.handle.is_of(tensor) for item in self.pending[number][3]):
                return None
        return RawCall._make(self.pending[number])

    def own(self, tensor: object) -> bool:
        """Do only calls that wait know the memory of a tensor, which can make it again? Then a write to it may wait as well."""
        made = self.maker(tensor) if type(tensor) is Tensor else None
        if type(tensor) is not Tensor or made is None or not (made.operator.replayable or made.operator.may_wait):
            return False
        if made.operator.view and not made.operator.mutable:
            return False
        return base_of(tensor) is None and storage_uses(tensor) <= ALIASED

    def is_new(self, tensor: Tensor) -> bool:
        """Has no call that waits read or made a tensor, and does nobody else share its memory?"""
        known = id(tensor) in self._light or self.maker(tensor) is not None
        return not known and base_of(tensor) is None and storage_uses(tensor) <= ALIASED

    def last(self) -> RawCall:
        """Return the call that was just added."""
        return RawCall._make(self.pending[-1])

    def _may_be_a_loss(self, item: Tensor) -> bool:
        """Is it a number that is not finite, as can be told without waiting for a device? Each holds a graph, so a few are enough."""
        return self._ends < ENDS and item.numel() == 1 and item.is_cpu and item.is_floating_point() and not bool(is_finite(item))

    def has_passed(self) -> None:
        """A backward pass is over."""
        self._ends = 0
        self.begin_stretch()

    def later(self, what: Later) -> None:
        """Have something done when all calls so far have been understood."""
        self.pending.append(what)

    def begin_stretch(self) -> None:
        """A stretch of calls begins: a backward pass has ended, or a call was made that does not wait, or has written to weights."""
        self._start = len(self.pending)

    def stretch(self) -> list[Raw]:
        """Return the calls of the running stretch."""
        return [one for one in self.pending[self._start :] if type(one) is tuple]

    def close(self, done: Set[int]) -> Closed:
        """A step is over in which nothing was wrong: of the calls before the running stretch, keep those that somebody may come back for;
        the stretch begins with them.

        done: calls, by identity, whose results nobody will come back for, whoever holds them.
        """
        pending, running = self.pending[: self._start], self.pending[self._start :]
        self.pending.clear()
        closed, over, one = Closed(), set(self.over), None
        while pending:
            one = pending.pop()  # and no other reference to it is left
            if isinstance(one, Later):
                closed.later.append(one)
            elif not one[3]:
                closed.written += one[1][0]
            elif one[9] is not None:
                closed.trailed.add(one[5][0][1])
            elif id(one) not in done:
                self.pending.append(one)
            elif one[4]:
                over.update(map(id, one[3]))
        one = None
        self.pending.reverse()
        closed.later.reverse()
        left = [_without_what_is_over(call) for call in reversed(self.take()) if not isinstance(call, Later)]
        read = (tensor for call in left for tensor in tensors_of(call[1]))
        self.over = {id(tensor): tensor for tensor in read if id(tensor) in over}
        if closed.trailed:
            closed.before, left = [RawCall._make(call) for call in reversed(left)], []
        closed.calls = bool(left)
        self._go_on_with([*left, *running])
        return closed

    def let_go_of_lasting(self) -> list[Tensor]:
        """Hold no gradients any more that calls have read which wait, before a stretch begins. Returns what was written to as a list."""
        written, left = list[Tensor](), list[Raw | Later]()
        for one in self.pending:
            if isinstance(one, Later):
                left.append(one)
            elif not one[3]:
                written += one[1][0]
            else:
                left.append(_without_what_is_over(RawCall._make(one)))
        self.pending.clear()
        self._light, self._fleeting, self.weight = {}, {}, 0
        self.taken += 1
        self._go_on_with(left)
        self.begin_stretch()
        return written

    def _go_on_with(self, running: list[Raw | Later]) -> None:
        self.pending += running
        for number, call in enumerate(running):
            if not isinstance(call, Later):
                self.weight += CALL
                for tensor in tensors_of(call[1]):
                    self._light.setdefault(id(tensor), NOBODY)
                if call[4]:
                    self.weight += sum([item.nbytes for item in call[3]])
                    self._makes(call[0], call[3], number)
                else:
                    self._fleeting |= {item.identity: number for item in call[3]}

    def forget(self) -> None:
        """Nothing waits any more, and nobody will ask."""
        for one in self.take():
            if isinstance(one, Later):
                one.void()

    def take(self, ends: bool = False) -> list[RawCall | Later]:
        """Return what waits, the last first, but for what has come to nothing: nobody holds what it has made, nor what was made of that.

        ends: of numbers with a gradient that are not finite, and of which none was made, a few are returned all the same: one may be a loss
        that was thrown away. Another thread may add a call meanwhile: that waits for the next time.
        """
        pending = self.pending[:]
        del self.pending[: len(pending)]
        self._light, self._fleeting, self.weight, self._start = {}, {}, 0, 0
        self.taken += 1
        left: list[RawCall | Later] = []
        read: set[int] = set()  # tensors that what is left reads
        went_on: set[int] = set()  # those of which something was made that has a gradient
        references = _written(pending)
        while pending:
            noted = pending.pop()  # with which go its references to its arguments, unless it is left
            if isinstance(noted, Later):
                left.append(noted)
                read.update(map(id, noted.holds))
                continue
            operator, _, _, results, seen, *_, destroyed = noted
            for item in results:
                if destroyed is not None:
                    break  # the model holds that memory
                if not seen:
                    if not item.handle.expired() or (item.identity in read and not item.handle.gone()):
                        break
                    continue
                ours = OURS - 1 + references.get(id(item), 1)
                if id(item) in read or uses(item) > 1:
                    break
                if sys.getrefcount(item) > ours and (id(item) in references or sys.getrefcount(item) > ours + _times_in(noted[1], item)):
                    break
                if not operator.view and storage_uses(item) > ALIASED:
                    break  # by another tensor that torch made without a call, as `x.data`
                if ends and item.requires_grad:
                    if id(item) not in went_on and self._may_be_a_loss(item):
                        self._ends += 1
                        break
                    went_on.update(map(id, tensors_of(noted[1])))
            else:
                if results:
                    _count(noted, references, -1)
                    continue
            _count(noted, references, -1)
            if operator.draws:  # what it was drawn from need not be made again for it
                noted = (operator, (), *noted[2:])
            left.append(RawCall._make(noted))
            read.update(map(id, tensors_of(noted[1])))
        return left


def _times_in(args: Sequence[Any], item: object) -> int:
    """How often is it among the arguments of a call, which may hand on what it was given?"""
    return sum([arg is item for arg in args])


def _without_what_is_over(call: RawCall) -> Raw:
    """A call of a step that is over, whose result somebody holds: the gradients that a norm was taken of are not held for that."""
    return (call.operator, (), *call[2:]) if call.operator.lasting else tuple(call)


def _written(pending: Sequence[Raw | Later]) -> dict[int, int]:
    """Of tensors that calls which wait have written to: how often these calls refer to them, by identity."""
    calls = [one for one in pending if not isinstance(one, Later)]
    found = {id(one[3][0]): 0 for one in calls if one[0].mutable and one[3] and one[9] is None}
    for one in calls if found else ():
        _count(one, found, 1)
    return found


def _count(call: Raw, references: dict[int, int], more: int) -> None:
    for item in (*call[1], *call[3]) if references else ():
        if id(item) in references:
            references[id(item)] += more
        elif type(item) is list or type(item) is tuple:
            for one in tensors_of(item):
                if id(one) in references:
                    references[id(one)] += more


def _size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor, −1 if it cannot wait."""
    size = tensor.nbytes
    if size > LIGHT or tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype.is_complex:
        return -1
    return size
