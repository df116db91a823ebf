"""What the trainer's own code asks of a value that has a gradient: its number (`loss.item()`), or a truth (`if not isfinite(loss)`).

What it asks so it takes for its loss, or for a metric; a loss that is not finite it may well never differentiate. The answer goes to the
host anyway, so to listen costs nothing: a number that is finite is forgotten at once, and so is a value on a CPU that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.account import Balance, Holding
from nanscope.capture.entries import Value, node_of, tensors_of
from nanscope.capture.log import Log
from nanscope.capture.modules import Address
from nanscope.capture.raw import RawCall
from nanscope.capture.sites import Place
from nanscope.capture.source import Key, apart
from nanscope.capture.values import Values
from nanscope.program.local import is_plain
from nanscope.program.numbers import is_finite
from nanscope.program.ops import CHECKS, EQUALITIES, Flow, base_name, flow_of
from nanscope.program.program import Program
from nanscope.torch_inside import base_of, number_of, sequence_number

STEPS = 32  # values that are gone through from an answer back to what it is about
SMALL = 64  # elements of a tensor that is held until somebody asks for its extremes
ABSOLUTE = "aten.abs.default"
FULL = 16  # places at which something is in doubt at a time

WEIGHTS = ("parameter", "data")  # a leaf with a gradient is one of a model that is seen, or of none

Sliced = tuple[Program, dict[int, Tensor]]


def is_doubtful(answer: Any) -> bool:
    """May it be about something that is not finite? A truth may, a number tells itself."""
    return type(answer) is bool or (type(answer) is float and not math.isfinite(answer))


def at_hand(tensor: Tensor) -> bool:
    """Can it be read without waiting for a device?"""
    return tensor.is_cpu


@dataclass(frozen=True, slots=True)
class Settled:
    """The last backward pass. number, values: how much autograd and the tape had counted. kept: the tape has what it did not go through.
    roots: what passes have differentiated whose graphs stay, and which therefore wait like what was not."""

    number: int = 0
    values: int = 0
    kept: bool = True
    roots: frozenset[int] = frozenset()


@dataclass(slots=True)
class Doubt:
    """One value that was asked about, and is, or may be, not finite.

    extremes: of its elements, or all of them, still on its device. truth: that was asked for, and not a number. tested: so it was, or the
    code that read the number tests numbers. since: the backward pass before it. program, tensors, places: as a recording has them, where
    there was room. Who takes it closes it.
    """

    value: Value
    extremes: Tensor
    truth: bool
    tested: bool
    since: Settled
    program: Program | None = None
    tensors: dict[int, Tensor] = field(default_factory=dict)
    places: dict[int, Address] = field(default_factory=dict)
    holding: Holding | None = None

    @property
    def is_old(self) -> bool:
        """Was it made of what was bad before that backward pass and has been seen by it, or only of what was differentiated by it?"""
        if self.since.kept and self.may_be_old:
            return True
        return any(self._was_there(tensor) and not bool(is_finite(tensor)) for _, tensor in self._made_of())

    @property
    def may_be_old(self) -> bool:
        """Was it made only of what may have been differentiated by it? What waits for a pass of its own is known since before it."""
        made_of, again = self._made_of(), self.program is not None and not self.since.roots.isdisjoint(self._behind())
        return (bool(made_of) or again) and all(
            self._was_there(tensor) and number >= self.since.values and not is_weight(base_of(tensor)) for number, tensor in made_of
        )

    def _made_of(self) -> list[tuple[int, Tensor]]:
        if self.program is None:
            return []
        behind = self._behind()
        return [(leaf.id, self.tensors[leaf.id]) for leaf in self.program.leaves if leaf.diff and leaf.id in behind]

    def _behind(self) -> set[int]:
        """What it was made of, back to what was differentiated."""
        return set() if self.program is None else read_by(self.program, self.since.roots)

    def _was_there(self, tensor: Tensor) -> bool:
        node = node_of(tensor)
        return node is not None and number_of(node) < self.since.number

    def close(self) -> None:
        """Let go of what is held."""
        self.program, self.tensors = None, {}
        if self.holding is not None:
            self.holding.close()


def read_by(program: Program, ends: Collection[int] = ()) -> set[int]:
    """Return the values of which a program makes something: `zeros_like` makes nothing of what it is given. ends: gone back to only."""
    found, waiting = {program.output}, [program.output]
    while waiting:
        value = waiting.pop()
        call = None if value in ends else program.maker(value)
        if call is not None and flow_of(call.op) is not Flow.CREATE:
            read = [one for one in call.inputs() if one not in found]
            found.update(read)
            waiting += read
    return found


class Doubts:
    """Those of which nobody knows yet whether they will be differentiated.

    again: is called where the code that asked asks once more: the loop has come round, and what was in doubt before it was passed over.
    """

    def __init__(self, known: Values, log: Log, account: Balance, program: Callable[[Value], Sliced]) -> None:
        self.again: Callable[[], None] = lambda: None
        self._known, self._log, self._account, self._program = known, log, account, program
        self._open: dict[Key, list[Doubt]] = {}
        self._since = Settled()

    @property
    def is_open(self) -> bool:
        """Is anything in doubt?"""
        return bool(self._open)

    def is_about_finite(self, tensor: Tensor, maker: Callable[[Tensor], RawCall | None]) -> bool:
        """Is a truth surely about nothing but finite tensors, so that nothing is in doubt? As far as calls tell that wait to be understood,
        and those behind them that are written down.

        maker: returns the one that made a tensor.
        """
        if self._open:
            return False
        way, known, left = [tensor], list[Value](), STEPS
        while way and left:
            one, left = way.pop(), left - 1
            if not is_plain(one):
                return False
            made = maker(one)
            if one.requires_grad and not (made is not None and made.operator.name == "abs" and one is not tensor):
                if not _is_fine(one):
                    return False
            elif made is not None:
                way += tensors_of(made.args)
            elif (value := self._known.find(one)) is not None:
                known.append(value)
        return all(value.tensor is not None and _is_fine(value.tensor) for first in known for value in self._about(first, left))

    def answered(self, value: Value, answer: Any, place: Callable[[], Place]) -> None:
        """An element of a value has gone to the host. place: where in the trainer's code."""
        held = {doubt.value.id: doubt for doubts in self._open.values() for doubt in doubts}
        about = [(held.get(one.id), one) for one in self._about(value)]  # a value is in doubt once, however many places ask about it
        doubts = [doubt for known, one in about if (doubt := known or self._doubt(one)) is not None]
        if not doubts:
            return
        where = apart(*place())
        truth = type(answer) is bool
        for doubt in doubts:
            doubt.truth |= truth
            doubt.tested |= truth or (where[1] is not None and not CHECKS.isdisjoint(where[1].co_names))
        before = self._open.get(where, doubts)
        if [doubt.value.id for doubt in before] != [doubt.value.id for doubt in doubts]:
            self.again()
        if where in self._open or len(self._open) >= FULL:
            for doubt in doubts:
                if doubt.value.id not in held:
                    doubt.close()
        else:
            self._open[where] = doubts

    def settle(self, kept: bool, roots: Collection[int] = (), number: int | None = None) -> None:
        """A backward pass is over: what was computed before it is in doubt no more. kept: what waits for one of its own is still known.
        roots: what it has differentiated, if its graph stays. number: how much autograd had counted when it was over, by default by now."""
        known = (value for value in self._since.roots if value in self._known.by_id)
        self._since = Settled(sequence_number() if number is None else number, self._known.length, kept, frozenset((*known, *roots)))

    def take(self) -> list[Doubt]:
        """Return all of them, in order, and begin anew."""
        found = {doubt.value.id: doubt for doubts in self._open.values() for doubt in doubts}
        self._open = {}
        return list(found.values())

    def thrown_away(self, used: Set[int], last: bool, ours: Callable[[], Mapping[int, int]]) -> list[Doubt]:
        """Return the numbers with a gradient, made since the last backward pass, that nobody can differentiate any more, of which no other
        was made, and that are not finite, or may not be: asked about or not.

        used: values that are differentiated now, and those that these were made of; what was made of one of them is left out. last: nothing
        will be differentiated any more, whoever holds it. ours: counts references to tensors that nobody comes back by, by identity.
        """
        by_id, made_by, entries = self._known.by_id, self._known.made_by, self._log.entries
        numbered = range(self._since.values, self._known.length)
        calls = ((one, entries.get(made_by.get(one, -1))) for one in numbered)
        made = {one: call for one, call in calls if call is not None and call.op != ABSOLUTE}  # `isfinite` takes it of what it asks about
        new = [value for one in made if (value := by_id.get(one)) is not None and value.diff]
        ends = {value.id: value for value in new if math.prod(value.shape) == 1 and value.dtype.is_floating_point}
        if not ends.keys() - used:
            return []
        for value in new:
            for read in made[value.id].reads():
                ends.pop(read, None)
        left = [value for value in ends.values() if value.id not in used]
        references = ours() if left and not last else {}
        left = [value for value in left if last or self._is_gone(value, references)]
        found = (self._doubt(value) for value in left if used.isdisjoint(self._had_a_gradient(value)))
        return [doubt for doubt in found if doubt is not None][:FULL]

    def _is_gone(self, value: Value, ours: Mapping[int, int]) -> bool:
        besides = ours.get(id(value.tensor), 0)
        return not self._known.is_wanted(value, besides) or self._known.is_saved(value, besides)

    def _had_a_gradient(self, value: Value) -> set[int]:
        """What a value was made of, as far as that was made in the step, and has a gradient."""
        found, way = {value.id}, [value]
        while way:
            made = self._log.entries.get(self._known.made_by.get(way.pop().id, -1))
            read = [] if made is None else [one for number in made.reads() if (one := self._known.by_id.get(number)) is not None]
            way += [one for one in read if one.diff and one.id not in found and (one.leaf is None or one.leaf.origin not in WEIGHTS)]
            found.update(one.id for one in way)
        return found

    def open(self, doubt: Doubt) -> None:
        """Hold the program of a value, where there is room for it."""
        if doubt.program is None:
            try:
                program, tensors = self._program(doubt.value)
            except LookupError:
                return
            doubt.holding = Holding(self._account)
            if doubt.holding.add(*tensors.values()):
                doubt.program, doubt.tensors = program, tensors
                doubt.places = {value: self._known.by_id[value].key[:4] for value in tensors}

    def _doubt(self, value: Value) -> Doubt | None:
        tensor = value.tensor
        node = None if tensor is None else node_of(tensor)
        if tensor is None or node is None or not tensor.numel():  # too large to be held, or a parameter
            return None
        if number_of(node) < self._since.number:  # a backward pass has gone through it, or past it
            return None
        if at_hand(tensor) and bool(is_finite(tensor)):
            return None
        kept = tensor.detach()
        kept = kept.clone() if tensor.numel() <= SMALL else torch.stack(torch.aminmax(kept))
        doubt = Doubt(value, kept, False, False, self._since)
        if at_hand(tensor):
            self.open(doubt)
        return doubt

    def _about(self, value: Value, left: int = STEPS) -> list[Value]:
        """Return the values with a gradient that an answer is about: the last ones that had one, on the way to it.

        left: how many values are gone through. There are none where it says whether two results are alike: so asks a test of the code, and
        no guard of a loss.
        """
        by_id, entries, made_by = self._known.by_id, self._log.entries, self._known.made_by
        found: dict[int, Value] = {}
        way = [value]
        while way and left:
            one, left = way.pop(), left - 1
            made = entries.get(made_by.get(one.id, -1))
            read = [] if made is None else [by_id[known] for known in made.reads() if known in by_id]
            if made is not None and base_name(made.op) in EQUALITIES and _are_results(read):
                return []
            absolute = made is not None and made.op == ABSOLUTE and one is not value  # `isfinite` takes it of what it asks about
            if one.diff and not absolute:
                found[one.id] = one
            else:
                way += read
        return list(found.values())


def _is_fine(tensor: Tensor) -> bool:
    """Is it surely finite?"""
    return at_hand(tensor) and tensor.is_floating_point() and bool(is_finite(tensor))


def _are_results(compared: Sequence[Value]) -> bool:
    """Are two values compared of which neither is the other, nor one number that stands for infinity?"""
    apart = {one.id for one in compared}
    return len(apart) > 1 and all(one.diff or math.prod(one.shape) > 1 for one in compared)


def is_weight(base: Tensor | None) -> bool:
    """Is what a tensor is a view of a leaf of autograd? Its views may be differentiated again and again."""
    return base is not None and base.requires_grad and node_of(base) is None
