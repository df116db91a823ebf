"""The batch to look around in: what the page's script reads, and what is drawn for those who run none.

Notable: numbers are rounded to what a reader needs, and NaN and the infinities are short text, so that a batch of millions of tokens stays
a page of one or two megabytes. What comes out of a run is data in here, and never code.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanscope.locate.layout import Layout
from nanscope.report.clean import Limits, clean, is_finite_number, numeral
from nanscope.report.history import Panel, Scale
from nanscope.report.map import full_colour, is_bad, whole_count
from nanscope.roles import Role
from nanscope.snapshot.texts import legible, told
from nanscope.text import count, listed
from nanscope.verdict.distribution import Histogram
from nanscope.verdict.incident import Incident
from nanscope.verdict.tokens import RECORDED, Cells, TokenMap, Track, Window

DIGITS = 4


@dataclass(frozen=True, slots=True)
class ReadLine:
    """What one role is at the origin. fixed: with the fix, "" where nothing is known of it. far: finite, and far out of its usual range."""

    name: str
    role: str
    value: str
    fixed: str
    median: str
    usual: str
    bad: bool
    far: bool


@dataclass(frozen=True, slots=True)
class WorstRow:
    """A row of the batch with something bad in it."""

    row: int
    column: int
    text: str


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of the whole, in elements. look: its class; title: what is in it."""

    x: int
    y: int
    width: int
    height: int
    look: str
    title: str


@dataclass(frozen=True, slots=True)
class Lookout:
    """What the template draws of a token map.

    title: how large the whole is. unit: what is counted in it. counted_from: which of its numbers begin at 0. summary: how much is bad, of
    all there is. tiles: from far, without the plain ones. tile: how large one is. bad: what is bad, in words. bars: of the histogram, as
    paths. ends: its numbers. masks: is something masked?
    """

    number: int
    rows: int
    columns: int
    row_name: str
    column_name: str
    title: str
    unit: str
    counted_from: str
    summary: str
    tiles: tuple[Tile, ...]
    tile: str
    bad: str
    worst: tuple[WorstRow, ...]
    lines: tuple[ReadLine, ...]
    where: str
    way: str
    counted: str
    hidden: str
    limit: str
    ends: tuple[str, str]
    bins: int
    masks: bool


def lookout_of(incident: Incident, limits: Limits, number: int) -> Lookout | None:
    """Return what is drawn of an incident's tokens; None where nothing is known of them. number: of the map in the page."""
    found = incident.tokens
    if found is None or not found.tracks or not found.windows:
        return None
    row_name, column_name = found.layout.row, found.layout.column
    groups = ("prompt", "completion") if incident.sample is not None and incident.sample.prompt is not None else ()
    main, fixed = found.tracks[found.main], next((way for way in found.ways if way != RECORDED), "")
    window = found.windows[0]
    bars = _bars(main)
    return Lookout(
        number=number,
        rows=found.rows,
        columns=found.columns,
        row_name=row_name,
        column_name=column_name,
        title=_extent(found, found.rows, found.columns),
        unit=f"{column_name}s",
        counted_from=listed([f"{name}s" for name in (row_name, column_name, *groups) if name]).capitalize(),
        summary=whole_count(found),
        tiles=_tiles(found),
        tile=_size(found),
        bad="the origin" if not main.bad else "non-finite" if main.limit is None else f"non-finite, or above {main.limit:.2f}",
        worst=tuple(_worst(row, counted, hidden, found) for row, counted, hidden in found.worst),
        lines=tuple(_line(track, found, fixed, limits) for track in found.tracks),
        where=_where(found, window),
        way=clean(fixed, limits.text),
        counted=bars[0],
        hidden=bars[1],
        limit=bars[2],
        ends=_ends(main, main.histogram),
        bins=len(main.histogram.counted) if main.histogram else 0,
        masks=any(share > 0 for line in found.tiles_masked or () for share in line),
    )


def _where(found: TokenMap, window: Window) -> str:
    """Where the origin stands, and whether the loss counts it; of one number a row, of which token of that the other roles are shown."""
    spot = found.layout.spot(found.row, found.column)
    if found.layout is Layout.ROWS:
        spot += f", and its token {found.column}"
    if window.masked is None:
        return spot
    masked = window.masked[found.row - window.row][found.column - window.column]
    return f"{spot}: {'masked, the loss does not count it' if masked else 'the loss counts it'}"


def _extent(found: TokenMap, rows: int, columns: int) -> str:
    """How large a part is: 512 rows × 64 tokens, 64 elements."""
    across = count(columns, found.layout.column)
    return f"{count(rows, found.layout.row)} × {across}" if found.layout.row else across


def _size(found: TokenMap) -> str:
    height, width = found.tile_height, found.tile_width
    return f"one {found.layout.column}" if height == width == 1 else _extent(found, height, width)


def _tiles(found: TokenMap) -> tuple[Tile, ...]:
    tiles: list[Tile] = []
    for down, line in enumerate(found.tiles):
        for across, bad in enumerate(line):
            share = 0.0 if found.tiles_masked is None else found.tiles_masked[down][across]
            look = "bad" if bad else "masked" if share >= 0.5 else ""
            if not look:
                continue
            y, x = down * found.tile_height, across * found.tile_width
            height, width = min(found.tile_height, found.rows - y), min(found.tile_width, found.columns - x)
            what = f"{bad} bad" if found.tracks[found.main].bad else THE_ORIGIN
            spans = ((found.layout.row, y, height), (found.layout.column, x, width))
            title = ", ".join(f"{name}s {first}–{first + size - 1}" for name, first, size in spans if name) + f": {what}" if bad else ""
            if tiles and not bad and tiles[-1].look == look and tiles[-1].y == y and tiles[-1].x + tiles[-1].width == x:
                before = tiles.pop()  # padding is mostly of one piece
                x, width = before.x, before.width + width
            tiles.append(Tile(x, y, width, height, look, title))
    return tuple(tiles)


def _worst(row: int, counted: int, hidden: int, found: TokenMap) -> WorstRow:
    parts = [f"{counted:,} bad" if counted else "", f"{hidden:,} bad and masked" if hidden else ""]
    if found.layout is Layout.ROWS:
        parts = ["bad and masked" if hidden else "bad"]
    column = found.column if row == found.row else _first_bad(found, row)
    words = ", ".join(filter(None, parts)) if found.tracks[found.main].bad else THE_ORIGIN
    return WorstRow(row, column, f"{found.layout.row} {row:,}: {words}")


def _first_bad(found: TokenMap, row: int) -> int:
    """Where a row is bad, as far as its values are kept."""
    track = found.tracks[found.main]
    for window, cells in zip(found.windows, track.cells[RECORDED], strict=True):
        if window.row <= row < window.row + window.height and not track.per_row:
            for n, value in enumerate(cells[row - window.row]):
                if is_bad(value, track.limit):
                    return window.column + n
    return found.column


def _line(track: Track, found: TokenMap, fixed: str, limits: Limits) -> ReadLine:
    value = _at(track, found, RECORDED)
    bad = is_bad(value, track.limit)
    return ReadLine(
        clean(track.name, limits.text),
        "token id" if is_named(track) else clean(track.role.replace("_", " "), 60) if track.role != track.name else "",
        told(int(value), found.texts, limits.text // 5) if is_named(track) and math.isfinite(value) else _numeral(value),
        (_numeral(_at(track, found, fixed)) if fixed in track.cells else "same") if fixed else "",
        "" if math.isnan(track.median) else _numeral(track.median),
        "" if math.isnan(track.median) else f"{_numeral(track.low)} … {_numeral(track.high)}",
        bad,
        not bad and is_far(value, track),
    )


def _numeral(value: float) -> str:
    """A number as the script writes it, too, which knows no −0."""
    return numeral(value + 0.0)


THE_ORIGIN = "the origin"  # where the number itself is finite, and its gradient is not

FAR = 5  # widths of the usual range


def is_far(value: float, track: Track) -> bool:
    """Is a number of a role far out of where most of them are?"""
    room = FAR * (track.high - track.low)
    return room > 0 and not track.low - room <= value <= track.high + room


def is_named(track: Track) -> bool:
    """Are its numbers names, of which each digit counts?"""
    return track.role == Role.RESPONSE_IDS


def _at(track: Track, found: TokenMap, way: str) -> float:
    window = found.windows[0]
    return track.cells[way][0][found.row - window.row][0 if track.per_row else found.column - window.column]


def _bars(track: Track) -> tuple[str, str, str]:
    """The bars of the counted and of the masked elements, and the limit, in a box of 10 a bin by 46."""
    h = track.histogram
    if h is None:
        return "", "", ""
    top = math.log1p(max(*h.counted, *h.masked))

    def bars(counts: Sequence[int], shift: int) -> str:
        drawn = ((10 * n + shift, 4 + 40 * math.log1p(size) / top) for n, size in enumerate(counts) if size)
        return "".join(f"M{x} 46v{-high:.1f}h4v{high:.1f}z" for x, high in drawn)

    at = None if track.limit is None else 10 * len(h.counted) * (track.limit - h.low) / (h.high - h.low)
    limit = f"M{at:.1f} 0V46" if at is not None and 0 <= at <= 10 * len(h.counted) else ""
    return bars(h.counted, 1), bars(h.masked, 5), limit


def _ends(track: Track, h: Histogram | None) -> tuple[str, str]:
    """The numbers under a histogram; what lies beyond is counted, and the limit named where it is not drawn."""
    if h is None:
        return "", ""
    limit = f" (limit {numeral(track.limit)})" if track.limit is not None and not h.low <= track.limit <= h.high else ""
    low, high = (f", and {n:,} {side}" if n else "" for n, side in ((h.below, "below"), (h.above, "above")))
    return f"{numeral(h.low)}{low}", f"{numeral(h.high)}{high}{limit}"


# -- what the script reads -----------------------------------------------------------------------------------------------------------------


def map_data(incident: Incident, limits: Limits, windows: int) -> dict[str, Any] | None:
    """Return a token map as JSON data. windows: how many of them are kept."""
    found = incident.tokens
    if found is None or not found.tracks or not found.windows:
        return None
    return {
        "rows": found.rows,
        "columns": found.columns,
        "row": found.row,
        "column": found.column,
        "overflowed": not is_finite_number(incident.origin.value),
        "row_name": found.layout.row,
        "column_name": found.layout.column,
        "per_row": found.layout is Layout.ROWS,
        "main": found.main,
        "command": _values_command(incident.snapshot, found),
        "ways": {clean(way, 60): clean(words, limits.text) for way, words in found.ways.items()},
        "windows": [_window(window) for window in found.windows[:windows]],
        "tracks": [_track(track, limits, windows) for track in found.tracks],
        "texts": _texts(found, limits, windows),
    }


def _values_command(path: str | None, found: TokenMap) -> str:
    """The command that prints what the page does not keep: every tensor of the step at ROW and COLUMN, which the script fills in. "" for a
    path that cannot be shown as it is."""
    rows, columns, file = found.rows, found.columns, clean(path or "", 4096)
    if not path or file != path:
        return ""
    code = (
        f"import nanscope; t = nanscope.replay({file!r}).trace; "
        f"[print(t.names.name(v) or v, x.reshape({rows}, -1)[ROW, COLUMN % (x.numel() // {rows})].item()) "
        f"for v, x in t.values.items() if x.numel() in ({rows}, {rows * columns})]"
    )
    return "python -c " + (f'"{code}"' if shlex.quote(file) == file else shlex.quote(code))


def _texts(found: TokenMap, limits: Limits, windows: int) -> dict[str, str]:
    """What the token ids in the windows that are kept stand for."""
    kept = {
        int(value)
        for track in found.tracks
        if is_named(track)
        for window in track.cells[RECORDED][:windows]
        for line in window
        for value in line
        if math.isfinite(value)
    }
    return {str(token): legible(text, limits.text // 5) for token, text in found.texts.items() if token in kept}


def _window(window: Window) -> dict[str, Any]:
    masked = None if window.masked is None else ["".join("1" if cell else "0" for cell in line) for line in window.masked]
    return {"row": window.row, "column": window.column, "height": window.height, "width": window.width, "masked": masked}


def _track(track: Track, limits: Limits, windows: int) -> dict[str, Any]:
    return {
        "name": clean(track.name, limits.text),
        "role": clean(track.role, 60),
        "per_row": track.per_row,
        "limit": _real(track.limit),
        "bad": track.bad,
        "bad_masked": track.bad_masked,
        "median": short(track.median),
        "low": short(track.low),
        "high": short(track.high),
        "full": short(full_colour(track)),
        "histograms": {clean(way, 60): _histogram(track, h) for way, h in {RECORDED: track.histogram, **track.histograms}.items() if h},
        "left": {clean(way, 60): list(counts) for way, counts in track.left.items()},
        "ids": is_named(track),
        "cells": {clean(way, 60): _cells(cells, windows, short_step if is_named(track) else short) for way, cells in track.cells.items()},
    }


def _histogram(track: Track, h: Histogram) -> dict[str, Any]:
    return {"low": h.low, "high": h.high, "counted": list(h.counted), "masked": list(h.masked), "ends": list(_ends(track, h))}


def _cells(cells: Cells, windows: int, written: Callable[[float], float | int | str]) -> list[Any]:
    return [[[written(value) for value in line] for line in window] for window in cells[:windows]]


def short(value: float) -> float | int | str:
    """Return a number in a few digits, what is none as the text that the script knows."""
    if not math.isfinite(value):
        return "n" if math.isnan(value) else "i" if value > 0 else "-i"
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e6 else rounded


def chart_data(panel: Panel) -> dict[str, Any]:
    """Return a chart as JSON data."""
    scale = Scale.of(panel)
    return {
        "first": _real(scale.first),
        "last": _real(scale.last),
        "low": _real(scale.low),
        "high": _real(scale.high),
        "log": panel.log,
        "limit": _real(panel.limit),
        "incident": _real(panel.incident),
        "curves": [
            {"name": line.name, "points": [[short_step(step), short(value)] for step, value in line.points]}
            for line in panel.series
            if line.points
        ],
    }


def _real(value: float | None) -> float | None:
    """A number that JSON can hold."""
    return value if value is not None and math.isfinite(value) else None


def short_step(step: float) -> float | int:
    """Return the number of a step without a fraction that it does not have."""
    return int(step) if step.is_integer() else step
