"""Cruise: a backward pass whose loss hangs together as one before is recognised, and its loss is not written down.

    step 1 to 3  written down: program, glue, gauge                        →  how it hangs together is learnt
    step 4, …    the same calls at the same lines, on other tensors        →  its edge and its gauge are found by where they stand

What was noted of such a pass stays as it came until its step is over. Whoever asks for more (a loss that is bad, a gradient, a weight, a
step that is to be saved) has it written down then, and finds what he would have found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanscope.capture import raw
from nanscope.capture.chains import BATCH, BUFFER, Chain
from nanscope.capture.gauge import Dials
from nanscope.capture.modules import Address, ModuleCall, place_of, tensors_in
from nanscope.capture.pattern import STRIDE, Code, Passage, Unlike
from nanscope.capture.sieve import OURS
from nanscope.capture.tape import Tape
from nanscope.program.calls import Ref
from nanscope.program.joins import begun_at_joins
from nanscope.roles import Role
from nanscope.torch_inside import references
from nanscope.watching.dialled import Dialled
from nanscope.watching.recording import Recording
from nanscope.watching.scale import BY_HAND

KEPT, MET = 16, 256  # structures that are known, and that were met once
IN_VAIN = 16  # losses in a row that are not recognised, until fewer are looked at


@dataclass(frozen=True, slots=True)
class Known:
    """A loss that was written down. key: of its stretch. root: what was differentiated. leaves: what its calls in there read, those from
    outside first; origins: calls that these came of. edges: those leaves that have a gradient. dialled: what the gauge reads. made: calls
    of its program in there that have a gradient; others may be come back for. beside: what else had a gradient, and how often it was read.
    codes: of the trainer's functions, which must not make way for others."""

    key: tuple[Any, ...]
    root: Code
    leaves: tuple[Code, ...]
    origins: tuple[Chain, ...]
    edges: tuple[Code, ...]
    dialled: Dialled
    made: tuple[int, ...]
    beside: tuple[tuple[Code, int], ...]
    codes: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Familiar:
    """A backward pass that is about to begin. dials, values: of its gauge, and what that reads. waiting: what was computed beside its loss,
    has a gradient, and is held by somebody."""

    known: Known
    stretch: Passage
    root: Tensor
    leaves: tuple[Tensor, ...]
    edges: tuple[Tensor, ...]
    dials: Dials
    values: dict[int, Tensor]
    made: frozenset[int]
    waiting: tuple[Code, ...]

    def been_through(self, calls: Sequence[ModuleCall]) -> tuple[dict[Address, Tensor], set[Address]]:
        """Return where it lies what the pass goes through, and that: what the loss reads, and what led to the models behind that; and where
        it lies what another pass may come to. calls: of these models."""
        found, between = {place_of(leaf): leaf for leaf in self.leaves}, set[Code]()
        for call in reversed(calls):
            if not found.keys().isdisjoint(call.outputs):
                for tensor in tensors_in([call.args, call.kwargs]):
                    found[place_of(tensor)] = tensor
                    made = self._behind(self.stretch.code(tensor))
                    between |= made
                    found |= self._outer(made)
        waiting = (self._outer(self._behind(code)) for code in self.waiting if code not in between)
        return found, {place for outer in waiting for place in outer}

    def _behind(self, code: Code | None) -> set[Code]:
        return self.stretch.behind(code) if code is not None and code >= 0 else set()

    def _outer(self, codes: Iterable[Code]) -> dict[Address, Tensor]:
        """Those that come from outside."""
        return {place_of(tensor): tensor for tensor in (self.stretch.tensor(code) for code in codes if code < 0)}


class Cruise:
    """Remembers the structures of the losses of one thread."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._found: Familiar | None = None
        self._stretch: Passage | None = None  # the calls behind the loss that is about to be differentiated
        self._numbered = 0  # values before that
        self._known: dict[int, Known] = {}  # by the hash of its key, which a tuple does not remember
        self._met: dict[int, None] = {}  # structures that were met once, by the same
        self._in_vain = self._waits = 0

    def recognise(self, root: Tensor) -> None:
        """A backward pass is about to begin: find out whether its loss is known. root: that."""
        self._found, self._stretch, self._numbered = None, self.stretch(root), self._tape.numbered
        if self._stretch is not None:
            self._found = self._recognised(self._stretch, root)

    def take(self) -> Familiar | None:
        """Return what is known of that loss, None if it has to be written down."""
        found, self._found = self._found, None
        if found is not None:
            self._stretch = None  # which has nothing new to tell
        return found

    def _recognised(self, stretch: Passage, root: Tensor) -> Familiar | None:
        number = hash(stretch.key)
        known = self._known.get(number)
        if known is None or stretch.code(root) != known.root or stretch.key != known.key or _is_scaled(stretch, known):
            return None
        if not known.dialled.is_all(self._tape.beside):
            return None
        leaves = [stretch.tensor(code) for code in known.leaves]
        origins = self._tape.chains.of(_outer(known.leaves, leaves), self._numbered, stretch.whole)
        if origins != known.origins or any(map(stretch.was_written_to, known.leaves, leaves)):
            return None
        held = _held(stretch, known)  # before anybody here holds more
        edges = [stretch.tensor(code) for code in known.edges]
        if not all(edge.requires_grad for edge in edges):
            return None
        values = known.dialled.values(stretch)
        if values is None:
            return None
        self._known[number] = self._known.pop(number)  # the last to make way
        self._in_vain = 0
        made = frozenset(raw.identity(stretch.calls[index]) for index in known.made)
        return Familiar(known, stretch, root, tuple(leaves), tuple(edges), known.dialled.of(stretch), values, made, held)

    def references(self) -> Mapping[int, int]:
        """Return how often tensors are referred to by what is held of a loss that was not recognised, by identity."""
        return {} if self._stretch is None else self._stretch.references()

    def stretch(self, root: Tensor) -> Passage | None:
        """Return the calls since the last backward pass that lead to a loss, None if they are not all there, or not to be compared with
        others. root: that."""
        calls = self._tape.stretch()
        if not calls or self._waits > 0:
            self._waits -= 1
            return None
        try:
            found = Passage(calls, root)
            before = [one for one in found.outer if self._tape.notes.goes_back([one])]
            goes_back = self._tape.chains.lead_to_graphs(before)  # else what was computed before is told by where that was
            return Passage(self._tape.stretch(whole=True) or calls, root, whole=True) if goes_back else found
        except Unlike:
            return None

    def learn(self, root: Tensor, recording: Recording, dials: Dials | None) -> None:
        """Remember how a loss hangs together that was written down. root: the loss. dials: of its gauge."""
        stretch, self._stretch = self._stretch, None
        if stretch is None:
            return
        self._in_vain += 1
        if self._in_vain > IN_VAIN:
            self._waits = 1 << min(self._in_vain - IN_VAIN, 10)
        number = hash(stretch.key)
        if number not in self._met:  # it may never be met again
            self._met[number] = None
            if len(self._met) > MET:
                del self._met[next(iter(self._met))]
            return
        known = self._learnt(stretch, stretch.code(root), recording, dials)
        if known is not None:
            self._known[number] = known
            if len(self._known) > KEPT:
                del self._known[next(iter(self._known))]

    def _learnt(self, stretch: Passage, root: Code | None, recording: Recording, dials: Dials | None) -> Known | None:
        program = None if recording.program is None else begun_at_joins(recording.program)
        if program is None or not program.calls or root is None or root < 0 or dials is None or not recording.is_plain():
            return None
        last = program.calls[-1]
        if last.name == "mul" and any(isinstance(arg, Ref) and arg.id in recording.tensors for arg in last.args):
            return None  # by what may become a scale against underflow
        held = {leaf.id: recording.tensors.get(leaf.id, self._tape.tensor(leaf.id)) for leaf in program.leaves}
        codes = {leaf: None if tensor is None else stretch.first(tensor) for leaf, tensor in held.items()}
        ends = {code for code in codes.values() if code is not None}
        if any(codes.get(leaf) is not None and not behind.call.exchange for leaf, behind in recording.opaque.items()):
            return None
        behind = stretch.behind(root, ends)
        leaves = tuple(code for code in sorted(behind) if code < 0 or code in ends)
        made = tuple(sorted({code // STRIDE for code in behind.difference(leaves)}))
        origins = self._tape.chains.of(_outer(leaves, map(stretch.tensor, leaves)), self._tape.begun[stretch.whole], stretch.whole)
        once = stretch.once(made)
        own = list(zip(program.calls[-len(once) :], once, strict=False))
        if origins is None or len(own) < len(once) or not all(call.op in stretch.calls[number][raw.OPERATOR].forms for call, number in own):
            return None
        before = len(program.calls) > len(once)  # it reads what was computed before: that has no gradient
        for code, origin in zip(leaves, origins, strict=False):  # those from outside are the first
            if code in ends and not origin.isdisjoint((BUFFER, BATCH)):
                continue  # its program begins with what that holds
            if (origin and (not before or stretch.tensor(code).requires_grad)) or not (origin or code in ends):
                return None
        diff = [leaf.id for leaf in program.leaves if leaf.diff and recording.tensors[leaf.id].requires_grad]
        if not behind.issuperset(codes[leaf] for leaf in (diff if before else codes)):
            return None  # it reads what is not there any more
        edges = tuple(at for leaf in diff if (at := codes[leaf]) is not None)
        dialled = Dialled.learnt(dials, stretch, self._tape, own, Role.ROLLOUT_LOG_PROBS in recording.beside)
        if dialled is None:
            return None
        times = stretch.times_read()
        outside = sorted(set(range(len(stretch.calls))).difference(made))
        beside = [number * STRIDE + n for number in outside for n, one in enumerate(stretch.results(number)) if one.requires_grad]
        return Known(
            stretch.key,
            root,
            leaves,
            origins,
            edges,
            dialled,
            tuple(number for number in made if any(one.requires_grad for one in stretch.results(number))),
            tuple((code, times[code]) for code in beside),
            tuple(call[raw.CODE] for call in stretch.calls),
        )


def _outer(codes: Iterable[Code], tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those that come from outside."""
    return (tensor for code, tensor in zip(codes, tensors, strict=True) if code < 0)


def _is_scaled(stretch: Passage, known: Known) -> bool:
    """Has the last thing that was done to the loss become a multiplication against underflow?"""
    last = known.root // STRIDE
    operator = stretch.calls[last][raw.OPERATOR]
    return operator.name.rstrip("_") == "mul" and any(type(arg) is float and arg >= BY_HAND for arg in stretch.numbers(last))


def _held(stretch: Passage, known: Known) -> tuple[Code, ...]:
    """What has a gradient, is not differentiated, and is held by somebody: it may wait for a backward pass of its own."""
    held = []
    for code, times in known.beside:
        item = stretch.tensor(code)
        if references(item) > OURS + times:
            held.append(code)
    return tuple(held)
