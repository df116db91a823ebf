"""The precision of a step in a terminal.

● step 7 · rank 0 · bfloat16   Rounding changes the gradient by 8.5 % of its length, and the loss by −0.0003107. Most is lost in …

  what rounds        line        dtype     loss off by  gradient off by  wider there
  as recorded                              −0.0003107   8.5 %
  clipped (clamp)    loss.py:10  bfloat16  −3.761e−05   6.7 %            float32: 2.2 % left
"""

from __future__ import annotations

from typing import IO

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.foresight.precision_model import Precision
from nanscope.report.clean import clean
from nanscope.report.console import HARM, PROVEN, QUIET, STRONG, plain, show, table
from nanscope.report.precision_tables import PrecisionTable, step_of, tables


def print_precision(found: Precision, *, file: IO[str]) -> None:
    """Print what is known of the precision of a step."""
    show(_shown(found), file=file)


def render_precision_text(found: Precision) -> str:
    """Return it as plain text."""
    return plain(_shown(found))


def _shown(found: Precision) -> RenderableType:
    style = HARM if found.harmful else PROVEN
    parts: list[RenderableType] = [Text.assemble(("● ", style), (step_of(found), STRONG), f"   {clean(found.sentence)}")]
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
