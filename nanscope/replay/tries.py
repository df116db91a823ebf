"""Replays a saved step: as recorded, in float64, and under edits at the origin, each forward and backward.

A row says what came out: the loss, whether every gradient is finite, and how far the gradient of the healthy elements is from where it
should be. "Should be" is measured, too: the recorded program in float64, with exactly the offending elements neutralised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanscope.errors import NanscopeError, ProgramError
from nanscope.locate.location import Location, locate, spike
from nanscope.program.by_rows import execute_ends
from nanscope.program.calls import Computes
from nanscope.program.numbers import is_finite, same_bits
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.replay.edits import CONTROLS, EDITS
from nanscope.replay.patch import Patch, Variant
from nanscope.replay.reference import Healthy, results
from nanscope.snapshot.observation import Row
from nanscope.snapshot.step import Snapshot


@dataclass(frozen=True, slots=True)
class Replay:
    """All rows, and whether the recorded step came out again.

    reproduces: the loss is bit-identical to the recorded one; None if none was recorded. gradients: the same for the kept gradients.
    location: where the replayed step went wrong, None if it did not (the fault was transient, or lies outside the program).
    """

    rows: tuple[Row, ...]
    reproduces: bool | None
    gradients: bool | None
    location: Location | None
    run: Run | None


def replay(snapshot: Snapshot, edits: Sequence[tuple[str, Callable[[Patch], Variant | None]]] = (), *, full: bool = True) -> Replay:
    """Run a snapshot under all variants.

    edits: further edits to try at the origin, with what to call them. full: also try the standard edits and controls.
    Raises ProgramError if the recorded program itself cannot be run.
    """
    program = snapshot.program
    if not program.calls:
        return Replay((), None, None, None, None)
    run = program.execute(snapshot.tensors, trace=True)
    suspect = snapshot.observation.suspect
    location = locate(program, run) or (spike(program, run) if suspect else None)
    loss = run.values[program.output]
    reproduces = None if snapshot.loss is None else same_bits(loss, snapshot.loss)
    gradients = None
    if snapshot.grads:
        gradients = all(leaf in run.grads and same_bits(run.grads[leaf], grad) for leaf, grad in snapshot.grads.items())
    note = {True: "reproduces bit for bit", False: "does not reproduce", None: ""}[reproduces]
    if reproduces and gradients is False:
        note = "loss reproduces bit for bit, gradients do not"
    if program.computes is not Computes.LOSS:
        reproduces, gradients, note = None, None, ""
    # From here on only the values are read: where the gradients went is known, and on a large batch they are most of the memory.
    run = replace(run, grads={leaf.id: run.grads[leaf.id] for leaf in program.leaves if leaf.id in run.grads}, returned={})
    rows = [_row("as_recorded", "as recorded", "recorded", program, run, None, note)]
    if location is None:
        return Replay(tuple(rows), reproduces, gradients, None, run)
    patch = Patch(program, location.origin, run.values, snapshot.tensors)
    healthy = Healthy.of(patch)
    rows.append(_try("float64", "everything in float64", "float64", program, snapshot.tensors, healthy, torch.float64))
    candidates: list[tuple[str, str, Callable[[Patch], Variant | None]]] = []
    if full:
        candidates += [(name, "fix", edit) for name, edit in EDITS.items()]
    candidates += [(name, "asked", edit) for name, edit in edits]
    if full and (location.origin.born or location.origin.leaf is None or location.origin.leaf.origin == "data"):
        candidates += [(name, "control", edit) for name, edit in CONTROLS.items()]
    for name, kind, edit in candidates:
        try:
            variant = edit(patch)
        except (NanscopeError, RuntimeError, ValueError, IndexError, StopIteration) as error:
            variant = None  # an edit that cannot be made here is not worth losing the verdict for
            if kind == "asked":
                rows.append(Row(name, name, kind, None, 0, 0, None, False, str(error)))
                continue
        if variant is None:
            if kind == "asked":
                rows.append(Row(name, name, kind, None, 0, 0, None, False, "does not apply to this origin"))
            continue
        row = _try(variant.id, variant.label, kind, variant.program, variant.tensors, healthy)
        if kind == "fix" and not row.works:
            again = everywhere(variant, edit, patch)
            if again is not variant:
                row = _try(again.id, again.label, kind, again.program, again.tensors, healthy)
        rows.append(row)
    if suspect:
        rows = [row if row.kind in ("recorded", "float64") else replace(row, works=row.works and _calmer(row, rows[0])) for row in rows]
    if program.computes is not Computes.LOSS:
        rows = [replace(row, loss=None) for row in rows]
    return Replay(tuple(rows), reproduces, gradients, location, run)


ROUNDS = 3  # further places at which one edit is tried


def everywhere(variant: Variant, edit: Callable[[Patch], Variant | None], patch: Patch) -> Variant:
    """Make the same edit where the next origin is, if the first one uncovers another of its kind (`err_a` and `err_b` both overflow)."""
    seen = {patch.origin.value_id}
    found = variant
    for _ in range(ROUNDS):
        try:
            run = found.program.execute(found.tensors, trace=True)
            location = locate(found.program, run)
            if location is None or location.origin.value_id in seen:
                break
            seen.add(location.origin.value_id)
            more = edit(Patch(found.program, location.origin, run.values, found.tensors))
        except (NanscopeError, RuntimeError, ValueError, IndexError, StopIteration):
            break
        if more is None:
            break
        site = location.origin.site
        found = replace(more, label=f"{found.label}; the same {f'at line {site.line}' if site else 'elsewhere'}")
    return found


def _try(
    name: str,
    label: str,
    kind: str,
    program: Program,
    tensors: dict[int, Tensor],
    healthy: Healthy | None,
    dtype: torch.dtype | None = None,
) -> Row:
    try:
        run = execute_ends(program, tensors, dtype)
    except ProgramError as error:
        return Row(name, label, kind, None, 0, 0, None, False, str(error))
    return _row(name, label, kind, program, run, healthy)


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
