"""Replays a saved step: as recorded, in float64, and under edits at the origin, each forward and backward.

A row says what came out: the loss, whether every gradient is finite, and how far the gradient of the healthy elements is from where it
should be. "Should be" is measured, too: the recorded program in float64, with exactly the offending elements neutralised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from nanscope.causes import OF_A_BATCH, Cause
from nanscope.errors import ProgramError, one_line
from nanscope.locate.location import locate
from nanscope.locate.origin import Location
from nanscope.locate.spike import spike
from nanscope.locate.trace import Trace
from nanscope.locate.twin import absorbed
from nanscope.plain import frame
from nanscope.program.by_rows import execute_ends
from nanscope.program.calls import Computes
from nanscope.program.numbers import is_finite
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.replay.counterfactual import otherwise
from nanscope.replay.diffs import diffs
from nanscope.replay.edits import CONTROLS, EDITS, WIDER
from nanscope.replay.further import UNMADE, Edit, beside, everywhere, following, then
from nanscope.replay.patch import Patch, Variant
from nanscope.replay.reference import Healthy, results
from nanscope.replay.reproduction import NOT_COMPARED, Reproduction
from nanscope.shown import Shown
from nanscope.snapshot.observation import TEST, Kind, Row
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
        found = frame(Row, self.rows).drop(columns="diffs")
        found["added"] = ["\n".join(line for diff in row.diffs for line in diff.added) for row in self.rows]
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
    """What came of an edit. variant: the edited program; there: where that goes wrong next, None if nowhere or still at the origin."""

    row: Row
    variant: Variant | None = None
    there: Patch | None = None


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
        trace = Trace.of(program, snapshot.tensors)
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

    @cached_property
    def healthy(self) -> Healthy | None:
        """The gradient that the healthy elements should have."""
        return Healthy.of(self.patch)

    def replay(self, edits: Sequence[tuple[str, Edit]], *, full: bool) -> Replay:
        """Return what `replay` does."""
        rows, variants = [self._judged(self.recorded)], dict[str, Variant]()
        if self.location is not None:
            rows.append(self.in_float64)
            tries = self._standard() if full else []
            variants |= {tried.row.id: tried.variant for tried in tries if tried.row.works and tried.variant is not None}
            rows += [tried.row for tried in tries] + self.asked(edits) + (self._controls() if full else [])
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
        row = _try(variant, TEST, None)
        if self.snapshot.observation.kind is Kind.SWALLOWED:  # a kernel dropped what came in: where that is a number, nothing is dropped
            return row
        row = self._judged(row)
        if row.works or self.snapshot.observation.suspect:
            return row
        there = following(variant, {self.patch.origin.value_id})
        return replace(row, works=there is not None, then=then(there))

    @cached_property
    def in_float64(self) -> Row:
        """What comes out of the step in float64."""
        variant = Variant("float64", "everything in float64", self.trace.program, self.trace.tensors)
        return self._judged(_try(variant, "float64", self.healthy, torch.float64))

    def asked(self, edits: Sequence[tuple[str, Edit]]) -> list[Row]:
        """Return a row for each of the edits that somebody asked for, also where it cannot be made."""
        tried = [(name, self._tried(name, "asked", edit)) for name, edit in edits]
        return [_unmade(name, "does not apply to this origin") if one is None else one.row for name, one in tried]

    @cached_property
    def recorded(self) -> Row:
        """What came out of the step as it was."""
        return _row("as_recorded", "as recorded", "recorded", self.trace.program, self.trace.run, None, self.reproduction.words)

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
            both = [_Tried(self._shown(self._judged(_try(variant, "fix", self.healthy)), variant), variant) for variant in seconds]
            working = [tried for tried in both if tried.row.works]
            if working:
                yield min(working, key=lambda tried: math.inf if tried.row.distortion is None else tried.row.distortion)

    def _controls(self) -> list[Row]:
        origin = self.patch.origin
        if not origin.born and origin.leaf is not None and origin.leaf.origin != "data":
            return []  # nobody edits after what is no call
        return [tried.row for name, edit in CONTROLS.items() if (tried := self._tried(name, "control", edit)) is not None]

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
        row, there = _try(variant, kind, self.healthy), None
        if kind == "fix" and not row.works:
            again, there = everywhere(variant, edit, self.patch)
            if there is not None and self._was_taken_since(there):
                return None
            row = row if again is variant else _try(again, kind, self.healthy)
            row, variant = replace(row, then=then(there)), again
        row = self._judged(row)
        return _Tried(self._shown(row, variant) if kind == "fix" else row, variant, there)

    def _tried_wider(self, name: str, kind: str) -> _Tried | None:
        """What comes out under the edit as a person would make it, of a whole variable, if that is proven."""
        try:
            variant = WIDER[name](self.patch) if name in WIDER else None
        except UNMADE:
            return None
        row = None if variant is None else self._judged(_try(variant, kind, self.healthy))
        if row is None or variant is None or not row.proven:
            return None
        shown = self._shown(row, variant)
        return _Tried(shown, variant) if shown.diffs else None

    def _shown(self, row: Row, variant: Variant) -> Row:
        """A row with what its edit is in the source, if it works."""
        given = self.trace.tensors
        lost = self.recorded.total > row.total  # a gradient that nobody gets any more
        if (
            not row.works or lost or any(given.get(leaf) is not tensor for leaf, tensor in variant.tensors.items())
        ):  # numbers that no code has
            return row
        return replace(row, diffs=diffs(self.trace.program, self.trace.names, variant.program))

    def _was_taken_since(self, there: Patch) -> bool:
        """Is it a gradient that code took after the origin was made? It may come of that, and under an edit it would be another one."""
        leaf = there.origin.leaf
        return leaf is not None and leaf.made_by == "backward" and leaf.id > self.patch.origin.value_id

    def _judged(self, row: Row) -> Row:
        """A fix of a spike has to make the step calm; and what ends in no loss has none to tell."""
        if self.snapshot.observation.suspect and row.kind not in ("recorded", "float64"):
            mends = self._is_exact if self.snapshot.observation.kind is Kind.ABSORBED else _calmer
            row = replace(row, works=row.works and mends(row, self.recorded))
        return row if self.trace.program.computes is Computes.LOSS else replace(row, loss=None)

    def _is_exact(self, row: Row, recorded: Row) -> bool:
        """Does it bring the loss to what float64 gives?"""
        exact = self.in_float64.loss
        if exact is None or row.loss is None or recorded.loss is None:
            return False
        return abs(row.loss - exact) <= EXACT * abs(recorded.loss - exact)


def _suspect(trace: Trace, kind: Kind) -> Location | None:
    """Return where a step went wrong in which everything is finite, None if it did not."""
    if kind is Kind.ABSORBED:
        found = absorbed(trace)
        return None if found is None else found.location
    return spike(trace) if kind in (Kind.SPIKE, Kind.SWALLOWED) else None


def _unmade(name: str, why: str) -> Row:
    return Row(name, name, "asked", None, 0, 0, None, False, why)


def _try(variant: Variant, kind: str, healthy: Healthy | None, dtype: torch.dtype | None = None) -> Row:
    try:
        run = execute_ends(variant.program, variant.tensors, dtype)
    except ProgramError as error:
        return Row(variant.id, variant.label, kind, None, 0, 0, None, False, str(error))
    return _row(variant.id, variant.label, kind, variant.program, run, healthy)


EXACT = 0.1  # a fix of an overflow that was absorbed leaves this part of how far the loss was off
CALM = 0.01  # a fix of a spike brings the largest gradient to this part of what it was


def _calmer(row: Row, recorded: Row) -> bool:
    return row.largest is not None and recorded.largest is not None and row.largest <= CALM * recorded.largest


def _row(name: str, label: str, kind: str, program: Program, run: Run, healthy: Healthy | None, note: str = "") -> Row:
    loss = run.values[program.output].double().sum()
    grads = results(program, run)
    bad = sum(not bool(is_finite(grad)) for grad in grads.values())
    works = bool(torch.isfinite(loss)) and not bad
    largest = max((float(torch.linalg.vector_norm(grad, math.inf)) for grad in grads.values() if grad.numel()), default=None)
    return Row(name, label, kind, float(loss), bad, len(grads), healthy.distortion(grads) if healthy else None, works, note, largest)
