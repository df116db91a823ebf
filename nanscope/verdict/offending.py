"""The tensor that is looked at around an origin, and which of its elements the loss leaves out: for the picture and the map of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.locate.drops import Drop
from nanscope.locate.layout import Layout, layout_of
from nanscope.locate.observe import operand_name
from nanscope.locate.trace import Trace
from nanscope.program.ops import EXPONENTIALS
from nanscope.replay.tries import Replay
from nanscope.roles import last_word

HEIGHT, WIDTH = 24, 64  # of what is cut out of it


@dataclass(frozen=True, slots=True)
class Offending:
    """The origin's own tensor; of an exponential its exponent, since that says by how much.

    value: its id. name: what the code calls it. layout: how it lies in the batch. flat: [rows, columns], all dimensions but the last
    flattened into rows, one number a row repeated. shape: before that. row, column: the origin. limit: where exp of it overflows, in nats.
    masked: [rows, columns], None where no mask is known. mask: the value that says so. out: which of its own elements the loss leaves out,
    [rows, columns], or [rows, 1] of what is one number a row.
    """

    value: int
    name: str
    layout: Layout
    flat: Tensor
    shape: torch.Size
    row: int
    column: int
    limit: float | None
    masked: Tensor | None
    mask: int | None
    out: Tensor | None

    @property
    def own(self) -> Tensor:
        """Its elements, each once."""
        return self.flat[:, :1] if self.layout is Layout.ROWS else self.flat

    @property
    def corner(self) -> tuple[int, int]:
        """The row and the column at which a part of HEIGHT × WIDTH around the origin begins."""
        rows, columns = self.flat.shape
        return max(0, min(self.row - HEIGHT // 2, rows - HEIGHT)), max(0, min(self.column - WIDTH // 2, columns - WIDTH))


def offending(replayed: Replay) -> Offending | None:
    """Return the tensor that is looked at around the origin of a step; None where there is none that has rows and tokens."""
    location, trace = replayed.location, replayed.trace
    if location is None or trace is None:
        return None
    origin = location.origin
    value, name, limit = origin.value_id, origin.variable or origin.op, None
    if origin.op in EXPONENTIALS and origin.operands:
        value, name, made = origin.operands[0].id, operand_name(origin, 0), trace.values[origin.value_id]
        limit = math.log(torch.finfo(made.dtype).max) if made.is_floating_point() else None
    shown = trace.values.get(value)
    if shown is None or shown.dim() == 0 or not shown.is_floating_point() or origin.flat >= shown.numel():
        return None
    layout, shape = layout_of(trace, value, origin.flat)
    per_row = layout is Layout.ROWS
    flat = shown.reshape(-1, 1).expand(shape) if per_row else shown.reshape(-1, shape[-1])
    row, column = (origin.flat, 0) if per_row else divmod(origin.flat, shape[-1])
    mask, masked = _masked(trace, origin.drops, shape, row, column) or (None, None)
    out = masked
    if per_row and masked is not None:  # what is made of masked tokens counts all the same
        out = masked.all(1, keepdim=True) & (origin.masked is True and not any(drop.before for drop in origin.drops))
    return Offending(value, last_word(name), layout, flat, shape, row, column, limit, masked, mask, out)


def _masked(trace: Trace, drops: Sequence[Drop], shape: torch.Size, row: int, column: int) -> tuple[int, Tensor] | None:
    """The mask, and which elements the loss leaves out as it does the origin, [rows, columns]; else what its mask does; None if none is
    known."""
    for drop in drops:
        if drop.by is None or drop.how not in ("mask", "select"):
            continue
        whole = _spread(trace.values[drop.by], shape)
        if whole is not None:
            return drop.by, whole == whole[row, column]
    for value, content in trace.values.items():
        if content.shape == shape and trace.names.says_mask(value):
            whole = _spread(content, shape)
            if whole is not None:
                return value, whole == 0
    return None


def _spread(content: Tensor, shape: torch.Size) -> Tensor | None:
    """What a mask says of each element of this shape, [rows, columns]; None if it is not of these tokens."""
    try:
        return content.expand(shape).reshape(-1, shape[-1])
    except RuntimeError:
        pass
    try:  # one for each token, of which there are several numbers
        return content.reshape(*content.shape, 1).expand(shape).reshape(-1, shape[-1])
    except RuntimeError:
        return None
