"""The precision of a step as a file: a page, a picture, text or JSON, by the suffix."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from nanscope.foresight.precision_model import Precision
from nanscope.report import canvas as drawn
from nanscope.report.clean import clean
from nanscope.report.figures import FigureTable, sheet_html
from nanscope.report.precision_tables import sheet_of, step_of, tables
from nanscope.report.precision_text import render_precision_text
from nanscope.report.render import choose
from nanscope.snapshot.files import write_whole

DRAWN = 3  # tables of a picture


def render_precision(found: Precision, path: Path) -> None:
    """Write it; the suffix chooses the form.

    Raises NanscopeError for a suffix that no renderer has, OSError if the file cannot be written.
    """
    write_whole(path, choose(RENDERERS, path)(found))


def _html(found: Precision) -> bytes:
    return sheet_html(sheet_of(found)).encode()


def _text(found: Precision) -> bytes:
    return render_precision_text(found).encode(errors="backslashreplace")


def _json(found: Precision) -> bytes:
    return (json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n").encode()


def _png(found: Precision) -> bytes:
    """The sentence, a bar for each call, and what coarser log-probs do."""
    canvas = drawn.Canvas(drawn.WIDTH, drawn.TALLEST)
    canvas.text(drawn.MARGIN, canvas.y, f"nanscope precision · {step_of(found)}", 16, drawn.SOFT)
    canvas.y += 12
    canvas.paragraph(clean(found.sentence), 24, drawn.HARM if found.harmful else drawn.INK, "bold")
    for part in tables(found)[:DRAWN]:
        _drawn(canvas, part)
    buffer = BytesIO()
    canvas.write(buffer)
    return buffer.getvalue()


def _drawn(canvas: drawn.Canvas, part: FigureTable) -> None:
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
