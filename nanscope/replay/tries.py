"""Replays a saved step: as recorded, in float64, and under edits at the origin, each forward and backward.

A row says what came out: the loss, whether every gradient is finite, and how far the gradient of the healthy elements is from where it
should be. "Should be" is measured, too: the recorded program in float64, with exactly the offending elements neutralised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanscope.causes import OF_A_BATCH, Cause
from nanscope.errors import NanscopeError, ProgramError, one_line
from nanscope.locate.location import locate
from nanscope.locate.origin import Location
from nanscope.locate.spike import JUMP, spike
from nanscope.locate.trace import Trace
from nanscope.locate.twin import absorbed
from nanscope.plain import frame
from nanscope.program.by_rows import execute_ends
from nanscope.program.calls import Computes
from nanscope.program.numbers import is_finite, is_spoilt, largest_in
from nanscope.program.ops import ADDITIONS, SPREADS, carries
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.replay.counterfactual import otherwise
from nanscope.replay.diffs import diffs
from nanscope.replay.dropped import further_on
from nanscope.replay.edits import BOUNDING, CONTROLS, EDITS, FILL_IN, TIGHTER, WIDER
from nanscope.replay.further import UNMADE, Edit, EditedPlace, also_at, beside, everywhere, following, then
from nanscope.replay.initialised import UNWRITTEN, is_unwritten
from nanscope.replay.invented import INVENTED, invents
from nanscope.replay.patch import Patch, Variant
from nanscope.replay.reference import Healthy, results
from nanscope.replay.refill import stands_out
from nanscope.replay.reproduction import NOT_COMPARED, Reproduction
from nanscope.replay.usual import ROOM, usual_loss
from nanscope.shown import Shown
from nanscope.snapshot.observation import TEST, Diff, Kind, Phase, Row
from nanscope.snapshot.step import Snapshot
from nanscope.text import count

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True, repr=False)
class Replay(Shown):
    """All rows, and whether the recorded step came out again (`reproduction`).

    location: where the replayed step went wrong, None if it did not (the fault was transient, or lies outside the program).
    trace: of the step as recorded, None if the file holds no program. variants: the program of each standard edit that works, by its id.
    """

    rows: tuple[Row, ...]
    reproduction: Reproduction
    location: Location | None
    trace: Trace | None
    bench: Bench | None = None
    variants: Mapping[str, Variant] = field(default_factory=dict)

    def __str__(self) -> str:
        return one_line(self.sentence)

    @property
    def sentence(self) -> str:
        """What came of it, in one line."""
        if self.bench is None:
            return "nothing can be run again: there is no program of this step's loss"
        again = "" if self.reproduces is not False else "; the recorded loss does not come out again"
        if self.location is None:
            return f"{self.bench.snapshot.place}: the replayed loss and its gradients are finite{again}"
        tried = [row for row in self.rows if row.kind in ("fix", "asked")]
        works = [row.id for row in tried if row.proven] or [row.id for row in tried if row.works]
        how = "leave healthy tokens alone" if any(row.proven for row in tried) else "make the step finite"
        named = f"{len(works)} of {count(len(tried), 'edit')} {how}" if tried else "no edit applies"
        named += f": {', '.join(works)}" if works else ""
        return f"{self.bench.snapshot.place}: {self.location.origin.op} goes wrong again; {named}{again}"

    def without(self, cause: Cause) -> Row | None:
        """Return what comes out with the counterfactual of a cause, None if it has none here; `works` says that this origin is gone."""
        known = next((row for row in self.rows if row.kind == TEST and row.id == cause), None)
        return known or (self.bench.without(cause) if self.bench is not None and self.location is not None else None)

    @property
    def reproduces(self) -> bool | None:
        """Did the recorded loss come out again, bit for bit or but for rounding? None if none was recorded."""
        return self.reproduction.holds

    @property
    def run(self) -> Run | None:
        """The values of the step as recorded."""
        return self.trace.run if self.trace is not None else None

    def frame(self) -> pandas.DataFrame:
        """Return the rows as a pandas frame, indexed by their ids: the fields of `Row`, what is added to the source as text, and whether it
        is proven."""
        found = frame(Row, self.rows).drop(columns=["diffs", "rest"])
        found["added"] = ["\n".join(line for diff in row.diffs for line in diff.added) for row in self.rows]
        found["rest"] = ["; ".join(row.rest) for row in self.rows]
        found["proven"] = [row.proven for row in self.rows]
        return found


NOTHING = Replay((), NOT_COMPARED, None, None)  # what cannot be run


def replay(snapshot: Snapshot, edits: Sequence[tuple[str, Edit]] = (), *, full: bool = True) -> Replay:
    """Run a snapshot under all variants.

    edits: further edits to try at the origin, with what to call them. full: also try the standard edits and controls.
    Raises ProgramError if the recorded program itself cannot be run.
    """
    if not snapshot.program.calls:
        return NOTHING
    return Bench.of(snapshot).replay(edits, full=full)


@dataclass(frozen=True, slots=True)
class _Tried:
    """What came of an edit. variant: the edited program; there: where that goes wrong next, None if nowhere or still at the origin; places:
    the edit at the origin alone, and at each further place."""

    row: Row
    variant: Variant | None = None
    there: Patch | None = None
    places: Sequence[EditedPlace] = ()


FIRSTS = 3  # edits that help and do not heal, beside which a second one is tried


@dataclass(frozen=True)  # without slots: what is derived is kept
class Bench:
    """A recorded step, run and located once: what every edit is tried on. trace: without the gradients inside the program."""

    snapshot: Snapshot
    trace: Trace
    location: Location | None
    reproduction: Reproduction

    @staticmethod
    def of(snapshot: Snapshot) -> Bench:
        """Run a step as recorded and walk to its origin. Raises ProgramError if it cannot be run."""
        program = snapshot.program
        trace = Trace.of(program, snapshot.tensors, lean=True)
        location = locate(trace) or _suspect(trace, snapshot.observation.kind)
        if program.computes is not Computes.LOSS:
            return Bench(snapshot, trace.forward_only(), location, NOT_COMPARED)
        reproduction = Reproduction.of(snapshot, trace.values[program.output], trace.run.grads)
        return Bench(snapshot, trace.forward_only(), location, reproduction)

    @cached_property
    def patch(self) -> Patch:
        """The origin, where an edit may act. Only of a step that went wrong."""
        assert self.location is not None
        return Patch(self.trace, self.location.origin)

    @property
    def healthy(self) -> Healthy | None:
        """The gradient that the healthy elements should have."""
        return self._measured[0]

    @property
    def in_float64(self) -> Row:
        """What comes out of the step in float64."""
        return self._measured[1]

    @cached_property
    def _measured(self) -> tuple[Healthy | None, Row]:
        """Both, of one run in float64."""
        variant, run, problem = Variant("float64", "everything in float64", self.trace.program, self.trace.tensors), None, ""
        try:
            run = execute_ends(variant.program, variant.tensors, torch.float64)
        except NanscopeError as error:
            problem = str(error)
        healthy = Healthy.of(self.patch, run)
        if run is None:
            return healthy, _failed(variant, "float64", problem)
        return healthy, self._told(variant, "float64", run, healthy)

    def let_go(self) -> None:
        """Forget what edits are held against, which takes as much memory as the step; who asks for it has it worked out again."""
        self.__dict__.pop("_measured", None)

    def replay(self, edits: Sequence[tuple[str, Edit]], *, full: bool) -> Replay:
        """Return what `replay` does."""
        rows, variants = [self.recorded], dict[str, Variant]()
        if self.location is not None:
            rows.append(self.in_float64)
            tries = self._standard() if full else []
            variants |= {tried.row.id: tried.variant for tried in tries if tried.row.works and tried.variant is not None}
            rows += [tried.row for tried in tries] + self.asked(edits) + (self._controls(tries) if full else [])
        return Replay(tuple(rows), self.reproduction, self.location, self.trace, self, variants)

    def edit(self, name: str) -> tuple[Row, Variant] | None:
        """Return what comes out under one standard edit, and its program; None if it does not apply here, or does not work."""
        tried = self._tried(name, "fix", EDITS[name]) if self.location is not None else None
        return None if tried is None or tried.variant is None or not tried.row.works else (tried.row, tried.variant)

    def without(self, cause: Cause) -> Row | None:
        """Return a row of the recorded step with what a cause says to be different, None if that cannot be made of it."""
        row = None
        try:
            for variant in otherwise(self.patch, cause):
                row = self._tested(variant)
                if row.works:
                    return row
        except UNMADE:
            pass
        return row

    def _tested(self, variant: Variant) -> Row:
        """What comes out with a counterfactual; it works if this origin is gone, whatever goes wrong elsewhere."""
        row = self._try(variant, TEST, None)
        if row.works or self.snapshot.observation.suspect:
            return row
        there = following(variant, {self.patch.origin.value_id})
        return replace(row, works=there is not None, then=then(there))

    def asked(self, edits: Sequence[tuple[str, Edit]]) -> list[Row]:
        """Return a row for each of the edits that somebody asked for, also where it cannot be made."""
        tried = [(name, self._tried(name, "asked", edit)) for name, edit in edits]
        return [_unmade(name, "does not apply to this origin") if one is None else one.row for name, one in tried]

    @cached_property
    def recorded(self) -> Row:
        """What came out of the step as it was."""
        row = _row("as_recorded", "as recorded", "recorded", self.trace.program, self.trace.run, None, self.reproduction.words)
        return self._judged(row, {})

    def _standard(self) -> list[_Tried]:
        batch = self.trace.program.computes is not Computes.UPDATE
        fitting = {name: edit for name, edit in EDITS.items() if batch or name not in OF_A_BATCH}
        tries = [tried for name, edit in fitting.items() if (tried := self._tried(name, "fix", edit)) is not None]
        return tries if any(tried.row.works for tried in tries) else [*tries, *self._pairs(tries, fitting)]

    def _pairs(self, tries: Sequence[_Tried], edits: Mapping[str, Edit]) -> Iterator[_Tried]:
        """Yield what comes out where two edits heal a step that none heals alone: for a first one, the second that changes least."""
        helped = [tried for tried in tries if tried.there is not None and not tried.row.works]
        for first in helped[:FIRSTS]:
            assert first.variant is not None and first.there is not None
            seconds = beside(first.variant, first.there, edits)
            both = [self._told_at(self._try(variant, "fix", self.healthy), variant, [*first.places, second]) for variant, second in seconds]
            working = [tried for tried in both if tried.row.works]
            if working:
                yield min(working, key=lambda tried: math.inf if tried.row.distortion is None else tried.row.distortion)

    def _controls(self, tries: Sequence[_Tried]) -> list[Row]:
        """What comes out under the tempting edits, at as many places as there are in a fix: none is wrong for want of one."""
        origin = self.patch.origin
        if not origin.born and origin.leaf is not None and origin.leaf.origin != "data":
            return []  # nobody edits after what is no call
        fixes = (tried.places[1:] for tried in tries if tried.row.works)
        places = {tuple(place.patch.origin.value_id for place in further): further for further in fixes if further}
        found = ((edit, self._tried(name, "control", edit)) for name, edit in CONTROLS.items())
        return [self._control(tried, edit, places.values()) for edit, tried in found if tried is not None]

    def _control(self, tried: _Tried, edit: Edit, places: Iterable[Sequence[EditedPlace]]) -> Row:
        row = tried.row
        for further in places:
            again = None if row.works or tried.variant is None else also_at(tried.variant, edit, further)
            row = row if again is None else self._try(again, "control", self.healthy)
        return row

    def _tried(self, name: str, kind: str, edit: Edit) -> _Tried | None:
        """What comes out under one edit; None if it does not apply here."""
        if (wider := self._tried_wider(name, kind)) is not None:
            return wider
        try:
            variant = edit(self.patch)
        except UNMADE as error:  # an edit that cannot be made here is not worth losing the verdict for
            return _Tried(_unmade(name, str(error))) if kind == "asked" else None
        if variant is None:
            return None
        row, there, places = self._try(variant, kind, self.healthy), None, [EditedPlace(self.patch, variant)]
        if kind == "fix" and row.cost and (better := self._tried_at_less(name)) is not None:
            return better
        if kind == "fix" and not row.works:
            again, there, further = everywhere(variant, edit, self.patch)
            if there is not None and self._was_taken_since(there):
                return None
            row = row if again is variant else self._try(again, kind, self.healthy)
            row, variant, places = replace(row, then=then(there)), again, [*places, *further]
        return self._told_at(row, variant, places, there) if kind == "fix" else _Tried(row, variant, there, places)

    def _tried_at_less(self, name: str) -> _Tried | None:
        """What comes out under the edit with another bound, or at another place, of which nothing is to be said against it."""
        edit, bounds = TIGHTER.get(name, (None, ()))
        others = ((self.patch, edit(self.patch, bound)) for bound in bounds) if edit is not None else iter(())
        if name == "drop_invalid_sample" and self.location is not None:
            others = further_on(self.patch, self.location)
        for patch, variant in others:
            row = None if variant is None else self._try(variant, "fix", self.healthy)
            if row is not None and variant is not None and row.proven:
                return self._told_at(row, variant, [EditedPlace(patch, variant)])
        return None

    def _tried_wider(self, name: str, kind: str) -> _Tried | None:
        """What comes out under the edit as a person would make it, of all that is read by the same words, if that is proven."""
        for edit in WIDER.get(name, ()):
            try:
                variant = edit(self.patch)
            except UNMADE:
                continue
            row = None if variant is None else self._try(variant, kind, self.healthy)
            if row is not None and variant is not None and row.proven:
                tried = self._told_at(row, variant, [EditedPlace(self.patch, variant)])
                if tried.row.diffs:
                    return tried
        return None

    def _told_at(self, row: Row, variant: Variant, places: Sequence[EditedPlace], there: Patch | None = None) -> _Tried:
        """What came of a fix, with what it is in the source, if it works; in words at those of its places where that cannot be written."""
        lost = self.recorded.total > row.total  # a gradient that nobody gets any more
        if row.works and not lost and self._is_given(variant.tensors):
            found, rest = diffs(self.trace.program, self.trace.names, variant.program), tuple[str, ...]()
            if not found and len(places) > 1:
                found, rest = _by_place(places)
            row = replace(row, diffs=found, rest=rest)
        return _Tried(row, variant, there, places)

    def _is_given(self, tensors: Mapping[int, Tensor]) -> bool:
        """Are these the recorded leaves, in the very memory, and no numbers that no code has?"""
        given = self.trace.tensors
        return all(leaf in given and given[leaf].dtype == one.dtype and one.is_set_to(given[leaf]) for leaf, one in tensors.items())

    def _was_taken_since(self, there: Patch) -> bool:
        """Is it a gradient that code took after the origin was made? It may come of that, and under an edit it would be another one."""
        leaf = there.origin.leaf
        return leaf is not None and leaf.made_by == "backward" and leaf.id > self.patch.origin.value_id

    def _try(self, variant: Variant, kind: str, healthy: Healthy | None) -> Row:
        try:
            run = execute_ends(variant.program, variant.tensors)
        except ProgramError as error:
            return _failed(variant, kind, str(error))
        return self._told(variant, kind, run, healthy)

    def _told(self, variant: Variant, kind: str, run: Run, healthy: Healthy | None) -> Row:
        row, grads = _row(variant.id, variant.label, kind, variant.program, run, healthy), results(variant.program, run)
        if row.works and kind in ("fix", "asked"):
            row = replace(row, cost=self._cost(row, variant, grads, healthy))
        return self._judged(row, grads)

    def _cost(self, row: Row, variant: Variant, grads: Mapping[int, Tensor], healthy: Healthy | None) -> str:
        """What is to be said against an edit that heals, whatever it does to healthy elements; "" if nothing is."""
        filled = row.id in FILL_IN or (row.id == "finite_mask_fill" and self.patch.op in ADDITIONS)
        if filled and is_unwritten(self.patch):
            return UNWRITTEN
        if filled and invents(self.trace.program, variant.fills, grads, healthy, self.patch.origin.masked is False):
            return INVENTED
        leaf = self.patch.origin.leaf
        if filled and leaf is not None and leaf.diff:
            return HANDED
        if (handed := self._handed(variant)) is not None:
            return f"{handed} is bad as before, {NOT_MENDED}"
        bounded = row.id in BOUNDING and not self.snapshot.observation.suspect
        beyond = healthy.beyond(row.largest) if bounded and healthy is not None else 0.0
        if beyond > STEEP:
            return f"leaves a gradient {beyond:.2g} times the usual"
        if row.id == "finite_mask_fill" and self._goes_into_a_deviation():
            return DWARFED
        if self.trace.program.computes is Computes.UPDATE and (made := self._made_of_a_weight(row, grads)):
            return made
        if row.id == "clamp_denominator" and self._is_otherwise_in_float64(row):
            return UNDERFLOWED
        larger = self._larger(row, healthy) if row.id == "finite_mask_fill" else 0.0
        return f"leaves a loss {larger:.2g} times the usual" if larger > HUGE else ""

    def _made_of_a_weight(self, row: Row, grads: Mapping[int, Tensor]) -> str:
        """What an edit of an update leaves of the weight, if that is nothing, or far more than what it was made of; else ""."""
        if not any(bool(one.any()) for one in grads.values()):
            return EMPTIED
        divided = self.patch.operand(0) if row.id == "clamp_denominator" and self._is_the_weight() else None
        size = 0.0 if divided is None else largest_in(self.patch.values[divided])
        larger = row.largest / size if size and row.largest is not None else 0.0
        return f"makes a weight {larger:.2g} times as large as what is divided" if HUGE < larger < math.inf else ""

    def _is_the_weight(self) -> bool:
        """Is what was made at the origin the weight itself, and no step by which that is moved?"""
        program, value = self.trace.program, self.trace.program.output
        while value != self.patch.origin.value_id and (call := program.maker(value)) is not None and carries(call.op):
            value = next(call.inputs())
        return value == self.patch.origin.value_id

    def _is_otherwise_in_float64(self, row: Row) -> bool:
        """Is the step fine in float64, where it is not as it was, and its loss another one than that of an edit?"""
        exact = self.in_float64.loss if self.in_float64.works and not math.isfinite(self.patch.origin.value) else None
        return exact is not None and row.loss is not None and not math.isclose(row.loss, exact, rel_tol=EXACT)

    def _goes_into_a_deviation(self) -> bool:
        """Is the harm done where a mean or a deviation is taken, of all that there is?"""
        crossed = () if self.location is None else self.location.chain
        made = (self.trace.program.maker(one.value_id) for one in crossed)
        return any(call is not None and call.name in SPREADS for call in made)

    def _handed(self, variant: Variant) -> str | None:
        """What is called that a model has handed over and that is bad, though nothing of it comes to the loss: a gradient of 0 goes back
        there. None where all is fine, or where the harm itself came with it."""
        leaf = self.patch.origin.leaf
        if leaf is not None and leaf.diff:
            return None
        handed = [one.id for one in variant.program.leaves if one.diff and not one.is_of_model and is_spoilt(variant.tensors[one.id])]
        return self.patch.called(handed[0]) if handed else None

    def _larger(self, row: Row, healthy: Healthy | None) -> float:
        """How many times larger than usual a loss is: in the steps before, or of the healthy elements alone; 0 where neither is known."""
        if row.loss is None or self.trace.program.computes is not Computes.LOSS:
            return 0.0
        used = None if self.snapshot.reached.scaled else usual_loss(self.snapshot.history)
        known = [abs(size) for size in (used, healthy.loss if healthy is not None else None) if size is not None and math.isfinite(size)]
        return abs(row.loss) / max(1.0, *known) if known else 0.0

    def _judged(self, row: Row, grads: Mapping[int, Tensor]) -> Row:
        """A fix of a spike has to make the step calm; and what ends in no loss has none to tell."""
        seen = self.snapshot.observation
        dropped = row.kind == TEST and seen.kind is Kind.SWALLOWED  # what came in: where that is a number, nothing is
        if row.works and seen.suspect and row.kind not in ("recorded", "float64") and not dropped:
            row = replace(row, works=self._is_exact(row) if seen.kind is Kind.ABSORBED else _left(row, self.recorded) <= CALM)
            if seen.kind is Kind.SPIKE and row.kind != TEST:
                row = self._beside_the_others(row, grads) if row.works else replace(row, note=_still(_left(row, self.recorded)))
        return row if self.trace.program.computes is Computes.LOSS else replace(row, loss=None)

    def _beside_the_others(self, row: Row, grads: Mapping[int, Tensor]) -> Row:
        """What is merely less harsh than the spike was is one still: what is left has to be among what the rest of the batch has."""
        if row.loss is None or self.location is None or self.trace.program.computes is not Computes.LOSS:
            return row
        origin = self.patch.origin
        alone = self.location.phase is Phase.BACKWARD or stands_out(self.patch.values[origin.value_id], origin.value)
        there = self.healthy if alone else None  # a step of which everything is a spike is nothing to compare with
        larger = self._larger(row, there)
        steeper = there.steeper(grads) if there is not None else 0.0
        if larger <= ROOM and steeper <= JUMP:
            return row
        words = f"a loss {larger:.2g} times the usual" if larger > ROOM else f"a gradient {steeper:.2g} times the usual"
        return replace(row, works=False, note=f"still {words}")

    def _is_exact(self, row: Row) -> bool:
        """Does it bring the loss to what float64 gives?"""
        exact, was = self.in_float64.loss, self.recorded.loss
        if exact is None or row.loss is None or was is None:
            return False
        return abs(row.loss - exact) <= EXACT * abs(was - exact)


def _suspect(trace: Trace, kind: Kind) -> Location | None:
    """Return where a step went wrong in which everything is finite, None if it did not."""
    if kind is Kind.ABSORBED:
        found = absorbed(trace)
        return None if found is None else found.location
    return spike(trace) if kind in (Kind.SPIKE, Kind.SWALLOWED) else None


def _by_place(places: Sequence[EditedPlace]) -> tuple[tuple[Diff, ...], tuple[str, ...]]:
    """What some places of an edit are in the source, and in words what it does at the others; nothing where these are all, or none."""
    alone = [diffs(place.patch.program, place.patch.trace.names, place.variant.program) for place in places]
    rest = tuple(place.words for place, found in zip(places, alone, strict=True) if not found)
    told = sorted((diff for found in alone for diff in found), key=lambda diff: (diff.file, diff.line))
    clash = any(one.file == other.file and one.line + len(one.removed) > other.line for one, other in pairwise(told))
    return (tuple(told), rest) if told and rest and not clash else ((), ())


def _unmade(name: str, why: str) -> Row:
    return Row(name, name, "asked", None, 0, 0, None, False, why)


def _failed(variant: Variant, kind: str, why: str) -> Row:
    return Row(variant.id, variant.label, kind, None, 0, 0, None, False, why)


STEEP = 100.0  # times what is usual: with a larger gradient a step does harm, however finite it is
HUGE = 1e4  # times the usual loss: what was filled in is most of it
NOT_MENDED = "and the backward of what made it may multiply its 0 by that: a second fault, to be mended there"
DWARFED = "puts a huge number into a deviation, beside which all others are 0"
EMPTIED = "leaves 0 in all of the weight: leave it as it was until there is something to put in"
UNDERFLOWED = "the divisor is 0 in this dtype only, which float64 tells"
HANDED = "what made it is as bad as before, and its backward may multiply that by 0: mend it there"
EXACT = 0.1  # a fix of an overflow that was absorbed leaves this part of how far the loss was off
CALM = 0.01  # with what a cause says to be different, the largest gradient of a spike is at most this part of what it was


def _left(row: Row, recorded: Row) -> float:
    """How much of the largest gradient is left."""
    if row.largest is None or recorded.largest is None:
        return math.inf
    return row.largest / recorded.largest if recorded.largest else float(row.largest > 0)


def _still(left: float) -> str:
    return f"still {100 * left:.2g} % of its gradient" if left < 0.5 else "still as large"


def _row(name: str, label: str, kind: str, program: Program, run: Run, healthy: Healthy | None, note: str = "") -> Row:
    loss = run.values[program.output].double().sum()
    grads = results(program, run)
    bad = sum(not bool(is_finite(grad)) for grad in grads.values())
    works = bool(torch.isfinite(loss)) and not bad
    largest = max((largest_in(grad) for grad in grads.values() if grad.numel()), default=None)
    return Row(name, label, kind, float(loss), bad, len(grads), healthy.distortion(grads) if healthy else None, works, note, largest)
