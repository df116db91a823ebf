"""The precision of a step in a terminal.

● step 7 · rank 0 · bfloat16   Rounding changes the gradient by 8.5 % of its length, and the loss by −0.0003107. Most is lost in …

  what rounds        line        dtype     loss off by  gradient off by  wider there
  as recorded                              −0.0003107   8.5 %
  clipped (clamp)    loss.py:10  bfloat16  −3.761e−05   6.7 %            float32: 2.2 % left
"""

from __future__ import annotations

from typing import IO

from nanscope.foresight.precision_model import Precision
from nanscope.report.console import show
from nanscope.report.figures import sheet_shown, sheet_text
from nanscope.report.precision_tables import sheet_of


def print_precision(found: Precision, *, file: IO[str]) -> None:
    """Print what is known of the precision of a step."""
    show(sheet_shown(sheet_of(found)), file=file)


def render_precision_text(found: Precision) -> str:
    """Return it as plain text."""
    return sheet_text(sheet_of(found))
