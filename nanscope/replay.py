"""Replays a saved step: as recorded, in float64, and under edits at the origin, each forward and backward.

A row says what came out: the loss, whether every gradient is finite, and how far the gradient of the healthy elements is from where it
should be. "Should be" is measured, too: the recorded program in float64, with exactly the offending elements neutralised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanscope.errors import NanscopeError, ProgramError
from nanscope.locate import Location, locate, spike
from nanscope.program import Call, Computes, Leaf, Program, Ref, Run, same_bits
from nanscope.rowwise import AT_ONCE, LARGE, execute_by_rows
from nanscope.snapshot import Snapshot, tensor_bytes
from nanscope.summary import is_finite
from nanscope.variants import CONTROLS, EDITS, Patch, Variant, repaired


@dataclass(frozen=True, slots=True)
class Row:
    """One way of running the step.

    kind: "recorded", "float64", "fix", "control" (a tempting wrong one) or "asked" (by --edit).
    loss: what came out. bad, total: leaf gradients that are non-finite, of how many. distortion: largest change of a healthy element's
    gradient, relative to the largest healthy gradient; 0 where it is within the rounding of the recorded dtype, None where it cannot be
    measured.
    works: loss and gradients are finite, and of a spike no longer huge. largest: magnitude of the largest gradient element.
    note: why it could not be run, or what is remarkable.
    """

    id: str
    label: str
    kind: str
    loss: float | None
    bad: int
    total: int
    distortion: float | None
    works: bool
    note: str = ""
    largest: float | None = None


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
    suspect = bool(snapshot.observed.get("suspect"))
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
    healthy = _Healthy.of(patch)
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
    healthy: _Healthy | None,
    dtype: torch.dtype | None = None,
) -> Row:
    try:
        run = _ends(program, tensors, dtype)
    except ProgramError as error:
        return Row(name, label, kind, None, 0, 0, None, False, str(error))
    return _row(name, label, kind, program, run, healthy)


def _ends(program: Program, tensors: dict[int, Tensor], dtype: torch.dtype | None = None) -> Run:
    """Run a program for its output and the gradients of its leaves; a large one by rows, if that is possible."""
    run = execute_by_rows(program, tensors, dtype, AT_ONCE) if tensor_bytes(tensors) >= LARGE else None
    return run or program.execute(tensors, dtype=dtype, ends=True)


CALM = 0.01  # a fix of a spike brings the largest gradient to this part of what it was


def _calmer(row: Row, recorded: Row) -> bool:
    return row.largest is not None and recorded.largest is not None and row.largest <= CALM * recorded.largest


def _row(name: str, label: str, kind: str, program: Program, run: Run, healthy: _Healthy | None, note: str = "") -> Row:
    loss = run.values[program.output].double().sum()
    grads = _results(program, run)
    bad = sum(not bool(is_finite(grad)) for grad in grads.values())
    works = bool(torch.isfinite(loss)) and not bad
    largest = max((float(torch.linalg.vector_norm(grad, math.inf)) for grad in grads.values() if grad.numel()), default=None)
    return Row(name, label, kind, float(loss), bad, len(grads), healthy.distortion(grads) if healthy else None, works, note, largest)


def _results(program: Program, run: Run) -> dict[int, Tensor]:
    """What has to come out healthy: the gradients of a loss; of an update or a changed gradient, the thing itself."""
    if program.computes is not Computes.LOSS:
        return {_RESULT: run.values[program.output]}
    return {leaf.id: run.grads[leaf.id] for leaf in program.leaves if leaf.diff and leaf.id in run.grads}


_RESULT = -1  # stands for a program's output, whichever value an edit makes it


@dataclass(frozen=True, slots=True)
class _Healthy:
    """The gradient that the healthy elements should have, in float64, and which elements are healthy.

    noise: how far the same repaired program is from it in the recorded dtype; less than that is rounding.
    """

    grads: dict[int, Tensor]
    masks: dict[int, Tensor]
    noise: float = 0.0

    @staticmethod
    def of(patch: Patch) -> _Healthy | None:
        try:
            variant = repaired(patch)
            if variant is None:
                return None
            run = _ends(variant.program, variant.tensors, torch.float64)
            plain = _ends(variant.program, variant.tensors)
        except NanscopeError:
            return None
        grads = _results(variant.program, run)
        if any(not bool(torch.isfinite(grad).all()) for grad in grads.values()):
            return None
        touched = _touched(patch)
        if patch.program.computes is not Computes.LOSS:
            touched = {_RESULT: ~torch.isfinite(patch.values[patch.program.output])}
        masks = {value: ~touched[value] if value in touched else torch.ones_like(grad, dtype=torch.bool) for value, grad in grads.items()}
        healthy = _Healthy(grads, masks)
        noise = healthy.distortion(_results(variant.program, plain))
        return replace(healthy, noise=noise if math.isfinite(noise) else 0.0)

    def distortion(self, grads: Mapping[int, Tensor]) -> float:
        scale = worst = 0.0
        for value, wanted in self.grads.items():
            got = grads.get(value)
            for part, mask, own in zip(_parts(wanted), _parts(self.masks[value]), _parts(wanted if got is None else got), strict=True):
                if bool(mask.any()):
                    scale = max(scale, float(part[mask].abs().max()))
                    difference = float((own[mask].double() - part[mask]).abs().max())
                    worst = max(worst, difference if math.isfinite(difference) else math.inf)
        relative = worst / scale if scale > 0 else worst
        return 0.0 if relative <= 2 * self.noise else relative


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor some rows at a time: compared as a whole, a large one would be held in float64 once more."""
    rows = tensor.reshape(tensor.shape or (1,))
    parts: Sequence[Tensor] = torch.split(rows, max(1, AT_ONCE // max(rows[:1].numel(), 1)))
    return parts


def _touched(patch: Patch) -> dict[int, Tensor]:
    """Return, for every leaf, the elements that the offending elements of the origin were computed from."""
    origin, program = patch.origin, patch.program
    bad = ~torch.isfinite(patch.values[origin.value_id])
    if not bool(bad.any()):
        bad[origin.index] = True
    if origin.call is None:
        return {origin.value_id: bad}
    # The gradient of the operands' sum over the offending elements is non-zero exactly where they come from.
    found: dict[int, Tensor] = {}
    for value in dict.fromkeys(program.calls[origin.call].inputs()):
        content = patch.values[value]
        if not content.is_floating_point() or content.shape != bad.shape:
            continue
        mark, product, total = (program.new_id() + n for n in range(3))
        part = program.slice(value)
        probe = Program(
            (*part.leaves, Leaf(mark, "offending", "data", False)),
            (
                *part.calls,
                Call("aten.mul.Tensor", (Ref(value), Ref(mark)), (), (product,)),
                Call("aten.sum.default", (Ref(product),), (), (total,)),
            ),
            total,
            part.sites,
        )
        tensors = {leaf.id: patch.tensors[leaf.id] for leaf in part.leaves}
        try:
            run = _ends(probe, {**tensors, mark: bad}, torch.float64)
        except ProgramError:
            continue
        for leaf in part.leaves:
            if leaf.id in run.grads:
                mask = run.grads[leaf.id] != 0
                found[leaf.id] = found[leaf.id] | mask if leaf.id in found else mask
    return found
