"""The report as one picture, to paste into an issue or a chat: the sentence, the line, the map, the exponents, and what would fix it.

    render_figure(scope.verdict, "report.png")

Drawn from top to bottom on a canvas of WIDTH pixels that is cut off where the drawing ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from nanscope.report.canvas import (
    DOUBT,
    HAIR,
    HARM,
    HARM_VEIL,
    INK,
    MARGIN,
    PANEL,
    PAPER,
    PROVEN,
    PROVEN_VEIL,
    QUIET,
    SOFT,
    TALLEST,
    WIDTH,
    Canvas,
)  # fmt: skip
from nanscope.report.clean import LIMITS, clean, numeral, numeral_step
from nanscope.report.diff import TAB, Hunk, hunks_of, written_fix
from nanscope.report.headline import Fact, calm, facts_of, lead_and_rest
from nanscope.report.history import Panel, Scale, panels_of, panels_of_run
from nanscope.report.map import LEVELS, Grid, grid_of
from nanscope.report.origin import element, source_of, subject, where_in
from nanscope.report.tried import NOT_RUN, best_of, fix_words, groups_of, heads_of, reproduction, unit_of
from nanscope.snapshot.observation import Origin
from nanscope.verdict.incident import Incident, Verdict

COUNTED, MASKED = "#2a5a8c", "#9a6b12"
COLOURS = (  # of Grid.level, −LEVELS to LEVELS
    "#2a5f92", "#5083b0", "#7da3c6", "#a9c1d8", "#cfdbe7", "#ececE6", "#eadfc6", "#dec798", "#cdab68", "#b58c3d", "#936c1d",
)  # fmt: skip
STATES = {"harm": HARM, "doubt": DOUBT, "proven": PROVEN}
ROWS = 9  # of the replay table
LONG = 12  # lines of a patch that are shown in the place of the source
EDGE, LEGEND = 44, 660  # pixels that the numbers of rows take, and the legend under a map
SHOWN = ("largest exponent", "|Δ| between sampler and trainer", "gradient norm", "loss")  # of a run without incidents, the first two

_SourceLine = tuple[str, str, str, str]  # its number, its text, the colours of its edge and of what lies under it


def render_figure(verdict: Verdict, path: str | Path | BinaryIO) -> None:
    """Write a PNG of the first incident, or a small one that says that all is well.

    Raises OSError if the file cannot be written.
    """
    canvas = Canvas(WIDTH, TALLEST)
    if not verdict.incidents:
        _calm(canvas, verdict)
    else:
        _incident(canvas, verdict, verdict.incidents[0])
    canvas.write(path)


def _calm(canvas: Canvas, verdict: Verdict) -> None:
    _head(canvas, verdict, ())
    canvas.y += 56
    canvas.text(MARGIN, canvas.y, f"● {verdict.status}", 18, STATES[verdict.status.tone], "bold")
    canvas.y += 6
    canvas.paragraph(calm(verdict), 26, INK, "bold")
    for note in verdict.notes[:4]:
        canvas.paragraph(f"{clean(note.text, 400)}  ({clean(note.slug, 60)})", 15, SOFT, lines=2)
    panels = panels_of_run(verdict.history)
    wanted = [panel for title in SHOWN for panel in panels if panel.title == title][:2]
    _beside(canvas, [partial(_history, canvas, panel) for panel in wanted], (0.47, 0.53))


def _incident(canvas: Canvas, verdict: Verdict, incident: Incident) -> None:
    _head(canvas, verdict, facts_of(incident))
    lead, rest = lead_and_rest(incident, LIMITS[1])
    canvas.y += 16
    canvas.paragraph(lead, 24, INK, "bold", lines=4)
    canvas.y += 8
    canvas.paragraph(rest, 17, SOFT, lines=2)
    _fix(canvas, incident)
    _source(canvas, incident)
    _pictures(canvas, incident)
    _table(canvas, incident)
    _foot(canvas, incident)


def _head(canvas: Canvas, verdict: Verdict, facts: Sequence[Fact]) -> None:
    end = canvas.text(MARGIN, canvas.y, "nanscope", 16, INK, "bold")
    canvas.text(end + 8, canvas.y, clean(verdict.version, 24), 13, QUIET)
    x: float = canvas.width - MARGIN
    names = [f"{fact.name}, {fact.detail}" if fact.state == "harm" and fact.detail else fact.name for fact in facts]
    plain, bold = canvas.fonts["plain"], canvas.fonts["bold"]
    widths = [max(plain.width(name, 13), bold.width(fact.value, 17)) + 30 for name, fact in zip(names, facts, strict=True)]
    x -= sum(widths) - 30
    for fact, name, width in zip(facts, names, widths, strict=True):
        canvas.text(x, canvas.y - 6, name, 13, QUIET)
        canvas.text(x, canvas.y + 16, fact.value, 17, HARM if fact.state == "harm" else INK, "bold")
        x += width
    canvas.y += 32
    _rule(canvas)


def _rule(canvas: Canvas) -> None:
    canvas.box(MARGIN, canvas.y, canvas.width - 2 * MARGIN, 1, HAIR)


def _fix(canvas: Canvas, incident: Incident) -> None:
    fix = best_of(incident)
    if fix is None:
        return
    canvas.y += 20
    canvas.box(MARGIN, canvas.y, canvas.width - 2 * MARGIN, 40, PROVEN_VEIL)
    canvas.box(MARGIN, canvas.y, 3, 40, PROVEN)
    base = canvas.y + 26
    end = canvas.text(MARGIN + 18, base, "Proven fix", 16, PROVEN, "bold")
    result = fix_words(fix, unit_of(incident))
    right = canvas.width - MARGIN - 16
    canvas.text(right, base, result, 14, SOFT, align="right")
    room = right - canvas.fonts["plain"].width(result, 14) - end - 40
    canvas.text(end + 14, base, clean(fix.label, 240), 16, INK, clip=room)
    canvas.y += 40


def _source(canvas: Canvas, incident: Incident) -> None:
    """The patch where it is at the line, else that line, marked, between its neighbours; the code alone where no source is known."""
    place = incident.origin
    lines = _change_at(place, hunks_of(written_fix(incident))) or [
        (number, words, HARM if hit else "", HARM_VEIL) for number, words, hit in source_of(place, 1)
    ]
    if not any(edge for _, _, edge, _ in lines):
        lines = [(clean("" if place.line is None else place.line, 12), subject(place), HARM, HARM_VEIL)]
    canvas.y += 20
    canvas.text(canvas.width - MARGIN, canvas.y + 14, clean(element(place), 60), 14, SOFT, "code", align="right")
    heading = where_in(place) or clean(place.module or "no source line", 120)
    canvas.text(MARGIN, canvas.y + 14, heading, 14, SOFT, "code", clip=canvas.width - 2 * MARGIN - 260)
    canvas.y += 24
    top, height = canvas.y, 24 * len(lines)
    canvas.box(MARGIN, top, canvas.width - 2 * MARGIN, height + 12, PANEL)
    for row, (number, words, edge, veil) in enumerate(lines):
        base = top + 23 + 24 * row
        if edge:
            canvas.box(MARGIN, base - 17, canvas.width - 2 * MARGIN, 24, veil)
            canvas.box(MARGIN, base - 17, 3, 24, edge)
        canvas.text(MARGIN + 62, base, number, 13, QUIET, "code", align="right", clip=60)
        colour, font = (INK, "code bold") if edge else (SOFT, "code")
        canvas.text(MARGIN + 80, base, words, 15, colour, font, clip=canvas.width - 2 * MARGIN - 100)
    canvas.y = top + height + 12


def _change_at(place: Origin, hunks: Sequence[Hunk]) -> list[_SourceLine]:
    """The lines of the patch at an origin with one above and below, none if it does not touch that line: what goes, what comes, in their
    places."""
    here = (hunk.lines for hunk in hunks if hunk.path == place.file and any(line.number == str(place.line) for line in hunk.lines))
    lines = next(here, ())
    changed = [n for n, line in enumerate(lines) if line.sign != " " or line.number == str(place.line)]
    if not changed or changed[-1] - changed[0] >= LONG:
        return []
    edges = {"-": (HARM, HARM_VEIL), "+": (PROVEN, PROVEN_VEIL), " ": ("", "")}
    shown = lines[max(0, changed[0] - 1) : changed[-1] + 2]
    return [(line.number or line.sign, line.text.expandtabs(TAB).rstrip(), *edges[line.sign]) for line in shown]


def _pictures(canvas: Canvas, incident: Incident) -> None:
    grid = grid_of(incident, LIMITS[0].map_rows, LIMITS[0].map_columns)
    panels = [panel for panel in panels_of(incident) if _is_drawn(panel)]
    panel = next((p for p in panels if p.title == "largest exponent"), panels[0] if panels else None)
    draws: list[Callable[[float, float], float]] = []
    if grid is not None:
        draws.append(partial(_map, canvas, grid))
    if panel is not None:
        draws.append(partial(_history, canvas, panel))
    whole = canvas.width - 2 * MARGIN
    share = 0.56 if grid is None else min(0.56, max(LEGEND, _cell(grid, whole) * grid.width + EDGE) / whole)  # a narrow map leaves room
    _beside(canvas, draws, (share, share + 0.06))


def _is_drawn(panel: Panel) -> bool:
    """Is there a line to be seen in it, and not an empty frame?"""
    return any(sum(math.isfinite(value) for _, value in line.points) >= 2 for line in panel.series)


def _cell(grid: Grid, width: float) -> float:
    """How large an element is drawn in a column of this width."""
    return min((width - (EDGE if grid.row_name else 0)) / grid.width, 260 / len(grid.values), 34)


def _beside(canvas: Canvas, draws: Sequence[Callable[[float, float], float]], split: tuple[float, float]) -> None:
    """Draw two things side by side, or one alone. split: where the first ends, and where the second begins, of the width."""
    if not draws:
        return
    whole = canvas.width - 2 * MARGIN
    canvas.y += 22
    widths = [whole] if len(draws) == 1 else [split[0] * whole, (1 - split[1]) * whole]
    starts = [MARGIN, MARGIN + split[1] * whole]
    canvas.y = max(draw(x, width) for draw, x, width in zip(draws, starts, widths, strict=False))


def _map(canvas: Canvas, grid: Grid, x: float, width: float) -> float:
    """Draw the map in a column of the canvas and return where it ends."""
    import numpy
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    rows, columns = len(grid.values), grid.width
    left = EDGE if grid.row_name else 0
    cell = _cell(grid, width)
    top = canvas.y + 52
    end = canvas.text(x, canvas.y + 14, grid.what, 15, INK, "code bold", clip=width / 2)
    words = ", ".join(part for part in (grid.cut, grid.count) if part)
    canvas.text(end + 12, canvas.y + 14, words, 13, QUIET, clip=width - (end - x) - 12)
    axes = canvas.axes(x + left, top, cell * columns, cell * rows)
    colours = numpy.array([[_colour(grid, r, c, to_rgba) for c in range(columns)] for r in range(rows)])
    axes.imshow(colours, interpolation="nearest", aspect="auto", origin="upper", extent=(0, columns, rows, 0))
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    spots = [(r, c) for r in range(rows) for c in range(columns)]
    hatch = [stroke for r, c in spots if grid.masked[r][c] and not grid.bad[r][c] for stroke in _strokes(c, r)]
    cross = [stroke for r, c in spots if grid.bad[r][c] for stroke in _cross(c, r)]
    gaps = [((0, n), (columns, n)) for n in range(rows + 1)] + [((n, 0), (n, rows)) for n in range(columns + 1)]
    axes.add_collection(LineCollection(hatch, colors=[(0.24, 0.26, 0.29, 0.55)], linewidths=0.8))
    axes.add_collection(LineCollection(cross, colors=[PAPER], linewidths=max(0.8, cell / 12)))
    axes.add_collection(LineCollection(gaps, colors=[PAPER], linewidths=0.8 if cell > 8 else 0.3))
    if grid.ring is not None:
        row, column = grid.ring
        pad = max(0.14, 2 / cell)
        size = grid.ringed + 2 * pad, 1 + 2 * pad
        ring = Rectangle((column - pad, row - pad), *size, facecolor="none", edgecolor=INK, linewidth=2.2, clip_on=False, zorder=5)
        axes.add_patch(ring)
        lead = ((column + 0.5, -6 / cell), (column + 0.5, row - pad))
        axes.add_collection(LineCollection([lead], colors=[HARM], linewidths=1.2, clip_on=False))
        words = f"{grid.place}  {numeral(grid.values[row][column])}"
        wide = canvas.fonts["code bold"].width(words, 14)
        middle = x + left + (column + 0.5) * cell
        canvas.text(min(max(middle - wide / 2, x), x + width - wide), top - 10, clean(words, 60), 14, HARM, "code bold")
    _map_axes(canvas, grid, x + left, top, cell)
    return _legend(canvas, grid, x, top + rows * cell + 44)


Line = tuple[tuple[float, float], tuple[float, float]]


def _strokes(x: float, y: float) -> tuple[Line, Line]:
    return ((x, y + 0.5), (x + 0.5, y)), ((x + 0.5, y + 1), (x + 1, y + 0.5))


def _cross(x: float, y: float) -> tuple[Line, Line]:
    return ((x + 0.28, y + 0.28), (x + 0.72, y + 0.72)), ((x + 0.28, y + 0.72), (x + 0.72, y + 0.28))


def _colour(grid: Grid, row: int, column: int, to_rgba: Callable[..., Any]) -> tuple[float, float, float, float]:
    level = grid.level(row, column)
    if grid.bad[row][column]:
        red, green, blue, _ = to_rgba(HARM)
    elif level is None:
        red, green, blue, _ = to_rgba(PAPER)
    else:
        red, green, blue, _ = to_rgba(COLOURS[level + LEVELS])
    fade = 0.4 if grid.masked[row][column] and not grid.bad[row][column] else 0.0
    return red + (1 - red) * fade, green + (1 - green) * fade, blue + (1 - blue) * fade, 1.0


def _map_axes(canvas: Canvas, grid: Grid, x: float, top: float, cell: float) -> None:
    rows, columns = len(grid.values), grid.width
    base = top + rows * cell + 17
    ring = grid.ring or (-1, -1)
    ringed = -math.inf if grid.per_row else ring[1]
    every = max(1, math.ceil(64 / cell / 4) * 4 if cell < 20 else 1)
    for c in range(columns):
        near = c != ringed and abs(c - ringed) * cell < 26
        if c == ringed or ((grid.first_column + c) % every == 0 and not near):
            colour, font = (HARM, "code bold") if c == ringed else (QUIET, "code")
            canvas.text(x + (c + 0.5) * cell, base, str(grid.first_column + c), 12, colour, font, align="center")
    for r in range(rows) if grid.row_name else ():
        near = r != ring[0] and abs(r - ring[0]) * cell < 16
        if r == ring[0] or ((grid.first_row + r) % max(1, math.ceil(18 / cell)) == 0 and not near):
            colour, font = (HARM, "code bold") if r == ring[0] else (QUIET, "code")
            canvas.text(x - 8, top + (r + 0.5) * cell + 4, str(grid.first_row + r), 12, colour, font, align="right")
    names = f"{grid.row_name} ↓   {grid.column_name} →" if grid.row_name else f"{grid.column_name} →"
    canvas.text(x, base + 17, names, 12, QUIET)


def _legend(canvas: Canvas, grid: Grid, x: float, y: float) -> float:
    y += 16
    if grid.scale > 0:
        edge = ("≤ ", "≥ ") if grid.saturated else ("", "")
        x = canvas.text(x, y, f"{edge[0]}{numeral(-grid.scale)}", 12, SOFT, "code") + 6
        for colour in COLOURS:
            canvas.box(x, y - 11, 12, 13, colour)
            x += 12
        x = canvas.text(x + 6, y, f"{edge[1]}{numeral(grid.scale)}", 12, SOFT, "code") + 22
    if any(any(line) for line in grid.bad):
        canvas.box(x, y - 11, 13, 13, HARM)
        words = "non-finite" if grid.limit is None else f"non-finite, or above {grid.limit:.2f}: exp overflows"
        x = canvas.text(x + 20, y, words, 12, SOFT) + 22
    if any(out and not bad for outs, marks in zip(grid.masked, grid.bad, strict=True) for out, bad in zip(outs, marks, strict=True)):
        canvas.text(x, y, "hatched: masked", 12, SOFT)
    return y + 6


def _history(canvas: Canvas, panel: Panel, x: float, width: float) -> float:
    """Draw a chart in a column of the canvas and return where it ends."""
    scale = Scale.of(panel)
    left, top, height = 54, canvas.y + 52, 250
    end = canvas.text(x, canvas.y + 14, panel.title + (" (log)" if panel.log else ""), 15, INK, "bold")
    canvas.text(end + 8, canvas.y + 14, panel.unit, 13, QUIET)
    axes = canvas.axes(x + left, top, width - left, height)
    axes.set_xlim(-0.015, 1.015)
    axes.set_ylim(-0.06, 1.1)

    def pixel(value: float) -> float:
        return top + height * (1.1 - scale.y(value)) / 1.16

    axes.plot([-0.015, -0.015, 1.015], [1.1, -0.06, -0.06], color=HAIR, linewidth=1.2, linestyle="-", marker="", clip_on=False)
    if panel.incident is not None and scale.first <= panel.incident <= scale.last:
        at = scale.x(panel.incident)
        axes.plot([at, at], [-0.06, 1.1], color=HARM, linewidth=0.9, alpha=0.5, linestyle="-", marker="")
    for step in panel.said:
        if scale.first <= step <= scale.last:
            at = scale.x(step)
            axes.plot([at, at], [-0.06, 1.1], color=DOUBT, linewidth=1.2, linestyle=(0, (2, 3)), marker="")
            canvas.text(x + left + (width - left) * (at + 0.015) / 1.03 + 5, top + height - 8, f"said at {numeral_step(step)}", 12, DOUBT)
    if panel.limit is not None:
        at = scale.y(panel.limit)
        axes.plot([-0.015, 1.015], [at, at], color=HARM, linewidth=1.2, linestyle=(0, (4, 3)), marker="")
        canvas.text(
            x + left - 8, pixel(panel.limit) + 4, f"{panel.limit:.2f}" if panel.limit else "0", 12, HARM, "code bold", align="right"
        )
        canvas.text(x + left + 10, pixel(panel.limit) - 6, panel.limit_name, 12, HARM)
    for value in dict.fromkeys((scale.low, scale.high)):
        if panel.limit is None or abs(pixel(value) - pixel(panel.limit)) > 15:
            canvas.text(x + left - 8, pixel(value) + 4, numeral(value), 12, QUIET, "code", align="right")
    key = x + width
    for line in reversed([line for line in panel.series if line.points]):
        colour = MASKED if line.kind == "masked" else COUNTED
        finite = [(step, value if math.isfinite(value) else math.nan) for step, value in line.points]
        lost = [step for step, value in line.points if not math.isfinite(value)]
        marker = "o" if len(finite) <= 48 else ""
        places = [scale.x(step) for step, _ in finite], [scale.y(v) if math.isfinite(v) else math.nan for _, v in finite]
        axes.plot(*places, color=colour, linewidth=1.8, linestyle="-", marker=marker, markersize=3.4, markeredgewidth=0, clip_on=False)
        top_marks = [scale.x(step) for step in lost], [1.06] * len(lost)
        axes.plot(*top_marks, color=HARM, linestyle="none", marker="v", markersize=7, markeredgewidth=0, clip_on=False)
        words = f"{line.name} {numeral(line.points[-1][1])}"
        key -= canvas.fonts["plain"].width(words, 13)
        canvas.text(key, canvas.y + 14, words, 13, SOFT)
        canvas.box(key - 22, canvas.y + 8, 16, 2.5, colour)
        key -= 42
    canvas.text(x + left, top + height + 18, f"step {numeral_step(scale.first)}", 12, QUIET, "code")
    colour, font = (HARM, "code bold") if scale.last == panel.incident else (QUIET, "code")
    canvas.text(x + width, top + height + 18, numeral_step(scale.last), 12, colour, font, align="right")
    return top + height + 24


def _table(canvas: Canvas, incident: Incident) -> None:
    """What was tried; what could not be run has no place in a picture."""
    rows = [row for group in groups_of(incident, LIMITS[1]) if group.title != NOT_RUN for row in group.rows]
    if not rows:
        return
    canvas.y += 38
    heads = heads_of(incident)
    columns = (MARGIN, MARGIN + 720, MARGIN + 820, MARGIN + 960, MARGIN + 1130)
    for x, name in zip(columns, (heads[0], *heads[2:]), strict=True):
        canvas.text(x, canvas.y, name, 13, QUIET)
    canvas.y += 9
    _rule(canvas)
    for row in rows[:ROWS]:
        if row.best:
            canvas.box(MARGIN - 10, canvas.y + 1, canvas.width - 2 * MARGIN + 20, 29, PROVEN_VEIL)
        base = canvas.y + 21
        end = canvas.text(columns[0], base, row.label, 15, clip=columns[1] - columns[0] - 210)
        canvas.text(end + 10, base, row.id, 12, QUIET, "code", clip=columns[1] - end - 24)
        canvas.text(columns[1], base, row.loss, 14, INK, "code", clip=90)
        canvas.text(columns[2], base, row.gradients, 14, HARM if row.bad else INK, clip=130)
        canvas.text(columns[3], base, row.healthy, 14, INK, clip=160)
        font = "bold" if row.state in STATES else "plain"
        canvas.text(columns[4], base, row.outcome, 14, STATES.get(row.state, SOFT), font, clip=canvas.width - MARGIN - columns[4])
        canvas.y += 31
        _rule(canvas)
    if len(rows) > ROWS:
        canvas.y += 22
        canvas.text(MARGIN, canvas.y, f"… {len(rows) - ROWS} more", 13, QUIET)


def _foot(canvas: Canvas, incident: Incident) -> None:
    advised = [f"advised, not run: {clean(fix.label, 120)}" for fix in incident.fixes if not fix.executed]
    parts = [words for words in (reproduction(incident), *advised[:2]) if words]
    if parts:
        canvas.y += 30
        canvas.text(MARGIN, canvas.y, " · ".join(parts), 14, SOFT, clip=canvas.width - 2 * MARGIN)
