"""The map of the offending tensor, ready to be drawn by any renderer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanscope.locate.layout import Layout
from nanscope.report.clean import clean, is_finite_number, real
from nanscope.text import count, show_index
from nanscope.verdict.incident import Incident
from nanscope.verdict.tokens import TokenMap, Track

LEVELS = 5  # steps of the colour scale on each side of 0


@dataclass(frozen=True, slots=True)
class Grid:
    """The offending tensor, ready to be drawn.

    values: [rows][columns], None where there is nothing. bad: non-finite, or an exponent that overflows. limit: of such an exponent,
    in nats. scale: magnitude at which the colour is full; saturated: some finite values lie beyond it. ring: the origin, as (row, column)
    of the cut. cut: which part of the whole this is, in words. count: what is bad, in words. per_row: each row is one number, repeated.
    place: where the origin stands, as a label of the ring.
    """

    what: str
    values: tuple[tuple[float | None, ...], ...]
    masked: tuple[tuple[bool, ...], ...]
    bad: tuple[tuple[bool, ...], ...]
    ring: tuple[int, int] | None
    first_row: int
    first_column: int
    row_name: str
    column_name: str
    scale: float
    saturated: bool
    limit: float | None
    cut: str
    count: str
    per_row: bool
    place: str

    @property
    def ringed(self) -> int:
        """How many columns the ring goes around."""
        return self.width if self.per_row else 1

    @property
    def width(self) -> int:
        """Columns shown."""
        return max((len(line) for line in self.values), default=0)

    def level(self, row: int, column: int) -> int | None:
        """Return the colour of an element, −LEVELS to LEVELS, None where there is no finite value."""
        value = self.values[row][column]
        if value is None or not math.isfinite(value):
            return None
        if self.scale <= 0:
            return 0
        return int(math.copysign(round(LEVELS * min(1.0, abs(value) / self.scale)), value))


def grid_of(incident: Incident, most_rows: int, most_columns: int) -> Grid | None:
    """Return the map of an incident, cut to a size around the origin; None where there is nothing to draw."""
    picture = incident.picture
    if picture is None or not picture.values or not any(picture.values):
        return None
    width = max(len(line) for line in picture.values)
    top = max(0, min(picture.row - most_rows // 2, len(picture.values) - most_rows))
    left = max(0, min(picture.column - most_columns // 2, width - most_columns))
    columns = range(left, min(left + most_columns, width))
    lines = range(top, min(top + most_rows, len(picture.values)))
    values = tuple(tuple(real(_cell(picture.values, r, c)) for c in columns) for r in lines)
    masked = tuple(tuple(_cell(picture.masked or (), r, c) is True for c in columns) for r in lines)
    overflowed = not is_finite_number(incident.origin.value)
    limit, ring = real(incident.origin.limit), (picture.row - top, picture.column - left)
    bad = tuple(tuple(is_bad(v, limit) or ((r, c) == ring and overflowed) for c, v in enumerate(line)) for r, line in enumerate(values))
    scale, saturated = _scale(values, bad, incident.tokens)
    inside = 0 <= ring[0] < len(lines) and 0 <= ring[1] < len(columns)
    layout, place = picture.layout, show_index(incident.origin.index)
    row_name, column_name = layout.row, layout.column
    first_row, first_column = picture.first_row + top, picture.first_column + left
    cut = _cut(row_name, column_name, (first_row, len(lines), picture.rows), (first_column, len(columns), picture.columns))
    return Grid(
        what=clean(picture.what, 80),
        values=values,
        masked=masked,
        bad=bad,
        ring=ring if inside else None,
        first_row=first_row,
        first_column=first_column,
        row_name=row_name,
        column_name=column_name,
        scale=scale,
        saturated=saturated,
        limit=limit,
        cut=cut,
        count=_count(values, masked, bad, limit) if incident.tokens is None else whole_count(incident.tokens),
        per_row=layout is Layout.ROWS,
        place=layout.spot(picture.first_row + picture.row, 0) if layout is Layout.ROWS else place,
    )


def _cell(lines: Sequence[Sequence[Any]], row: int, column: int) -> Any:
    return lines[row][column] if row < len(lines) and column < len(lines[row]) else None


def is_bad(value: float | None, limit: float | None) -> bool:
    """Is it no finite number, or an exponent beyond its limit?"""
    return value is not None and (not math.isfinite(value) or (limit is not None and value > limit))


def _scale(values: Sequence[Sequence[float | None]], bad: Sequence[Sequence[bool]], tokens: TokenMap | None) -> tuple[float, bool]:
    """The magnitude of full colour: the largest, unless a few outliers would wash out everything else. tokens: of the whole, if known."""
    cells = zip(itertools.chain.from_iterable(values), itertools.chain.from_iterable(bad), strict=True)
    sizes = sorted(abs(value) for value, mark in cells if value is not None and not mark)
    if not sizes:
        return 0.0, False
    if tokens is not None and (usual := full_colour(tokens.tracks[tokens.main])):
        return usual, sizes[-1] > usual
    most, usual = sizes[-1], sizes[int(0.95 * (len(sizes) - 1))]
    return (usual, True) if 0 < 5 * usual < most else (most, False)


def full_colour(track: Track) -> float:
    """Return the magnitude at which the colour of a role is full, in each of its windows: that of the largest that is no outlier."""
    usual, whole = (max((abs(end) for end in ends if math.isfinite(end)), default=0.0) for ends in (track.ends, (track.least, track.most)))
    return usual or whole  # where all that counts is 0


def _cut(row_name: str, column_name: str, rows: tuple[int, int, int], columns: tuple[int, int, int]) -> str:
    parts = []
    for name, (first, shown, whole) in ((row_name, rows), (column_name, columns)):
        if name:
            parts.append(f"{name}s {first}–{first + shown - 1} of {whole}" if shown < whole else count(whole, name))
    return (", " if rows[1] < rows[2] or columns[1] < columns[2] else " × ").join(parts)


def whole_count(tokens: TokenMap) -> str:
    """Return how much is bad, of the whole and not of what is shown."""
    track = tokens.tracks[tokens.main]
    kind = "beyond the limit" if track.limit is not None else "non-finite"
    masked = "" if not track.bad_masked else ", all masked" if track.bad_masked == track.bad else f", {track.bad_masked:,} masked"
    whole = tokens.rows * (1 if track.per_row else tokens.columns)
    return f"{track.bad:,} of {whole:,} {kind}{masked}" if track.bad else "all finite"


def _count(
    values: Sequence[Sequence[float | None]], masked: Sequence[Sequence[bool]], bad: Sequence[Sequence[bool]], limit: float | None
) -> str:
    marks = list(zip(itertools.chain.from_iterable(bad), itertools.chain.from_iterable(masked), strict=True))
    hits = sum(mark for mark, _ in marks)
    if not hits:
        return ""
    total = sum(value is not None for value in itertools.chain.from_iterable(values))
    hidden = sum(mark and out for mark, out in marks)
    kind = "beyond the limit" if limit is not None else "non-finite"
    words = f"{hits} of {total} shown {'is' if hits == 1 else 'are'} {kind}"
    which = "masked" if hidden == hits == 1 else "all masked" if hidden == hits else f"{hidden} masked"
    return f"{words}, {which}" if hidden else words
