"""Calls as they came: what was called, what it was given and has made. Nothing of it is understood before somebody asks.

Most of what a trainer computes outside of its models are numbers for its log, which nobody holds any more a moment later. To note such a
call costs a fraction of what it costs to understand it, that is to number its values and to find them again; and what nobody holds by the
time that somebody asks is never understood at all.

What tells a tensor from others at the time of the call is noted with it: how often it was written to, where it lay, whether it wanted a
gradient. Whoever writes to memory that others know asks first, and so only what writes unseen can change anything between a call and its
understanding: an optimizer does, and what was read in the memory of its weights is then known to be gone (`overwritten`). A write to what
only waiting calls have made and know waits as well, and so does one to a list of tensors: no program has it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nanscope.capture import raw
from nanscope.capture.entries import Operator
from nanscope.capture.makers import NOBODY, Makers
from nanscope.capture.outlasted import Outlasted, may_outlast
from nanscope.capture.overwritten import Overwritten
from nanscope.capture.raw import EACH, Later, Raw, RawCall
from nanscope.capture.sieve import ALIASED, is_row, sifted
from nanscope.capture.sites import Callers
from nanscope.capture.spans import Spans
from nanscope.capture.unseen import unseen
from nanscope.capture.values import Fleeting
from nanscope.capture.weighing import CALL, GRAPH, WEIGHT, held_for, size_of
from nanscope.program.numbers import is_finite
from nanscope.torch_inside import DETACH_IS_SEEN_TWICE, base_of, storage_uses, writes_counted

ENDS = 4  # numbers that may be losses which were thrown away, between two backward passes
FRAMES = 3  # of ours between a call and its noting
IDLE = 96  # calls of a rollout, say: most are metrics, or come to a number that is drawn. Six objects each: 700 call Python's collector
ELSEWHERE = -1  # where nobody lies
SHAPES = 4096  # that are remembered
LEFT = 4  # of so many calls one is left where rows are let go of
AGED = 3  # steps that a call has outlasted, after which it waits apart

ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout})


@dataclass(slots=True)
class Closed:
    """What is left of the calls of a step. stuck: has one outlasted steps that may not wait for ever? written: tensors that were written to
    as a list. later: what was to be done between the calls. before: those that somebody may come back for, where weights were written to
    after them, the last first: they are in no stretch. trailed: where that was."""

    stuck: bool = False
    trailed: set[int] = field(default_factory=set)
    before: Sequence[RawCall | Later] = ()
    written: list[Tensor] = field(default_factory=list)
    later: list[Later] = field(default_factory=list)


class Notes:
    """The calls that wait to be understood. module: the part of the model that they are made in. budget: bytes that may be held. weight: of
    all that waits; with more than `most` it is time to understand it. graph: what stands for that of the models, see `graph_of`. idle: how
    many were made without autograd since it was last looked which have come to nothing; with more than `due` it is time to look again."""

    def __init__(self, callers: Callers, budget: int) -> None:
        self.pending: list[Any] = []  # of `Raw` and `Later`
        self.module = ""
        self._old = Outlasted()
        self._ages: list[int] = []  # of those that follow them: how many steps they have outlasted
        self._start = 0  # of the running stretch
        self._whole = 0  # and of what is left of the step before, if it belongs to it
        self._callers = callers
        self._ends = 0  # since the last backward pass
        self._makers = Makers()
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # each once, for all calls, and none of torch's class: see `RawCall`
        self._strides: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.weight, self.most, self.graph = 0, budget >> WEIGHT, GRAPH
        self._graphs = 0  # of the weight, what stands for graphs that no pass has freed
        self.idle, self.due = 0, IDLE
        self.taken = 0  # times that what waits was taken
        self.shown = 0  # what a `detach` has made, by identity, that may be seen once more, see DETACH_IS_SEEN_TWICE

    def add(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, destroyed: Tensor | None = None) -> bool:
        """Note a call that was made and has written to no tensor that others know; False if it has to be understood at once."""
        results = (result,) if type(result) is Tensor or destroyed is not None else result if type(result) in (tuple, list) else ()
        if not (results or operator.mutable) or (kwargs and not ATOMS.issuperset(map(type, kwargs.values()))):
            return False
        if DETACH_IS_SEEN_TWICE and self.shown:
            shown, self.shown = self.shown, 0
            if operator.name == "detach" and id(args[0]) == shown:
                return self._add_again(args[0], result)
        seen: list[Any] = []
        made: list[Any] = []
        fresh: list[int] = []
        weight, one_shape, one_stride = CALL, self._shapes.get, self._strides.setdefault
        try:
            read = self._read(args, seen, fresh, operator.lasting)
            if read < 0:
                return False
            for item in results:
                size = size_of(item) if type(item) is Tensor or destroyed is not None else -1
                if size < 0 or (operator.counts and item.is_floating_point() and not (operator.draws and _has_no_gradient(seen))):
                    return False
                weight += 0 if operator.view else size  # what it is a part of has been weighed
                writes = writes_counted(item) + operator.mutable  # a write is counted when it is over
                shape, strides = one_shape(item.shape), item.stride()
                shape = self._shape(item) if shape is None else shape
                made += writes, item.data_ptr(), shape, one_stride(strides, strides)
        except RuntimeError:  # no memory of its own, or in inference mode
            return False
        self.weight += weight + read + (0 if destroyed is None else destroyed.nbytes)
        makers, number = self._makers, len(self.pending)
        if fresh:
            for known in fresh:
                makers.light[known] = NOBODY
            self._graphs += self.graph * sum(
                type(arg) is Tensor and arg.requires_grad and not arg.is_leaf and id(arg) in fresh for arg in args
            )
        if seen or not results or destroyed is not None:
            makers.make(operator, results, number)
        else:  # what a factory makes torch hands out as a copy if somebody else holds it
            results = [Fleeting(item) for item in results]
            makers.fleeting.update({item.identity: number for item in results})
        (code, lasti), grad = self._callers.caller(FRAMES), torch.is_grad_enabled()
        self.pending.append((operator, args, kwargs, results, tuple(seen), tuple(made), code, lasti, grad, self.module, destroyed))
        if destroyed is not None:
            self.begin_stretch()
        if not grad:
            self.idle += 1
        if DETACH_IS_SEEN_TWICE and operator.name == "detach":
            self.shown = id(result)
        return True

    def _add_again(self, tensor: Tensor, result: Tensor) -> bool:
        """It is the `detach` that was noted last. tensor: what it has made. result: what the trainer is given for that."""
        number = len(self.pending) - 1
        call = self.pending[number] if self.pending else None
        if type(call) is not tuple or not any(one is tensor for one in call[raw.RESULTS]):
            self.shown = id(tensor)
            return False  # that was understood at once
        self._makers.light.pop(id(tensor), None)
        self._makers.make(call[raw.OPERATOR], (result,), number)
        self.pending[number] = (*call[: raw.RESULTS], (result,), *call[raw.SEEN :])
        return True

    def can_wait(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], lasting: bool) -> bool:
        """May a call wait with these arguments? Whoever writes asks before."""
        try:
            return ATOMS.issuperset(map(type, kwargs.values())) and self._read(args, [], [], lasting) >= 0
        except RuntimeError:  # no memory of its own, or in inference mode
            return False

    def _read(self, args: Sequence[Any], seen: list[Any], fresh: list[int], lasting: bool) -> int:
        """Note what tensors among arguments are at this moment, and return the bytes that are held for them alone; −1 if one of them, or
        another argument, cannot wait. fresh: takes the identities of those that no other waiting call holds. lasting: see `Operator`."""
        weight, light, one_shape = 0, self._makers.light, self._shapes.get
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                wanted = arg.requires_grad
                if id(arg) not in light:
                    held = held_for(arg, lasting, light, self.graph)
                    if held < 0:
                        return -1
                    weight += held
                    fresh.append(id(arg))
                shape = one_shape(arg.shape)
                seen += writes_counted(arg), arg.data_ptr(), self._shape(arg) if shape is None else shape, wanted
            elif kind not in ATOMS:
                inner = self._read(arg, seen, fresh, lasting) if kind in (list, tuple) else -1
                if inner < 0:
                    return -1
                weight += inner
        return weight

    def _shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Remember the shape of a tensor."""
        shape = tuple(tensor.shape)
        self._shapes[shape] = shape
        return shape

    def maker(self, tensor: Tensor) -> RawCall | None:
        """Return the call that waits and has made a tensor, None if there is none."""
        number = self._makers.number_of(tensor, self.pending)
        made = self.pending[number : number + 1] if number != NOBODY else ()  # or nothing, where another thread has just taken them
        return RawCall._make(made[0]) if made else None

    def makers(self, tensor: Tensor, whole: bool) -> list[RawCall]:
        """Return the calls that wait and have made a tensor, and have written to it since, the last first; none of the running stretch.
        whole: and of what is left of the step before."""
        number, found = self._makers.number_of(tensor, self.pending), list[RawCall]()
        pending = self.pending[: min(number + 1, self._whole if whole else self._start)] if number != NOBODY else []
        while pending:
            call = pending.pop()
            if type(call) is tuple and any(item is tensor for item in call[raw.RESULTS] if call[raw.SEEN]):
                found.append(RawCall._make(call))
                if not call[raw.OPERATOR].mutable:
                    break
        return found

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
        known = id(tensor) in self._makers.light or self.maker(tensor) is not None
        return not known and base_of(tensor) is None and storage_uses(tensor) <= ALIASED

    def last(self) -> RawCall:
        """Return the call that was just added."""
        return RawCall._make(self.pending[-1])

    def _may_be_a_loss(self, item: Tensor) -> bool:
        """Is it a number that is not finite, as can be told without waiting for a device? Each holds a graph, so a few are enough."""
        is_one = self._ends < ENDS and item.numel() == 1 and item.is_cpu and item.is_floating_point() and not bool(is_finite(item))
        self._ends += is_one
        return is_one

    def has_passed(self) -> None:
        """A backward pass is over."""
        self._ends = 0
        self.begin_stretch()

    def later(self, what: Later) -> None:
        """Have something done when all calls so far have been understood."""
        self.pending.append(what)

    def graphs_are_freed(self) -> None:
        """A backward pass has ended that keeps no graph: what waits holds no activations of a model any more."""
        self.weight -= self._graphs
        self._graphs = 0

    def begin_stretch(self) -> None:
        """A stretch of calls begins: a backward pass has ended, or a call was made that does not wait, or has written to weights."""
        self._start = self._whole = len(self.pending)

    def stretch(self, whole: bool = False) -> list[Raw]:
        """Return the calls of the running stretch. whole: and what is left of the step before, if it belongs to it."""
        return [one for one in self.pending[self._whole if whole else self._start :] if type(one) is tuple]

    def goes_back(self, tensors: Iterable[Tensor]) -> bool:
        """Was one of some tensors made by a call that waits, and is not in the running stretch?"""
        return any(NOBODY < self._makers.number_of(tensor, self.pending) < self._start for tensor in tensors) if self._start else False

    @property
    def outlasted(self) -> tuple[int, int]:
        """How many calls, the first of all that wait, stay where they are when a step is closed; and how often these became others."""
        return self._old.calls, self._old.cleared

    def sift(self) -> None:
        """Let go of what has come to nothing."""
        heavy = self.weight > self.most
        if heavy:
            self._grow_young()
        first = self._old.calls
        pending, ends = self._taken_from(first), self._ends
        found, numbers = sifted(pending, self._may_be_a_loss, buffers=heavy)
        self._ends = ends  # those that wait on are asked about again
        numbers.reverse()
        self._ages = [self._ages[number] for number in numbers[: bisect_left(numbers, len(self._ages))]]
        self._start, self._whole = [first + bisect_left(numbers, begin - first) for begin in (self._start, self._whole)]
        self._go_on_with(found[::-1], first)
        self.due = max(IDLE, 2 * len(found))

    def let_go(self) -> list[Raw] | None:
        """Let go of most of what waits, the older part, where that was gathered in rows, and return it; None where nothing was."""
        self._grow_young()
        rows = [number for number, one in enumerate(self.pending) if is_row(one)]
        if not rows:
            return None
        cut = next((number for number in rows if number >= len(self.pending) - len(self.pending) // LEFT), rows[-1]) + 1
        gone, left = list[Raw](), list[Raw | Later]()
        for one in self._taken_from(0, cut):
            if isinstance(one, Later) or not may_outlast(one):
                left.append(one)
            else:
                gone.append(one)
        self._ages.clear()
        self._start, self._whole = max(self._start - len(gone), 0), max(self._whole - len(gone), 0)
        self._go_on_with(left, 0)
        return gone

    def close(self, done: Set[int]) -> Closed:
        """A step is over in which nothing was wrong: of the calls before the running stretch, keep those that somebody may come back for.

        done: calls, by their `identity`, whose results nobody will come back for, whoever holds them.
        """
        closed, over, due = Closed(), dict[int, Tensor | None](), self._old.are_due()
        if due:
            self._grow_young()
        first = self._old.calls
        running = self._taken_from(self._start)
        pending = self._taken_from(first, self._start)
        kept, places, ages, later = list[Any](), list[int](), list[int](), self._ages[len(pending) :]
        trailing = list[tuple[int, Raw]]()
        while pending:
            one = pending.pop()  # and no other reference to it is left
            if isinstance(one, Later):
                closed.later.append(one)
            elif not one[raw.RESULTS]:
                closed.written += one[raw.ARGS][0]
            elif one[raw.DESTROYED] is not None and not is_row(one):
                trailing.append((len(pending), one))
            elif raw.identity(one) not in done:
                kept.append(one)
                places.append(len(pending))
                ages.append(self._ages[len(pending)] + 1 if len(pending) < len(self._ages) else 1)
            elif one[raw.SEEN]:
                over.update(dict.fromkeys(map(id, one[raw.RESULTS])))
        one = None
        kept.reverse()
        places.reverse()
        ages.reverse()
        closed.later.reverse()
        was = Overwritten(trailing)
        trailing.clear()  # they hold what they were given
        found, numbers = sifted(kept)
        numbers.reverse()
        left = [_without_what_is_over(call, over) for call in reversed(found) if not isinstance(call, Later)]
        ages = [ages[number] for number in numbers]
        if was.memory:
            closed.trailed.update(was.memory)
            left = [was.given_to(call, places[number]) for call, number in zip(left, numbers, strict=True)]
        gathered = len(left) if closed.trailed else next((n for n in range(len(left), 0, -1) if is_row(left[n - 1])), 0)
        aged = _how_many_may_outlast(left, [AGED + 1] * gathered + ages[gathered:])
        if closed.trailed and aged < len(left):  # nothing waits that was called before them
            self._grow_young()
            closed.before = _readable([*reversed(left), *sifted(self.pending)[0]])
            left, ages, aged = [], [], 0
        first = self._old.calls
        self._old.add(left[:aged])
        if due:
            self._old.were_looked_at()
        closed.stuck = any(age > AGED for age in ages[aged:])
        self._ages = ages[aged:] + later
        self._whole = self._old.calls
        self._start = first + len(left)
        self._go_on_with([*left, *running], first)
        return closed

    def _grow_young(self) -> None:
        """Those that wait apart are looked at with the others."""
        self._ages = [AGED] * self._old.calls + self._ages
        self._old.clear()

    def let_go_of_lasting(self) -> list[Tensor]:
        """Hold no gradients any more that calls have read which wait, before a stretch begins. Returns what was written to as a list."""
        written, left = list[Tensor](), list[Raw | Later]()
        for one in self._taken_from(0):
            if isinstance(one, Later):
                left.append(one)
            elif not one[raw.RESULTS]:
                written += one[raw.ARGS][0]
            else:
                left.append(_without_what_is_over(one, {}))
        self._old.clear()
        self._ages.clear()
        self._go_on_with(left, 0)
        self.begin_stretch()
        return written

    def _taken_from(self, first: int, last: int | None = None) -> list[Any]:
        """Return what waits from one number on, up to another one, and has it wait no more. What another thread adds meanwhile stays."""
        taken = self.pending[first:last]
        del self.pending[first : first + len(taken)]
        return taken

    def _go_on_with(self, calls: list[Raw | Later], first: int) -> None:
        """These wait from one number on, before what has come meanwhile."""
        self.pending[first:first] = calls
        self._makers = self._old.makers.twin()
        self.weight, self._graphs = self._old.bytes + self._old.calls * CALL, 0
        self.taken += 1
        self.idle, self.due = 0, IDLE
        for known in (self._shapes, self._strides):
            if len(known) > SHAPES:
                known.clear()
        for number in range(self._old.calls, len(self.pending)):
            call = self.pending[number]
            if not isinstance(call, Later):
                self.weight += CALL + self._makers.enter(call, number, self.graph)

    def overwritten(self, memory: Spans) -> None:
        """Somebody has written to memory, unseen: what calls that wait have read there without a gradient is not there any more. Of what
        has one its own count of writes tells."""
        low, high, pending = memory.low, memory.high, self.pending
        for number in range(self._old.calls, len(pending)):
            call = pending[number]
            for at in range(raw.ADDRESS, len(call[raw.SEEN]) if type(call) is tuple else 0, EACH):
                seen = call[raw.SEEN]
                address, wanted = seen[at], seen[at + raw.WANTED - raw.ADDRESS]
                if low <= address < high and not wanted and memory.start_of(address):
                    call = pending[number] = (*call[: raw.SEEN], (*seen[:at], ELSEWHERE, *seen[at + 1 :]), *call[raw.MADE :])

    def forget(self) -> None:
        """Nothing waits any more, and nobody will ask."""
        for one in self.take():
            if isinstance(one, Later):
                one.void()

    def take(self, ends: bool = False, begins: Sequence[Later] = ()) -> list[RawCall | Later]:
        """Return what waits, the last first, but for what has come to nothing: nobody holds what it has made, nor what was made of that.

        ends: of numbers with a gradient that are not finite, and of which none was made, a few are returned all the same: one may be a loss
        that was thrown away. begins: what is to be done where the running stretch begins, and where it does with what is left of the
        step before.
        """
        pending = self._taken_from(0)
        for at, begin in zip((self._start, self._whole), begins, strict=False):
            pending.insert(at, begin)
        self._start = self._whole = 0
        self._old.clear()
        self._ages.clear()
        self._go_on_with([], 0)
        return _readable(sifted(pending, self._may_be_a_loss if ends else None, buffers=True)[0])


def _has_no_gradient(seen: Sequence[Any]) -> bool:
    """Did nothing of what a call has read want one?"""
    return not (torch.is_grad_enabled() and any(seen[raw.WANTED :: EACH]))


def _readable(calls: Sequence[Raw | Later]) -> list[RawCall | Later]:
    return [one if isinstance(one, Later) else RawCall._make(one) for one in calls]


def _how_many_may_outlast(calls: Sequence[Raw], ages: Sequence[int]) -> int:
    """How many of the first of some calls are old enough to wait apart, and may? Those behind one that may not have to be understood after
    it."""
    young = (number for number, (call, age) in enumerate(zip(calls, ages, strict=True)) if age <= AGED or not may_outlast(call))
    return next(young, len(calls))


def _without_what_is_over(call: Raw, over: dict[int, Tensor | None]) -> Raw:
    """A call of a step that is over, whose result somebody holds: the gradients that a norm was taken of are not held for that, nor the
    graph of what was differentiated. over: that, by identity; takes what stands for it from now on."""
    operator, args, _, _, seen, *_ = call
    if operator.lasting:
        return operator, (), *call[2:]
    return (operator, _without_graphs(args, over), *call[2:]) if any(seen[raw.WANTED :: EACH]) else call


def _without_graphs(args: Sequence[Any], over: dict[int, Tensor | None]) -> Sequence[Any]:
    found = [_without_graphs(arg, over) if type(arg) is list or type(arg) is tuple else arg for arg in args]
    for number, arg in enumerate(found):
        if isinstance(arg, Tensor) and id(arg) in over:
            with unseen():
                found[number] = over[id(arg)] = arg.detach() if over[id(arg)] is None else over[id(arg)]
    return found if type(args) is list else tuple(found)
