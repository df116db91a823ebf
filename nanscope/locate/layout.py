"""How the offending tensor lies in the batch: which of its dimensions are rows, and which tokens.

[64, 48]  beside a mask of that shape    rows and their tokens
[64]      beside these                   one number a row: element 57 is row 57
[64, 16]  of states                      rows and columns
[64]      beside nothing                 elements
"""

from __future__ import annotations

from enum import StrEnum

from torch import Size

from nanscope.locate.piece import batches, row_and_token
from nanscope.locate.trace import Trace
from nanscope.roles import OF_MODEL


class Layout(StrEnum):
    """What the rows and the columns of a map are."""

    TOKENS = "tokens"  # [B, T]
    ROWS = "rows"  # [B] or [B, 1] of a batch [B, T]: one number for all tokens of a row
    COLUMNS = "columns"  # [B, D]; all dimensions but the last are flattened into rows
    ELEMENTS = "elements"  # [N], in one line

    @property
    def row(self) -> str:
        """What a row is called, "" where there is one line of elements."""
        return "" if self is Layout.ELEMENTS else "row"

    @property
    def column(self) -> str:
        """What a column is called."""
        return {Layout.COLUMNS: "column", Layout.ELEMENTS: "element"}.get(self, "token")

    def spot(self, row: int, column: int) -> str:
        """Return where an element of the offending tensor stands, in words: "row 10, token 4,117", "row 57", "element 4"."""
        parts = {self.row: row, self.column: column}
        named = {name: at for name, at in parts.items() if name and not (self is Layout.ROWS and name == self.column)}
        return ", ".join(f"{name} {at:,}" for name, at in named.items())


def layout_of(trace: Trace, value: int, flat: int | None = None) -> tuple[Layout, Size]:
    """Return how a value lies in the batch, and the shape of its map: that of the batch for what has one number a row, else its own.

    flat: the element that is looked at. If it is another token than its index says, the map has rows and columns, and no tokens; None where
    it is none.
    """
    shape, made = trace.values[value].shape, trace.program.maker(value)
    of_model = trace.names.role(value) in OF_MODEL or (made is not None and made.module)
    if of_model or (flat is not None and row_and_token(trace, value, flat) is not None):
        return Layout.COLUMNS if len(shape) > 1 else Layout.ELEMENTS, shape
    if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
        batch = next((one for one in batches(trace, value) if one[0] == shape[0] > 1 and one[0] != one[1]), None)
        if batch is not None:
            return Layout.ROWS, batch
    if len(shape) == 1:
        return Layout.ELEMENTS, shape
    return Layout.TOKENS if len(shape) == 2 and shape in batches(trace, value) else Layout.COLUMNS, shape
