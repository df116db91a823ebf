"""Results as sheets of tables. A snapshot: which step it is, how far the harm got, and what each of its tensors holds.

● step 412 · rank 0   loss 0.264, 1 of 1 gradients bad, 24 calls from 7 tensors

  tensor           role       holds
  per_token_logps  log_probs  [4, 6] float32 cpu, −2.9 … −0.1, median −1.4, 20 of 24 counted: −2.9 … −0.1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from torch import Tensor

from nanscope.plain import show as show_plain
from nanscope.program.glance import show
from nanscope.replay.tries import Replay
from nanscope.replay.under import Others
from nanscope.report.clean import clean, numeral
from nanscope.report.figures import FigureRow, FigureSheet, FigureTable
from nanscope.roles import Role, fitting, role_of
from nanscope.snapshot.processes import called
from nanscope.snapshot.step import Snapshot

MOST = 60  # tensors of one table
NAME = 60  # characters


def sheet_of(snapshot: Snapshot) -> FigureSheet:
    """Return what a snapshot holds, as a page shows it; what it means is for `nanscope.diagnose` to say."""
    head = f"{snapshot.place} · {clean(called(snapshot.rank, snapshot.worker), NAME)}"
    rows = [FigureRow((clean(name, NAME), clean(role, NAME), clean(show(tensor, mask)))) for name, role, tensor, mask in _held(snapshot)]
    note = "What a mask of the same shape leaves out is told apart. nanscope.diagnose(snapshot) says what went wrong, and which fix works."
    tables = FigureTable("its tensors", ("tensor", "role", "holds"), tuple(rows[:MOST]), len(rows[MOST:]), note, words=True)
    tone = "harm" if not snapshot.asked and any("!" in row.cells[2] for row in rows) else "quiet"
    data = {
        "step": snapshot.step,
        "rank": snapshot.rank,
        "sentence": clean(snapshot.sentence),
        "tensors": [dict(zip(("name", "role", "holds"), row.cells, strict=True)) for row in rows],
    }
    return FigureSheet("snapshot", head, clean(snapshot.sentence.partition(": ")[2]), tone, (tables,), data)


def rows_sheet(replay: Replay) -> FigureSheet:
    """Return what came of a step that does not go wrong again, or that cannot be run."""
    rows = tuple(
        FigureRow((clean(row.id, NAME), clean(row.label), numeral(row.loss), f"{row.bad} of {row.total} bad" if row.bad else "finite"))
        for row in replay.rows
    )
    table = FigureTable("what was run", ("replay", "what", "loss", "gradients"), rows, words=True)
    head = "nothing to run" if replay.bench is None else clean(replay.bench.snapshot.place)
    tone = "proven" if rows and replay.reproduces is not False else "doubt"
    data = {"sentence": clean(replay.sentence), "rows": show_plain([asdict(row) for row in replay.rows])}
    return FigureSheet("replay", head, clean(replay.sentence), tone, (table,), data)


def others_sheet(others: Others) -> FigureSheet:
    """Return what each objective made of the recorded batch, and what that was read from."""
    rows = tuple(
        FigureRow((clean(one.id, NAME), clean(one.sentence), numeral(one.distortion)), strong=one.proven) for one in others.outcomes
    )
    of = tuple(FigureRow((field, clean(name))) for field, name in others.batch.sources)
    tables = (
        FigureTable("the batch under each of them", ("objective", "what it makes of the batch", "counted tokens off by"), rows, words=True),
        FigureTable("the batch", ("part", "what the training code calls it"), of, words=True),
    )
    tone = "proven" if any(one.proven for one in others.outcomes) else "harm" if others.outcomes else "quiet"
    shape = f"batch {list(others.batch.inputs.log_probs.shape)}"
    data = {"alternatives": [outcome.to_json() for outcome in others.outcomes]}
    return FigureSheet("replay under", shape, clean(others.sentence), tone, tables, data)


def _held(snapshot: Snapshot) -> Iterator[tuple[str, str, Tensor, Tensor | None]]:
    """Yield name, role and content of every tensor, with the mask that it is to be read with."""
    leaves = {leaf.id: leaf for leaf in snapshot.program.leaves}
    called_by = {value: leaves[value].name if value in leaves else None for value in snapshot.tensors}
    names = {value: name or f"value {value}" for value, name in called_by.items()}
    told = {value: leaves[value].role if value in leaves else "" for value in snapshot.tensors}
    roles = {
        value: str(told[value] or fitting(role_of(names[value]), tensor.is_floating_point() or tensor.is_complex()) or "")
        for value, tensor in snapshot.tensors.items()
    }
    masks = [tensor for value, tensor in snapshot.tensors.items() if roles[value] == Role.MASK]

    def mask_of(tensor: Tensor) -> Tensor | None:
        return next((mask for mask in masks if mask is not tensor and mask.shape == tensor.shape), None)

    for value, tensor in sorted(snapshot.tensors.items(), key=lambda held: not called_by[held[0]]):  # what has a name stands first
        yield names[value], roles[value], tensor, mask_of(tensor)
    for value, grad in snapshot.grads.items():
        yield f"gradient of {names.get(value, value)}", str(Role.GRAD), grad, mask_of(grad)
    if snapshot.loss is not None:
        yield "loss", str(Role.LOSS), snapshot.loss, None
