"""The tables of a step's precision; every renderer draws their rows and decides nothing about them."""

from __future__ import annotations

import math

from nanscope.foresight.precision_model import Precision, Rounds, share
from nanscope.foresight.precision_run import Change
from nanscope.foresight.precision_tokens import Nats
from nanscope.report.clean import clean
from nanscope.report.figures import FigureRow, FigureSheet, FigureTable
from nanscope.text import number

CALLS, OTHERS = 12, 6  # rows shown
NAME = 44  # characters of an expression


def step_of(found: Precision) -> str:
    """Return which step it is, and what it computes in."""
    return f"step {found.step} · rank {found.rank} · {', '.join(found.dtypes)}"


def sheet_of(found: Precision) -> FigureSheet:
    """Return the whole of it, for every rendering."""
    return FigureSheet("precision", step_of(found), clean(found.sentence), "harm" if found.harmful else "proven", tables(found))


def tables(found: Precision) -> tuple[FigureTable, ...]:
    """Return what every rendering shows, in order; a table without rows is left out."""
    return tuple(table for table in (_calls(found), _log_probs(found), _moved(found), _sums(found), _differences(found)) if table.rows)


def _calls(found: Precision) -> FigureTable:
    run = [call for call in found.calls if call.alone is not None]
    largest = max((call.alone.gradient for call in run if call.alone is not None and call.alone.finite), default=0.0)
    rows = [FigureRow(("as recorded", "", "", *_figures(found.recorded), ""), strong=True)]
    if found.wide is not None:
        rows.append(FigureRow(("everything in float32", "", "", *_figures(found.wide), ""), strong=True))
    for call in run[:CALLS]:
        assert call.alone is not None
        cost = call.alone.gradient
        part = 1.0 if not math.isfinite(cost) else cost / largest if largest else 0.0
        rows.append(FigureRow((_called(call), clean(call.where, 60), call.dtype, *_figures(call.alone), _back(call)), part))
    note = (
        "A row is the step in float64 with what this one call has rounded, forward and backward, put in. The last column is the recorded "
        "step with this one call in the wider dtype. All are runs; loss and gradient are against float64."
    )
    heads = ("what rounds", "line", "dtype", "loss off by", "gradient off by", "wider there")
    return FigureTable("what the rounding of each call costs", heads, tuple(rows), len(run[CALLS:]) + found.left_out, note)


def _called(call: Rounds) -> str:
    name = clean(call.called, NAME)
    return name if name == call.op else f"{name} ({call.op})"


def _back(call: Rounds) -> str:
    if call.wider is None:
        return ""
    if not call.wider.finite:
        return f"{call.to}: not finite"
    loss_only = call.alone is not None and not call.alone.gradient
    return f"{call.to}: loss off by {number(call.wider.loss)}" if loss_only else f"{call.to}: {share(call.wider.gradient)} left"


def _figures(off: Change) -> tuple[str, str]:
    return number(off.loss), share(off.gradient) if math.isfinite(off.gradient) else "not finite"


def _log_probs(found: Precision) -> FigureTable:
    rows = []
    for held in found.log_probs:
        came = "came in" if held.off is None else f"computed, off by {_nats(held.off)}"
        name = clean(held.name or "", NAME)
        grid = held.dtype if held.grid == held.dtype else f"{held.dtype}, all on the grid of {held.grid}"
        rows.append(FigureRow((str(held.role), name, grid, str(held.tokens), came, _nats(held.unit))))
    heads = ("log-probs of", "name", "held in", "tokens", "nats off", "half a unit")
    note = "Nats: median, 99th percentile, largest over the counted tokens. Half a unit: the most that rounding to the grid moves a token."
    return FigureTable("how the log-probs are held", heads, tuple(rows), note=note)


def _nats(spread: Nats | None) -> str:
    return "–" if spread is None else ", ".join(f"{nats:.2g}" for nats in (spread.median, spread.most, spread.largest))


def _moved(found: Precision) -> FigureTable:
    rows = []
    if found.of is not None:
        rows.append(FigureRow(("as recorded", "–", *_figures(found.recorded), _decided(found.decided, found.of)), strong=True))
    rows += [FigureRow((row.label, _nats(row.off), *_figures(row.change), _decided(row.decided, row.of))) for row in found.moved]
    heads = ("the step with", "nats off", "loss off by", "gradient off by", "clip decides differently")
    note = "Each is a run in float64 with nothing but the log-probs changed."
    return FigureTable("what coarser log-probs do", heads, tuple(rows), note=note)


def _decided(apart: int | None, of: int | None) -> str:
    return "no clip" if of is None else f"{apart} of {of}"


def _sums(found: Precision) -> FigureTable:
    known = sorted(found.sums, key=lambda row: -abs(row.recorded))
    rows = [
        FigureRow(
            (
                clean(found.names[row.call], NAME),
                f"{row.terms} × {row.dtype}",
                number(row.condition),
                number(row.recorded),
                "the same" if row.agree else number(row.backwards),
                number(row.pairwise),
            )
        )
        for row in known
        if row.recorded or row.backwards or row.pairwise
    ]
    heads = ("sum", "terms", "Σ|x| / |Σx|", "as recorded", "last to first", "pairwise")
    note = "The last three: by how much the loss moves, to first order, with the sum in that order and in its own dtype, against float64."
    return FigureTable("the order in which sums are added up", heads, tuple(rows[:OTHERS]), len(rows[OTHERS:]), note)


def _differences(found: Precision) -> FigureTable:
    known = sorted(found.differences, key=lambda row: -row.most)
    rows = [
        FigureRow(
            (
                clean(found.names[row.call], NAME),
                f"{row.dtype}, {row.bits} bits",
                f"{row.median:.1f}",
                f"{min(row.most, row.bits):.1f}",
                f"{row.equal} of {row.elements}",
            )
        )
        for row in known
    ]
    heads = ("difference", "dtype", "bits lost, typically", "at most", "exactly 0")
    note = "Bits that cancel, over the elements that the loss depends on: what rounding had left in the operands is that much larger there."
    return FigureTable("what cancels in differences", heads, tuple(rows[:OTHERS]), len(rows[OTHERS:]), note)
