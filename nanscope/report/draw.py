"""The pictures of the page: map and charts as SVG paths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanscope.report.clean import Limits, numeral, numeral_step
from nanscope.report.history import Panel, Scale, Series
from nanscope.report.map import Grid, grid_of
from nanscope.text import number
from nanscope.verdict.incident import Incident


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on an axis. at: position in percent."""

    at: str
    text: str
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """Cells of one look. look: class name; path: their outline, in cells."""

    look: str
    path: str


@dataclass(frozen=True, slots=True)
class Map:
    """The map as drawn: sizes in cells, layers, axes, legend, and the numbers around the origin."""

    grid: Grid
    columns: int
    rows: int
    cell: int
    layers: tuple[Layer, ...]
    hatch: str
    crosses: str
    ring: tuple[int, int] | None
    flag: str
    flag_at: str
    flag_side: str
    x: tuple[Tick, ...]
    y: tuple[Tick, ...]
    scale: str
    around: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """A series as drawn. line, dots, marks: paths; last: its latest value."""

    name: str
    kind: str
    line: str
    dots: str
    marks: str
    last: str
    bad: bool


@dataclass(frozen=True, slots=True)
class Chart:
    """A panel as drawn, in units of CHART.

    limit_y, limit_at: where the limit lies, in units and in percent. cross_x: where the incident lies. said: where something was said to be
    about to happen, in units and in percent, and at which step. number: of the chart in the page.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]
    y: tuple[Tick, ...]
    x: tuple[Tick, ...]
    limit_y: str
    limit_at: str
    limit: str
    limit_words: str
    cross_x: str
    label: str
    said: tuple[tuple[str, str, str], ...] = ()
    number: int = 0


CHART = (480, 120)  # width and height of a chart in its own units
MARGIN = 0.35  # around the cells of a map, in cells: the ring of an origin at the edge is drawn there


def map_of(incident: Incident, limits: Limits) -> Map | None:
    """Draw the map of an incident, None where there is none."""
    grid = grid_of(incident, limits.map_rows, limits.map_columns)
    if grid is None:
        return None
    rows, columns = len(grid.values), grid.width
    spots = [(r, c) for r in range(rows) for c in range(columns)]
    looks: dict[str, set[tuple[int, int]]] = {}
    for r, c in spots:
        level = grid.level(r, c)
        if grid.bad[r][c]:
            looks.setdefault("bad", set()).add((r, c))
        elif level is not None:
            looks.setdefault(f"{'n' if level < 0 else 'p' if level else 'z'}{abs(level)}", set()).add((r, c))
    cell = max(10, min(34, 896 // columns, 480 // rows))
    ring = grid.ring
    share = _share(ring[1], columns) if ring else 0.0
    ringed = ring[1] if ring and not grid.per_row else None
    around: tuple[tuple[str, str, str], ...] = ()
    if ring:
        near = range(max(0, ring[1] - 4), min(columns, ring[1] + 5))
        around = tuple(
            (str(grid.first_column + c), numeral(grid.values[ring[0]][c]), " ".join(_marks(grid, ring[0], c, c == ring[1]))) for c in near
        )
    at_edge = "start" if share < 0.2 else "end" if share > 0.8 else "middle"
    size = number(grid.scale)
    edge = ("≤ ", "≥ ") if grid.saturated else ("", "")
    return Map(
        grid=grid,
        columns=columns,
        rows=rows,
        cell=cell,
        layers=tuple(Layer(look, outline(cells)) for look, cells in sorted(looks.items())),
        hatch=outline({(r, c) for r, c in spots if grid.masked[r][c] and not grid.bad[r][c]}),
        crosses=outline(looks.get("bad", set())),
        ring=ring,
        flag=f"{grid.place}  {numeral(grid.values[ring[0]][ring[1]])}" if ring else "",
        flag_at=f"{100 * share:.2f}",
        flag_side=at_edge,
        x=_ticks(columns, grid.first_column, ringed, 8 if columns > 16 else 4 if columns > 8 else 1),
        y=_ticks(rows, grid.first_row, ring[0] if ring else None, 8 if rows > 12 else 4 if rows > 8 else 1) if grid.row_name else (),
        scale=f"{edge[0]}−{size}|{edge[1]}{size}" if grid.scale > 0 else "",
        around=around,
    )


def _marks(grid: Grid, row: int, column: int, ringed: bool) -> Iterator[str]:
    if grid.masked[row][column]:
        yield "masked"
    if grid.bad[row][column]:
        yield "bad"
    if ringed:
        yield "ringed"


def outline(cells: set[tuple[int, int]]) -> str:
    """Return an SVG path around cells, runs of a row joined."""
    parts = []
    for row, column in sorted(cells):
        if (row, column - 1) in cells:
            continue
        end = column
        while (row, end) in cells:
            end += 1
        parts.append(f"M{column} {row}h{end - column}v1h{column - end}z")
    return "".join(parts)


def _ticks(count: int, first: int, strong: int | None, every: int) -> tuple[Tick, ...]:
    """Labels at multiples of `every`, and at the origin; those that would run into the origin's are left out."""
    shown = [n for n in range(count) if (first + n) % every == 0 and (strong is None or abs(n - strong) >= min(every, 3) or every == 1)]
    shown = sorted({*shown, strong} if strong is not None else shown)
    return tuple(Tick(f"{100 * _share(n, count):.2f}", str(first + n), n == strong) for n in shown)


def _share(cell: int, count: int) -> float:
    """Where the middle of a cell lies between the edges of the map."""
    return (cell + 0.5 + MARGIN) / (count + 2 * MARGIN)


def chart_of(panel: Panel, number: int = 0) -> Chart:
    """Draw a panel of the history. number: of the chart in the page."""
    scale = Scale.of(panel)
    width, height = CHART

    def x(step: float) -> float:
        return 6 + (width - 12) * scale.x(step)

    def y(value: float) -> float:
        return height - 10 - (height - 22) * scale.y(value)  # room for the marks at the top, and for the line at the bottom

    limit_at = None if panel.limit is None else 100 * y(panel.limit) / height
    labels = {100 * y(value) / height: numeral(value) for value in (scale.low, scale.high)}
    shown = [Tick(f"{at:.1f}", text) for at, text in labels.items() if limit_at is None or abs(at - limit_at) > 12]  # it has a label, too
    crossed = panel.incident is not None and scale.first <= panel.incident <= scale.last
    return Chart(
        title=panel.title + (" (log)" if panel.log else ""),
        unit=panel.unit,
        curves=tuple(_curve(line, x, y) for line in panel.series if line.points),
        y=tuple(shown),
        x=(Tick("0", numeral_step(scale.first)), Tick("100", numeral_step(scale.last), scale.last == panel.incident)),
        limit_y="" if panel.limit is None else f"{y(panel.limit):.1f}",
        limit_at="" if limit_at is None else f"{limit_at:.1f}",
        limit="" if panel.limit is None else f"{panel.limit:.2f}" if panel.limit else "0",
        limit_words=panel.limit_name if panel.limit is not None else "",
        cross_x=f"{x(panel.incident):.1f}" if crossed and panel.incident is not None else "",
        label=f"{panel.title} from step {numeral_step(scale.first)} to {numeral_step(scale.last)}",
        said=tuple(
            (f"{x(step):.1f}", f"{100 * x(step) / width:.1f}", numeral_step(step))
            for step in panel.said
            if scale.first <= step <= scale.last
        ),
        number=number,
    )


def _curve(line: Series, x: Any, y: Any) -> Curve:
    drawn, dots, marks, pen = [], [], [], "M"
    few = len(line.points) <= 48
    for step, value in line.points:
        if not math.isfinite(value):
            marks.append(f"M{x(step) - 4:.1f} 1h8l-4 7z")
            pen = "M"
            continue
        drawn.append(f"{pen}{x(step):.1f} {y(value):.1f}")
        if few:
            dots.append(f"M{x(step):.1f} {y(value):.1f}h0")
        pen = "L"
    last = line.points[-1][1]
    return Curve(line.name, line.kind, "".join(drawn), "".join(dots), "".join(marks), numeral(last), not math.isfinite(last))
