"""The offending tensor as a map of rows and tokens, cut to a readable size around the bad element."""

from __future__ import annotations

from nanscope.replay.tries import Replay
from nanscope.verdict.incident import Picture
from nanscope.verdict.offending import HEIGHT, WIDTH, offending


def picture_of(replayed: Replay) -> Picture | None:
    """Cut the offending tensor, or the exponent that made it, to a map around the bad element; None where there is none to draw."""
    shown = offending(replayed)
    if shown is None:
        return None
    (rows, columns), (top, left) = shown.flat.shape, shown.corner
    part = (slice(top, top + HEIGHT), slice(left, left + WIDTH))
    masked = None if shown.masked is None else tuple(tuple(map(bool, line)) for line in shown.masked[part].tolist())
    values = tuple(tuple(map(float, line)) for line in shown.flat[part].double().tolist())
    return Picture(shown.name, values, masked, shown.row - top, shown.column - left, top, left, rows, columns, shown.layout)
