"""The precision of a step as people read it: in a terminal, as a page, as a picture, and as JSON.

● step 7 · rank 0 · bfloat16   Rounding changes the gradient by 8.5 % of its length, and the loss by −0.0007852. Most is lost in …

  what rounds                   line      dtype     loss      gradient  in float32
  as recorded                                       −0.00079  8.5 %
  clipped (clamp)               loss.py:10 bfloat16 −3.8e−05  7.1 %     leaves 3.3 %
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.check.precision_model import Precision, Rounds, share
from nanscope.check.precision_run import Change
from nanscope.check.precision_tokens import Nats
from nanscope.report import canvas as drawn
from nanscope.report.clean import clean
from nanscope.report.console import HARM, PROVEN, QUIET, STRONG, plain, show, table
from nanscope.report.render import choose
from nanscope.report.template import fill
from nanscope.snapshot.files import write_whole
from nanscope.text import number
from nanscope.version import __version__

CALLS, OTHERS = 12, 6  # rows shown
NAME = 44  # characters of an expression


@dataclass(frozen=True, slots=True)
class PrecisionRow:
    """A line of a table, every cell clean text. part: of the largest in its table, for a bar, 0 where there is none. strong: a total."""

    cells: tuple[str, ...]
    part: float = 0.0
    strong: bool = False


@dataclass(frozen=True, slots=True)
class PrecisionTable:
    """One table of the report. title: what its rows are. more: how many are left out. note: how its figures were made."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[PrecisionRow, ...]
    more: int = 0
    note: str = ""


def tables(found: Precision) -> tuple[PrecisionTable, ...]:
    """Return what every rendering shows, in order; a table without rows is left out."""
    return tuple(table for table in (_calls(found), _log_probs(found), _moved(found), _sums(found), _differences(found)) if table.rows)


def _calls(found: Precision) -> PrecisionTable:
    run = [call for call in found.calls if call.alone is not None]
    largest = max((call.alone.gradient for call in run if call.alone is not None and call.alone.finite), default=0.0)
    rows = [PrecisionRow(("as recorded", "", "", *_figures(found.recorded), ""), strong=True)]
    if found.wide is not None:
        rows.append(PrecisionRow(("everything in float32", "", "", *_figures(found.wide), ""), strong=True))
    for call in run[:CALLS]:
        assert call.alone is not None
        cost = call.alone.gradient
        part = 1.0 if not math.isfinite(cost) else cost / largest if largest else 0.0
        rows.append(PrecisionRow((_called(call), clean(call.where, 60), call.dtype, *_figures(call.alone), _back(call)), part))
    note = (
        "A row is the step in float64 with what this one call has rounded, forward and backward, put in. The last column is the recorded "
        "step with this one call in the wider dtype. All are runs; loss and gradient are against float64."
    )
    heads = ("what rounds", "line", "dtype", "loss off by", "gradient off by", "wider there")
    return PrecisionTable("what the rounding of each call costs", heads, tuple(rows), len(run[CALLS:]) + found.left_out, note)


def _called(call: Rounds) -> str:
    name = clean(call.called, NAME)
    return name if name == call.op else f"{name} ({call.op})"


def _back(call: Rounds) -> str:
    if call.wider is None:
        return ""
    return f"{call.to}: {share(call.wider.gradient)} left" if call.wider.finite else f"{call.to}: not finite"


def _figures(off: Change) -> tuple[str, str]:
    return number(off.loss), share(off.gradient) if math.isfinite(off.gradient) else "not finite"


def _log_probs(found: Precision) -> PrecisionTable:
    rows = []
    for held in found.log_probs:
        came = "came in" if held.off is None else f"computed, off by {_nats(held.off)}"
        name = clean(held.name or "", NAME)
        grid = held.dtype if held.grid == held.dtype else f"{held.dtype}, all on the grid of {held.grid}"
        rows.append(PrecisionRow((str(held.role), name, grid, str(held.tokens), came, _nats(held.unit))))
    heads = ("log-probs of", "name", "held in", "tokens", "nats off", "half a unit")
    note = "Nats: median, 99th percentile, largest over the counted tokens. Half a unit: the most that rounding to the grid moves a token."
    return PrecisionTable("how the log-probs are held", heads, tuple(rows), note=note)


def _nats(spread: Nats | None) -> str:
    return "–" if spread is None else ", ".join(f"{nats:.2g}" for nats in (spread.median, spread.most, spread.largest))


def _moved(found: Precision) -> PrecisionTable:
    rows = []
    if found.of is not None:
        rows.append(PrecisionRow(("as recorded", "–", *_figures(found.recorded), _decided(found.decided, found.of)), strong=True))
    rows += [PrecisionRow((row.label, _nats(row.off), *_figures(row.change), _decided(row.decided, row.of))) for row in found.moved]
    heads = ("the step with", "nats off", "loss off by", "gradient off by", "clip decides differently")
    note = "Each is a run in float64 with nothing but the log-probs changed."
    return PrecisionTable("what coarser log-probs do", heads, tuple(rows), note=note)


def _decided(apart: int | None, of: int | None) -> str:
    return "no clip" if of is None else f"{apart} of {of}"


def _sums(found: Precision) -> PrecisionTable:
    known = sorted(found.sums, key=lambda row: -abs(row.recorded))
    rows = [
        PrecisionRow(
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
    return PrecisionTable("the order in which sums are added up", heads, tuple(rows[:OTHERS]), len(rows[OTHERS:]), note)


def _differences(found: Precision) -> PrecisionTable:
    known = sorted(found.differences, key=lambda row: -row.most)
    rows = [
        PrecisionRow(
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
    return PrecisionTable("what cancels in differences", heads, tuple(rows[:OTHERS]), len(rows[OTHERS:]), note)


def print_precision(found: Precision, *, file: IO[str]) -> None:
    """Print what is known of the precision of a step."""
    show(_shown(found), file=file)


def render_precision(found: Precision, path: Path) -> None:
    """Write it; the suffix chooses the form.

    Raises NanscopeError for a suffix that no renderer has, OSError if the file cannot be written.
    """
    write_whole(path, choose(RENDERERS, path)(found))


def _head(found: Precision) -> str:
    return f"step {found.step} · rank {found.rank} · {', '.join(found.dtypes)}"


def _shown(found: Precision) -> RenderableType:
    style = HARM if found.harmful else PROVEN
    parts: list[RenderableType] = [Text.assemble(("● ", style), (_head(found), STRONG), f"   {clean(found.sentence)}")]
    for part in tables(found):
        parts += [Text(""), Padding(_table(part), (0, 2))]
        if part.more:
            parts.append(Padding(Text(f"… {part.more} more", QUIET), (0, 2)))
    return Group(*parts)


def _table(part: PrecisionTable) -> RenderableType:
    drawn_as = table(*part.heads)
    for row in part.rows:
        drawn_as.add_row(Text(row.cells[0], STRONG if row.strong else ""), *row.cells[1:])
    return drawn_as


def _html(found: Precision) -> bytes:
    return fill(
        "precision.html",
        ("page.css", "precision.css"),
        version=__version__,
        head=_head(found),
        sentence=clean(found.sentence),
        tone="harm" if found.harmful else "proven",
        tables=tables(found),
    ).encode()


def _text(found: Precision) -> bytes:
    return plain(_shown(found)).encode(errors="backslashreplace")


def _json(found: Precision) -> bytes:
    return (json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n").encode()


def _png(found: Precision) -> bytes:
    """The sentence, a bar for each call, and what coarser log-probs do."""
    canvas = drawn.Canvas(drawn.WIDTH, drawn.TALLEST)
    canvas.text(drawn.MARGIN, canvas.y, f"nanscope precision · {_head(found)}", 16, drawn.SOFT)
    canvas.y += 12
    canvas.paragraph(clean(found.sentence), 24, drawn.HARM if found.harmful else drawn.INK, "bold")
    for part in tables(found)[:3]:
        _drawn(canvas, part)
    buffer = BytesIO()
    canvas.write(buffer)
    return buffer.getvalue()


def _drawn(canvas: drawn.Canvas, part: PrecisionTable) -> None:
    """A table, the bars of its rows behind them."""
    canvas.y += 40
    canvas.text(drawn.MARGIN, canvas.y, part.title, 17, drawn.INK, "bold")
    wide = canvas.width - 2 * drawn.MARGIN
    first = 0.34 * wide
    each = (wide - first) / max(len(part.heads) - 1, 1)
    starts = [float(drawn.MARGIN), *(drawn.MARGIN + first + each * n for n in range(len(part.heads) - 1))]
    canvas.y += 26
    for x, head in zip(starts[1:], part.heads[1:], strict=True):
        canvas.text(x, canvas.y, head, 13, drawn.QUIET, clip=each - 12)
    canvas.y += 8
    for row in part.rows:
        canvas.box(drawn.MARGIN, canvas.y, wide, 1, drawn.HAIR)
        if row.part > 0:
            canvas.box(drawn.MARGIN, canvas.y + 4, row.part * (first - 16), 22, drawn.HARM_VEIL)
        for x, cell, room in zip(starts, row.cells, (first - 16, *(each - 12 for _ in row.cells[1:])), strict=True):
            canvas.text(x + (6 if x == starts[0] else 0), canvas.y + 20, cell, 14, drawn.INK, "bold" if row.strong else "plain", clip=room)
        canvas.y += 30
    if part.more:
        canvas.y += 20
        canvas.text(drawn.MARGIN, canvas.y, f"… {part.more} more", 13, drawn.QUIET)


RENDERERS: dict[str, Callable[[Precision], bytes]] = {".html": _html, ".png": _png, ".txt": _text, ".json": _json}
