"""The offending tensor as a map of rows and tokens, cut to a readable size around the bad element."""

from __future__ import annotations

from nanscope.locate.observe import operand_name
from nanscope.program.ops import EXPONENTIALS
from nanscope.program.program import Program
from nanscope.replay.tries import Replay
from nanscope.roles import last_word
from nanscope.verdict.incident import Picture

MAP_ROWS, MAP_COLUMNS = 24, 64


def picture_of(program: Program, replayed: Replay) -> Picture | None:
    """Cut the offending tensor, or the exponent that made it, to a map around the bad element; None where there is none to draw."""
    location, run = replayed.location, replayed.run
    if location is None or run is None:
        return None
    origin = location.origin
    shown, what = run.values[origin.value_id], origin.variable or origin.op
    if origin.op in EXPONENTIALS and origin.operands:
        shown, what = run.values[origin.operands[0].id], operand_name(origin, 0)
    if shown.dim() == 0 or not shown.is_floating_point():
        return None
    flat = shown.reshape(-1, shown.shape[-1])
    row, column = divmod(origin.flat, flat.shape[1])
    top = max(0, min(row - MAP_ROWS // 2, flat.shape[0] - MAP_ROWS))
    left = max(0, min(column - MAP_COLUMNS // 2, flat.shape[1] - MAP_COLUMNS))
    window = flat[top : top + MAP_ROWS, left : left + MAP_COLUMNS]
    masked = None
    for drop in origin.drops:
        if drop.by is None or drop.how not in ("mask", "select"):
            continue
        mask = run.values[drop.by]
        try:
            whole = mask.expand(shown.shape).reshape(flat.shape)
        except RuntimeError:
            continue
        excluded = whole == whole[row, column]
        masked = tuple(tuple(bool(x) for x in line) for line in excluded[top : top + MAP_ROWS, left : left + MAP_COLUMNS].tolist())
        break
    values = tuple(tuple(float(x) for x in line) for line in window.double().tolist())
    return Picture(last_word(what), values, masked, row - top, column - left, top, left, flat.shape[0], flat.shape[1])
