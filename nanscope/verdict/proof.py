"""The best edit that is proven on a bad step, and the gradient that it gives: what the step would have trained with, had the code been so.

proof = prove(snapshot)
proof.row.label         fill log_importance_weights with 0 where mask excludes it, before exp
proof.grads             leaf id → gradient, finite everywhere

Proven is more here than in a report, where a person decides: what is put into training has to leave healthy elements as they are but for
rounding, and what a bad entry of the batch has a part in loses its own part and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from nanscope.program.calls import Computes
from nanscope.program.numbers import is_finite, largest_in
from nanscope.replay.edits import FILL_IN, MOVE_OFF
from nanscope.replay.patch import Variant, held_still
from nanscope.replay.reference import Healthy, results
from nanscope.replay.refill import offending
from nanscope.replay.tries import STEEP, Bench
from nanscope.snapshot.observation import Row
from nanscope.snapshot.step import Snapshot
from nanscope.text import is_exact
from nanscope.verdict.because import because
from nanscope.verdict.diagnose import examine
from nanscope.verdict.fixes import fixes_of

Site: TypeAlias = tuple[str | None, int | None, str]  # file, line and operator of an origin: the same in another step


@dataclass(frozen=True, slots=True)
class Proof:
    """An edit that was executed on a step, and heals it.

    row: what came out. grads: leaf id → gradient of the edited program, for every leaf that carries one, and recorded: as the program was.
    was: the loss of that. bad, size: elements of the origin that did the harm, of how many. what: the code calls the origin. site: where it
    is.
    """

    row: Row
    grads: Mapping[int, Tensor]
    recorded: Mapping[int, Tensor]
    was: float
    bad: int
    size: int
    what: str
    site: Site


def prove(snapshot: Snapshot, known: Mapping[Site, str]) -> Proof | None:
    """Return the best edit of a step that is proven, and what it gives; None if no edit is, or if the harm does not lie in its program.

    known: the edits that were proven before, of which that of the same origin is tried first. Raises ProgramError if the recorded program
    cannot be run.
    """
    if snapshot.program.computes is not Computes.LOSS or not snapshot.program.calls:
        return None
    bench = Bench.of(snapshot)
    if bench.location is None or not _is_ours(bench):
        return None
    for row, variant in _edits(bench, known.get(_site(bench))):
        grads = _proven(bench, row, variant)
        if grads is not None:
            return _proof(bench, row, grads)
    return None


def _is_ours(bench: Bench) -> bool:
    """Does the program, run again, go wrong as the step did, and not because of what a model has handed to it?"""
    leaf, again = bench.patch.origin.leaf, bench.reproduction
    handed = leaf is not None and (leaf.diff or leaf.is_of_model)
    return not handed and again.holds is not False and (again.gradients is None or again.gradients <= again.rounding)


def _edits(bench: Bench, known: str | None) -> Iterator[tuple[Row, Variant]]:
    """Yield edits that heal the step, best first."""
    again = bench.edit(known) if known is not None else None
    if again is not None:
        yield again
    seen, replayed, _ = examine(bench.snapshot, bench.replay((), full=True))
    rows = {row.id: row for row in replayed.rows if row.kind == "fix" and row.works}
    for fix in fixes_of(seen, because(seen, replayed)[0], replayed.rows)[0]:
        if fix.id in replayed.variants and fix.id in rows:
            yield rows[fix.id], replayed.variants[fix.id]


def _proven(bench: Bench, row: Row, variant: Variant) -> dict[int, Tensor] | None:
    """Return the gradients of an edited program, None if they are not to be trained with."""
    if row.cost and variant.id not in FILL_IN:  # of what is filled in, nothing is trained with
        return None
    patch, program, tensors = bench.patch, variant.program, variant.tensors
    if variant.id in MOVE_OFF and patch.origin.call is not None:
        program, tensors = held_still(patch, program, tensors, lambda value: offending(patch, value))
    run = program.execute(tensors, ends=True)  # all rows at once, as the trainer's code has it: the same to the bit
    grads = {leaf.id: run.grads[leaf.id] for leaf in bench.trace.program.leaves if leaf.diff and leaf.id in run.grads}
    if not all(bool(is_finite(grad)) for grad in (*grads.values(), run.values[program.output])):
        return None
    if row.distortion is None:  # no element is healthy: then all of them lose their part, or the edit makes one up
        return grads if not any(bool(grad.any()) for grad in grads.values()) else None
    healthy = bench.healthy
    largest = max((largest_in(grad) for grad in grads.values() if grad.numel()), default=0.0)
    if healthy is not None and healthy.beyond(largest) > STEEP:  # as it is, say, without half precision: finite, and ruinous
        return None
    if healthy is None or not (is_exact(row.distortion) or is_exact(_distortion(healthy, variant))):
        return None
    if variant.id not in FILL_IN:
        return grads
    return {leaf: torch.where(healthy.masks[leaf], grad, 0.0) if leaf in healthy.masks else grad for leaf, grad in grads.items()}


def _distortion(healthy: Healthy, variant: Variant) -> float | None:
    """Return what an edit makes of healthy elements but for rounding, which half precision has much of."""
    run = variant.program.execute(variant.tensors, dtype=torch.float64, ends=True)
    return healthy.distortion(results(variant.program, run))


def _proof(bench: Bench, row: Row, grads: Mapping[int, Tensor]) -> Proof:
    patch = bench.patch
    bad = offending(patch, patch.origin.value_id)
    run, program = bench.trace.run, bench.trace.program
    was = float(run.values[program.output].detach().double().sum())
    row = row if row.distortion is None else replace(row, distortion=0.0)  # what is left of it is rounding
    row = replace(row, label=f"{row.label}, and leave out all that depends on them", cost="") if row.cost else row
    return Proof(row, grads, run.grads, was, int(bad.sum()), bad.numel(), patch.result, _site(bench))


def _site(bench: Bench) -> Site:
    site = bench.patch.origin.site
    return (None if site is None else site.file, None if site is None else site.line, bench.patch.origin.op)
