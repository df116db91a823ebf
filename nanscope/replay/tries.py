"""Replays a saved step: as recorded, in float64, and under edits at the origin, each forward and backward.

A row says what came out: the loss, whether every gradient is finite, and how far the gradient of the healthy elements is from where it
should be. "Should be" is measured, too: the recorded program in float64, with exactly the offending elements neutralised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch

from nanscope.causes import OF_A_BATCH
from nanscope.errors import NanscopeError, ProgramError
from nanscope.locate.location import locate
from nanscope.locate.origin import Location
from nanscope.locate.spike import spike
from nanscope.locate.trace import Trace
from nanscope.plain import frame
from nanscope.program.by_rows import execute_ends
from nanscope.program.calls import Computes
from nanscope.program.numbers import is_finite
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.replay.edits import CONTROLS, EDITS
from nanscope.replay.patch import Patch, Variant
from nanscope.replay.reference import Healthy, results
from nanscope.replay.reproduction import NOT_COMPARED, Reproduction
from nanscope.snapshot.observation import Row
from nanscope.snapshot.step import Snapshot

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Replay:
    """All rows, and whether the recorded step came out again (`reproduction`).

    location: where the replayed step went wrong, None if it did not (the fault was transient, or lies outside the program).
    trace: of the step as recorded, None if the file holds no program.
    """

    rows: tuple[Row, ...]
    reproduction: Reproduction
    location: Location | None
    trace: Trace | None

    @property
    def reproduces(self) -> bool | None:
        """Did the recorded loss come out again, bit for bit or but for rounding? None if none was recorded."""
        return self.reproduction.holds

    @property
    def run(self) -> Run | None:
        """The values of the step as recorded."""
        return self.trace.run if self.trace is not None else None

    def frame(self) -> pandas.DataFrame:
        """Return the rows as a pandas frame, indexed by their ids."""
        return frame(Row, self.rows)


NOTHING = Replay((), NOT_COMPARED, None, None)  # what cannot be run

Edit: TypeAlias = Callable[[Patch], Variant | None]


def replay(snapshot: Snapshot, edits: Sequence[tuple[str, Edit]] = (), *, full: bool = True) -> Replay:
    """Run a snapshot under all variants.

    edits: further edits to try at the origin, with what to call them. full: also try the standard edits and controls.
    Raises ProgramError if the recorded program itself cannot be run.
    """
    if not snapshot.program.calls:
        return NOTHING
    return Bench.of(snapshot).replay(edits, full=full)


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
        location = locate(trace) or (spike(trace) if snapshot.observation.suspect else None)
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
        rows = [self._judged(self.recorded)]
        if self.location is not None:
            variant = Variant("float64", "everything in float64", self.trace.program, self.trace.tensors)
            rows.append(self._judged(_try(variant, "float64", self.healthy, torch.float64)))
            rows += (self._standard() if full else []) + self.asked(edits) + (self._controls() if full else [])
        return Replay(tuple(rows), self.reproduction, self.location, self.trace)

    def asked(self, edits: Sequence[tuple[str, Edit]]) -> list[Row]:
        """Return a row for each of the edits that somebody asked for, also where it cannot be made."""
        return [self._tried(name, "asked", edit) or _unmade(name, "does not apply to this origin") for name, edit in edits]

    @cached_property
    def recorded(self) -> Row:
        """What came out of the step as it was."""
        return _row("as_recorded", "as recorded", "recorded", self.trace.program, self.trace.run, None, self.reproduction.words)

    def _standard(self) -> list[Row]:
        batch = self.trace.program.computes is not Computes.UPDATE
        fitting = [(name, edit) for name, edit in EDITS.items() if batch or name not in OF_A_BATCH]
        return [row for name, edit in fitting if (row := self._tried(name, "fix", edit)) is not None]

    def _controls(self) -> list[Row]:
        origin = self.patch.origin
        if not origin.born and origin.leaf is not None and origin.leaf.origin != "data":
            return []  # nobody edits after what is no call
        return [row for name, edit in CONTROLS.items() if (row := self._tried(name, "control", edit)) is not None]

    def _tried(self, name: str, kind: str, edit: Edit) -> Row | None:
        """What comes out under one edit; None if it does not apply here."""
        try:
            variant = edit(self.patch)
        except _UNMADE as error:  # an edit that cannot be made here is not worth losing the verdict for
            return _unmade(name, str(error)) if kind == "asked" else None
        if variant is None:
            return None
        row = _try(variant, kind, self.healthy)
        if kind == "fix" and not row.works:
            again = everywhere(variant, edit, self.patch)
            row = row if again is variant else _try(again, kind, self.healthy)
        return self._judged(row)

    def _judged(self, row: Row) -> Row:
        """A fix of a spike has to make the step calm; and what ends in no loss has none to tell."""
        if self.snapshot.observation.suspect and row.kind not in ("recorded", "float64"):
            row = replace(row, works=row.works and _calmer(row, self.recorded))
        return row if self.trace.program.computes is Computes.LOSS else replace(row, loss=None)


_UNMADE = (NanscopeError, RuntimeError, ValueError, IndexError, StopIteration)


def _unmade(name: str, why: str) -> Row:
    return Row(name, name, "asked", None, 0, 0, None, False, why)


ROUNDS = 3  # further places at which one edit is tried


def everywhere(variant: Variant, edit: Edit, patch: Patch) -> Variant:
    """Make the same edit where the next origin is, if the first one uncovers another of its kind (`err_a` and `err_b` both overflow)."""
    seen = {patch.origin.value_id}
    found = variant
    for _ in range(ROUNDS):
        try:
            trace = Trace.of(found.program, found.tensors)
            location = locate(trace)
            if location is None or location.origin.value_id in seen:
                break
            seen.add(location.origin.value_id)
            more = edit(Patch(trace, location.origin))
        except _UNMADE:
            break
        if more is None:
            break
        site = location.origin.site
        found = replace(more, label=f"{found.label}; the same {f'at line {site.line}' if site else 'elsewhere'}")
    return found


def _try(variant: Variant, kind: str, healthy: Healthy | None, dtype: torch.dtype | None = None) -> Row:
    try:
        run = execute_ends(variant.program, variant.tensors, dtype)
    except ProgramError as error:
        return Row(variant.id, variant.label, kind, None, 0, 0, None, False, str(error))
    return _row(variant.id, variant.label, kind, variant.program, run, healthy)


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
