"""The report as one self-contained page: no network, no script, readable from file:// and on paper.

    page = render_html(scope.verdict)

The page is built in two moves: first plain data (`Page`, made of strings that are already clean and short), then `page.html` around it.
Everything that comes out of a run or a file is hostile until proven otherwise: it passes `clean` and is escaped by the template, and it
never lands in a style, a script or an id. However large the run, the page stays below `MOST_BYTES`: rows of `LIMITS` are tried in order.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import shlex
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from typing import Any

from nanscope.causes import CAUSES
from nanscope.diagnose import Fix, Incident, Link, Note, Place, Verdict, is_exact, number, role_words
from nanscope.indices import show_index
from nanscope.ledger import Entry
from nanscope.replay import Row

MOST_BYTES = 400_000


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of everything is shown. text, long: characters of a name and of a sentence; points: of one series; the rest: items."""

    text: int
    long: int
    chain: int
    rows: int
    items: int
    incidents: int
    listed: int
    map_rows: int
    map_columns: int
    points: int


LIMITS = (
    Limits(text=240, long=1600, chain=60, rows=40, items=60, incidents=5, listed=60, map_rows=32, map_columns=72, points=200),
    Limits(text=160, long=800, chain=30, rows=24, items=24, incidents=5, listed=30, map_rows=16, map_columns=48, points=100),
    Limits(text=80, long=320, chain=12, rows=12, items=8, incidents=2, listed=12, map_rows=12, map_columns=32, points=60),
)  # the last row stays below MOST_BYTES whatever is in it; a test holds that


def render_html(verdict: Verdict, title: str | None = None) -> str:
    """Return the report as a page, complete in itself.

    title: heading of the page and of the browser's tab; by default what happened at which step.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = resources.files("nanscope.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    css = Markup(here.joinpath("page.css").read_text(encoding="utf-8"))
    text = ""
    for limits in LIMITS:
        text = template.render(page=build(verdict, title, limits), css=css)
        if len(text.encode()) < MOST_BYTES:
            break
    return text


# -- words ---------------------------------------------------------------------------------------------------------------------------


def clean(value: object, limit: int = 240) -> str:
    """Return a string from a run as one line that hides nothing: control, bidi and invisible characters become visible.

    limit: characters kept; what is longer ends in "…".
    """
    raw = value if isinstance(value, str) else str(value)
    text = re.sub(r"\s*[\r\n]+\s*", " ", raw[: 4 * limit].replace("\t", "    "))
    text = re.sub(r"[^\x20-\x7e]", _visible, text[: limit + 1])
    return text if len(text) <= limit and len(raw) <= 4 * limit else text[: limit - 1] + "…"


def _visible(match: re.Match[str]) -> str:
    return _spelled(match.group())


@functools.lru_cache(maxsize=4096)
def _spelled(char: str) -> str:
    return f"⟨U+{ord(char):04X}⟩" if unicodedata.category(char) in ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp") else char


def real(value: object) -> float | None:
    """Return a number as a float, None for anything else: what comes from a file can be of any type."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def numeral(value: object) -> str:
    """Return a number as reports write it, "–" for what is none."""
    return number(real(value))


def plural(count: int, word: str) -> str:
    """Return "1 step", "2 steps"."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def where(place: Place, limit: int = 240) -> str:
    """Return file name and line of the origin, "" if unknown."""
    if not place.file:
        return ""
    name = PurePath(clean(place.file, limit)).name
    return name if place.line is None else f"{name}:{clean(place.line, 12)}"


def subject(place: Place, limit: int = 240) -> str:
    """Return the code that made the origin: variable = expression, as far as known."""
    if place.variable and place.expression and place.op != "input":
        return clean(f"{place.variable} = {place.expression}", limit)
    return clean(place.variable or place.expression or place.op, limit)


def calculation(place: Place, limit: int = 240) -> str:
    """Return what the op computed: exp(200) = +inf."""
    args = ", ".join(numeral(value) for _, value in place.operands[:3]) + (", …" if len(place.operands) > 3 else "")
    return clean(f"{place.op}({args}) = {numeral(place.value)}" if place.operands else numeral(place.value), limit)


def two(pair: object) -> tuple[int, int] | None:
    """Return (bad, total) from what `Incident.reached` says, None if it was not looked at."""
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(n, int) for n in pair):
        return None
    return int(pair[0]), int(pair[1])


@dataclass(frozen=True, slots=True)
class Fact:
    """One number of the headline strip. state: "harm", "proven" or ""."""

    name: str
    value: str
    detail: str = ""
    state: str = ""


_STEPPED = {"taken": "stepped", "skipped": "step skipped", "stopped": "run stopped", "none": "no step"}


def facts_of(incident: Incident) -> tuple[Fact, ...]:
    """Return step, rank, phase, loss, gradients, weights and what the optimizer did."""
    loss = real(incident.loss)
    finite = loss is not None and math.isfinite(loss)
    facts = [
        Fact("step", clean(incident.step, 24)),
        Fact("rank", clean(incident.rank, 24)),
        Fact("phase", clean(incident.phase, 24)),
        Fact("loss", numeral(loss), "finite" if finite else "", "" if finite or loss is None else "harm"),
    ]
    bad = {}
    for name in ("gradients", "weights"):
        counts = two(incident.reached.get(name))
        if counts is None:
            facts.append(Fact(name, "–", "not looked at"))
            continue
        bad[name], total = counts
        harmed = Fact(name, f"{bad[name]} of {total}", "non-finite", "harm")
        facts.append(harmed if bad[name] else Fact(name, "finite", f"all {total}", "proven"))
    stepped = incident.reached.get("stepped")
    words = _STEPPED.get(str(stepped), clean(stepped or "–", 24))
    facts.append(Fact("optimizer", words, "", "harm" if stepped == "taken" and any(bad.values()) else ""))
    return tuple(facts)


def lead_and_rest(incident: Incident, limits: Limits) -> tuple[str, str]:
    """Split the sentence of the verdict: what happened, and why and how far it got."""
    sentence = clean(incident.sentence, limits.long)
    if sentence.startswith("the "):  # a sentence that begins with code keeps its first letter
        sentence = f"T{sentence[1:]}"
    title = CAUSES[incident.cause].title if incident.cause in CAUSES else ""
    at = sentence.find(f". {title[:1].upper()}{title[1:]}") if title else -1
    return (sentence[: at + 1], sentence[at + 2 :]) if at >= 0 else (sentence, "")


def calm(verdict: Verdict, limit: int = 600) -> str:
    """Return the sentence of a healthy run without the note that it repeats."""
    sentence = verdict.sentence
    for note in verdict.notes:
        sentence = sentence.removesuffix(f"; {note.text}")
    return clean(sentence, limit)


# -- the map -------------------------------------------------------------------------------------------------------------------------

LEVELS = 5  # steps of the colour scale on each side of 0


@dataclass(frozen=True, slots=True)
class Grid:
    """The offending tensor, ready to be drawn.

    values: [rows][columns], None where there is nothing. bad: non-finite, or an exponent that overflows. limit: of such an exponent,
    in nats. scale: magnitude at which the colour is full; saturated: some finite values lie beyond it. ring: the origin, as (row, column)
    of the cut. cut: which part of the whole this is, in words. count: what is bad, in words.
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
    overflowed = not _is_finite(incident.origin.value)
    limit, ring = real(incident.origin.limit), (picture.row - top, picture.column - left)
    bad = tuple(tuple(_is_bad(v, limit) or ((r, c) == ring and overflowed) for c, v in enumerate(line)) for r, line in enumerate(values))
    scale, saturated = _scale(values, bad)
    inside = 0 <= ring[0] < len(lines) and 0 <= ring[1] < len(columns)
    row_name, column_name = _axes(incident.origin)
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
        count=_count(values, masked, bad, limit),
    )


def _cell(lines: Sequence[Sequence[Any]], row: int, column: int) -> Any:
    return lines[row][column] if row < len(lines) and column < len(lines[row]) else None


def _is_bad(value: float | None, limit: float | None) -> bool:
    return value is not None and (not math.isfinite(value) or (limit is not None and value > limit))


def _axes(place: Place) -> tuple[str, str]:
    if len(place.shape) < 2:
        return "", "element"
    if len(place.shape) > 2:
        return "row", "column"  # all dimensions but the last are flattened into rows
    return ("row", "column") if place.role in ("weights", "optimizer", "grad", "hidden", "router", "attention") else ("row", "token")


def _scale(values: Sequence[Sequence[float | None]], bad: Sequence[Sequence[bool]]) -> tuple[float, bool]:
    """The magnitude of full colour: the largest, unless a few outliers would wash out everything else."""
    cells = zip(itertools.chain.from_iterable(values), itertools.chain.from_iterable(bad), strict=True)
    sizes = sorted(abs(value) for value, mark in cells if value is not None and not mark)
    if not sizes:
        return 0.0, False
    most, usual = sizes[-1], sizes[int(0.95 * (len(sizes) - 1))]
    return (usual, True) if 0 < 5 * usual < most else (most, False)


def _cut(row_name: str, column_name: str, rows: tuple[int, int, int], columns: tuple[int, int, int]) -> str:
    parts = []
    for name, (first, shown, whole) in ((row_name, rows), (column_name, columns)):
        if name:
            parts.append(f"{name}s {first}–{first + shown - 1} of {whole}" if shown < whole else plural(whole, name))
    return (", " if rows[1] < rows[2] or columns[1] < columns[2] else " × ").join(parts)


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


# -- history -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: (step, value) with the steps ascending. kind: "main" or "masked"."""

    name: str
    kind: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the history. limit: a line to stay below (above, if it is 0). incident: the step that went wrong. log: scale of y."""

    title: str
    unit: str
    series: tuple[Series, ...]
    limit: float | None
    limit_name: str
    incident: float | None
    log: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """The axes of a panel: what lies at which end, and where a point lies between them, from 0 to 1."""

    first: float
    last: float
    low: float
    high: float
    log: bool

    @staticmethod
    def of(panel: Panel) -> Scale:
        """Return axes that hold every finite point and the limit."""
        steps = [step for line in panel.series for step, _ in line.points]
        sizes = [value for line in panel.series for _, value in line.points if math.isfinite(value)]
        bounds = [*sizes, *([] if panel.limit is None else [panel.limit])] or [0.0]
        return Scale(min(steps), max(steps), min(bounds), max(bounds), panel.log)

    def x(self, step: float) -> float:
        """Where a step lies, from left to right."""
        return (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5

    def y(self, value: float) -> float:
        """Where a finite value lies, from bottom to top."""
        low, high, v = (math.log10(n) if self.log else n / 4 for n in (self.low, self.high, value))  # /4: the distance must not overflow
        return (v - low) / (high - low) if high > low else 0.5


def panels_of(incident: Incident, points: int = 200) -> tuple[Panel, ...]:
    """Return the charts of the steps up to an incident, the bad step itself last; a chart of fewer than two steps is left out."""
    entries = sorted((entry for entry in incident.history if _is_finite(entry.step)), key=lambda entry: entry.step)
    step = real(incident.step)
    entries = [entry for entry in entries if step is None or (entry.step <= step and entry.rank == incident.rank)]
    if len(entries) < 2:
        return ()
    last = _last_point(incident) if step is not None and entries[-1].step < step else {}
    split = any(real(entry.log_ratio_max_masked) is not None for entry in entries)
    if not split and "log_ratio_max_masked" in last:  # the run saw no mask, so the one series is of all tokens
        last["log_ratio_max"] = last["log_ratio_max_masked"]
    limit = next((found for entry in reversed(entries) if (found := _limit(entry)) is not None), real(incident.origin.limit))

    def series(name: str, field: str, kind: str = "main") -> Series:
        found = [(float(entry.step), value) for entry in entries if (value := real(getattr(entry, field))) is not None]
        if field in last and step is not None and found:
            found.append((step, last[field]))
        return Series(name, kind, thin(found, points))

    norm = series("gradient norm", "grad_norm")
    panels = (
        Panel("loss", "", (series("loss", "loss"),), None, "", step),
        Panel("gradient norm", "", (norm,), None, "", step, _wide(norm)),
        Panel(
            "largest exponent",
            "nat",
            (series("counted" if split else "all tokens", "log_ratio_max"), series("masked", "log_ratio_max_masked", "masked")),
            limit,
            "exp overflows",
            step,
        ),
        Panel("headroom", "nat", (series("headroom", "headroom"),), 0.0, "overflow", step),
    )
    return tuple(panel for panel in panels if max(len(line.points) for line in panel.series) >= 2)


def _is_finite(value: object) -> bool:
    found = real(value)
    return found is not None and math.isfinite(found)


def _last_point(incident: Incident) -> dict[str, float]:
    """What is known of the bad step itself: its entry is written after the snapshot."""
    place, found = incident.origin, {}
    loss, gradients = real(incident.loss), two(incident.reached.get("gradients"))
    if loss is not None:
        found["loss"] = loss
    if gradients is not None and gradients[0]:
        found["grad_norm"] = math.nan
    limit = real(place.limit)
    if limit is not None and place.operands:
        value = real(place.operands[0][1])
        if value is not None and math.isfinite(value):
            found["log_ratio_max_masked" if place.masked else "log_ratio_max"] = value
            found["headroom"] = limit - value
    return found


def _limit(entry: Entry) -> float | None:
    highest = [value for value in (real(entry.log_ratio_max), real(entry.log_ratio_max_masked)) if value is not None]
    left = real(entry.headroom)
    found = left + max(highest) if left is not None and highest else None
    return found if found is not None and math.isfinite(found) else None


def _wide(series: Series) -> bool:
    sizes = [value for _, value in series.points if math.isfinite(value)]
    return bool(sizes) and min(sizes) > 0 and max(sizes) > 50 * min(sizes)


def thin(points: Sequence[tuple[float, float]], limit: int) -> tuple[tuple[float, float], ...]:
    """Return at most `limit` points: of every stretch the lowest and the highest, the non-finite ones first, and both ends."""
    if len(points) <= limit:
        return tuple(points)

    def height(index: int) -> float:
        return points[index][1] if math.isfinite(points[index][1]) else math.inf

    stretches = max(1, (limit - 2) // 2)
    kept = {0, len(points) - 1}
    for n in range(stretches):
        stretch = range(n * len(points) // stretches, (n + 1) * len(points) // stretches)
        kept |= {min(stretch, key=height), max(stretch, key=height)}
    return tuple(points[index] for index in sorted(kept))


# -- the replay ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tried:
    """One row of the replay table. state: "harm", "proven" or "quiet"; best: the fix to take."""

    id: str
    label: str
    loss: str
    gradients: str
    healthy: str
    verdict: str
    state: str
    best: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of the replay table under one heading."""

    title: str
    rows: tuple[Tried, ...]


def best_of(incident: Incident) -> Fix | None:
    """Return the first fix that was run and works."""
    return next((fix for fix in incident.fixes if fix.executed and fix.works), None)


def groups_of(incident: Incident, limits: Limits = LIMITS[0]) -> tuple[Group, ...]:
    """Return the replay table: what was recorded, fixes, edits asked for, and the tempting wrong ones."""
    rows = incident.rows[: limits.rows]
    ran = [row for row in rows if row.loss is not None]
    own = ("recorded", "float64", "fix", "control")
    parts = (
        ("as it was", [row for row in ran if row.kind in ("recorded", "float64")]),
        ("fixes", [row for row in ran if row.kind == "fix"]),
        ("asked for", [row for row in rows if row.kind not in own]),
        ("tempting, and wrong", [row for row in ran if row.kind == "control" and not row.works]),
        ("pass here, but mend the result and not its cause", [row for row in ran if row.kind == "control" and row.works]),
        ("not run", [row for row in rows if row.loss is None and row.kind in own]),
    )
    best = best_of(incident)
    return tuple(Group(title, tuple(_tried(row, incident, best, limits) for row in found)) for title, found in parts if found)


def _tried(row: Row, incident: Incident, best: Fix | None, limits: Limits) -> Tried:
    words, state = _outcome(row, incident, limits)
    loss = real(row.loss)
    if loss is None:
        return Tried(clean(row.id, 60), clean(row.label, limits.text), "–", "–", "–", words, state)
    if not row.total:
        gradients = "–"
    elif row.bad:
        gradients = "non-finite" if row.total == 1 else f"{row.bad} of {row.total} non-finite"
    else:
        gradients = "finite"
    chosen = best is not None and row.kind == "fix" and (row.id, row.label) == (best.id, best.label)
    return Tried(clean(row.id, 60), clean(row.label, limits.text), numeral(loss), gradients, distortion_words(row), words, state, chosen)


def distortion_words(row: Row | Fix) -> str:
    """Return what an edit does to the gradient of the healthy elements."""
    distortion = real(row.distortion)
    if distortion is None or row.bad or not _is_finite(row.loss):
        return "–"
    if is_exact(distortion):
        return "unchanged"
    return f"off by {numeral(distortion)}" if math.isfinite(distortion) else "lost"


def _outcome(row: Row, incident: Incident, limits: Limits) -> tuple[str, str]:
    note = clean(row.note, limits.text)
    if row.loss is None:
        return note or "does not apply", "quiet"
    if row.kind == "recorded":
        remark = f" ({note})" if (note and not incident.reproduces) or "gradients" in note else ""
        return ("finite" + remark, "quiet") if row.works else ("✗ the failure" + remark, "harm")
    if row.kind == "float64":
        return ("finite: the range was the limit", "quiet") if row.works else ("fails in float64, too", "quiet")
    if row.kind == "control":
        return ("✗", "harm") if not row.works else ("finite here", "quiet")
    return ("✓ works", "proven") if row.works else ("✗ fails", "harm")


# -- the page as data ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a sentence. code: written as code."""

    text: str
    code: bool


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source. before, hit, after: the marked expression within it."""

    number: str
    before: str
    hit: str
    after: str
    marked: bool


@dataclass(frozen=True, slots=True)
class ChainItem:
    """A link of the chain, or (kind "gap" or "turn") words between links."""

    kind: str
    text: str
    value: str = ""
    line: str = ""
    bad: bool = False


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

    limit_y, limit_at: where the limit lies, in units and in percent. cross_x: where the incident lies.
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


@dataclass(frozen=True, slots=True)
class Section:
    """One incident, ready for the template."""

    anchor: str
    facts: tuple[Fact, ...]
    lead: tuple[Segment, ...]
    rest: tuple[Segment, ...]
    fix: str
    fix_where: str
    fix_result: str
    code: str
    calculation: str
    details: tuple[tuple[str, str], ...]
    operands: tuple[tuple[str, str], ...]
    source: tuple[SourceLine, ...]
    source_title: str
    chain: tuple[ChainItem, ...]
    map: Map | None
    charts: tuple[Chart, ...]
    groups: tuple[Group, ...]
    replayed: str
    replayed_state: str
    advised: tuple[tuple[str, str, str], ...]
    framework: str
    remedies: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]
    tables: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    command: str


@dataclass(frozen=True, slots=True)
class Page:
    """Everything the template shows."""

    title: str
    heading: str
    version: str
    counts: tuple[Fact, ...]
    healthy: bool
    sentence: str
    sections: tuple[Section, ...]
    contents: tuple[tuple[str, str, str], ...]
    more: str
    notes: tuple[tuple[str, str], ...]


def build(verdict: Verdict, title: str | None = None, limits: Limits = LIMITS[0]) -> Page:
    """Return a verdict as page data: clean strings, cut to `limits`."""
    shown = verdict.incidents[: limits.incidents]
    listed = verdict.incidents[: limits.incidents + limits.listed]
    told = {(note.slug, note.text) for incident in shown for note in incident.notes}
    notes = [note for note in verdict.notes if (note.slug, note.text) not in told]
    bad = max(verdict.bad_steps, len(verdict.incidents))
    watched = Fact("step watched" if verdict.steps == 1 else "steps watched", clean(verdict.steps, 24))
    counts = [watched, Fact("bad", clean(bad, 24), state="harm" if bad else "proven")]
    if verdict.skipped:
        counts.append(Fact("skipped", clean(verdict.skipped, 24)))
    if verdict.healthy:
        default = "nanscope · healthy run"
    else:
        default = f"nanscope · {_name(verdict.incidents[0])}"
    contents = [(f"#incident-{n}" if n <= len(shown) else "", _name(i), lead_and_rest(i, limits)[0]) for n, i in enumerate(listed, 1)]
    return Page(
        title=clean(title, limits.text) if title else default,
        heading=clean(title, limits.text) if title else "",
        version=clean(verdict.version, 40),
        counts=tuple(counts),
        healthy=verdict.healthy,
        sentence=calm(verdict, limits.long) if verdict.healthy else "",
        sections=tuple(_section(incident, index, limits) for index, incident in enumerate(shown, 1)),
        contents=tuple((link, name, clean(words, limits.text)) for link, name, words in contents) if len(contents) > 1 else (),
        more=f"… {len(verdict.incidents) - len(listed)} more" if len(verdict.incidents) > len(listed) else "",
        notes=_notes(notes, limits),
    )


_REPRODUCES = {True: "reproduces bit for bit", False: "does not reproduce: the fault was transient, or lies outside the program", None: ""}


def _name(incident: Incident) -> str:
    return f"step {clean(incident.step, 24)} · rank {clean(incident.rank, 24)} · {clean(incident.phase, 24)}"


def _section(incident: Incident, index: int, limits: Limits) -> Section:
    place = incident.origin
    lead, rest = lead_and_rest(incident, limits)
    best = best_of(incident)
    return Section(
        anchor=f"incident-{index}",
        facts=facts_of(incident),
        lead=_segments(lead, place, limits),
        rest=_segments(rest, place, limits),
        fix=clean(best.label, limits.text) if best else "",
        fix_where=clean(PurePath(best.where).name, limits.text) if best and best.where else "",
        fix_result=_result(best) if best else "",
        code=subject(place, limits.text),
        calculation=calculation(place, limits.text),
        details=_details(incident, limits),
        operands=tuple((clean(name, limits.text), numeral(value)) for name, value in place.operands[:12]),
        source=tuple(_source(place, limits)),
        source_title=where(place, limits.text) + (f", in {clean(place.function, 80)}" if place.function and place.file else ""),
        chain=tuple(_chain(incident, limits)),
        map=_map(incident, limits),
        charts=tuple(_chart(panel) for panel in panels_of(incident, limits.points)),
        groups=groups_of(incident, limits),
        replayed=_REPRODUCES[incident.reproduces],
        replayed_state="proven" if incident.reproduces else "harm",
        advised=tuple(
            (clean(fix.id, 60), clean(fix.label, limits.text), clean(fix.where or "", limits.text))
            for fix in incident.fixes[: limits.rows]
            if not fix.executed
        ),
        framework=clean(incident.framework or "", 40),
        remedies=_some(incident.remedies, 12, limits.long),
        notes=_notes(incident.notes, limits),
        tables=_tables(incident, limits),
        command=_command(incident.snapshot, limits) if incident.snapshot else "",
    )


def _result(fix: Fix) -> str:
    parts = [f"loss {numeral(fix.loss)}", "gradients finite"]
    words = distortion_words(fix)
    if words != "–":
        parts.append(f"healthy elements {words}")
    return " · ".join(parts)


def _command(path: str, limits: Limits) -> str:
    return f"nanscope replay {shlex.quote(clean(path, 2 * limits.text))}"


def _segments(text: str, place: Place, limits: Limits) -> tuple[Segment, ...]:
    """Split a sentence into words and the code it quotes."""
    spans = [subject(place, limits.text), where(place, limits.text), *([calculation(place, limits.text)] if place.operands else [])]
    spans += [clean(word, limits.text) for word in (place.expression, place.variable, *(name for name, _ in place.operands[:4])) if word]
    wanted = "|".join(re.escape(span) for span in sorted(set(spans), key=len, reverse=True) if len(span) > 2)
    if not text or not wanted:
        return (Segment(text, False),) if text else ()
    pieces = re.split(rf"(?<!\w)({wanted})(?!\w)", text)
    return tuple(Segment(piece, bool(odd % 2)) for odd, piece in enumerate(pieces) if piece)


def _details(incident: Incident, limits: Limits) -> tuple[tuple[str, str], ...]:
    place = incident.origin
    limit = real(place.limit)
    meaning = role_words(place.role)
    exponent = real(place.operands[0][1]) if place.operands else None
    headroom = ""
    if limit is not None and exponent is not None:
        headroom = f"{numeral(limit - exponent)} nat: {place.op} overflows above {limit:.2f}"
    elif place.headroom is not None:
        headroom = f"{numeral(place.headroom)} bits in {place.dtype}"
    masked = {True: f"masked: {place.masked_by or 'outside the loss'}", False: "counts in the loss", None: ""}[place.masked]
    pairs = (
        ("op", str(place.op)),
        ("element", f"{show_index(place.index)} of {show_index(place.shape)}" if place.shape or place.index else ""),
        ("value", f"{numeral(place.value)}{f' ({place.dtype})' if place.dtype else ''}"),
        ("mask", masked),
        ("headroom", headroom),
        ("role", f"{place.role}{f': {meaning}' if meaning else ''}" if place.role else ""),
        ("module", place.module or ""),
        ("cause", f"{incident.cause}"),
    )
    return tuple((name, clean(words, limits.text)) for name, words in pairs if words)


def _source(place: Place, limits: Limits) -> Iterator[SourceLine]:
    lines = list(place.source)
    middle = next((n for n, (line, _) in enumerate(lines) if line == place.line), 0)
    lines = lines[max(0, middle - 7) : middle + 8]
    while lines and not str(lines[0][1]).strip():
        del lines[0]
    while lines and not str(lines[-1][1]).strip():
        del lines[-1]
    wanted = re.escape(clean((place.variable if place.op == "input" else place.expression) or "", limits.text))
    for line, text in lines:
        words = clean(str(text).expandtabs(4).rstrip(), limits.text)
        marked = line == place.line
        found = re.search(rf"(?<!\w){wanted}(?!\w)", words) if marked and wanted else None
        start, end = found.span() if found else (len(words), len(words))
        yield SourceLine(clean(line, 12), words[:start], words[start:end], words[end:], marked)


def _chain(incident: Incident, limits: Limits) -> Iterator[ChainItem]:
    """The links from origin to harm; the middle of a long chain is cut, its ends tell the story."""
    links, most = incident.chain, limits.chain
    tail = most // 3
    backward = False
    for position, link in enumerate(links):
        hidden = len(links) - most
        if hidden > 0 and most - tail <= position < most - tail + hidden:
            if position == most - tail:
                yield ChainItem("gap", f"… {hidden} more")
            backward = backward or link.backward
            continue
        if link.backward and not backward:
            backward = True
            yield ChainItem("turn", _turn(incident))
        yield _item(link, limits)
    for name, words in (("gradients", "gradients"), ("weights", "weights after the update")):
        counts = two(incident.reached.get(name))
        if counts and counts[0] and links:
            yield ChainItem("end", words, f"{counts[0]} of {counts[1]} non-finite", bad=True)


def _turn(incident: Incident) -> str:
    return f"the loss stays finite ({numeral(incident.loss)}); backward:" if _is_finite(incident.loss) else "backward:"


def _item(link: Link, limits: Limits) -> ChainItem:
    value = real(link.value)
    bad = value is not None and not math.isfinite(value)
    line = f"line {clean(link.line, 12)}" if link.line is not None else ""
    return ChainItem("grad" if link.backward else "link", clean(link.text, limits.text), numeral(value), line, bad)


def _some(texts: Sequence[object], limit: int, length: int) -> tuple[str, ...]:
    shown = [clean(text, length) for text in texts[:limit]]
    return (*shown, f"… {len(texts) - limit} more") if len(texts) > limit else tuple(shown)


def _notes(notes: Sequence[Note], limits: Limits) -> tuple[tuple[str, str], ...]:
    most = limits.items // 2
    pairs = [
        (clean(note.slug, 60) + (f", step {clean(note.step, 24)}" if note.step is not None else ""), clean(note.text, limits.long // 2))
        for note in notes[:most]
    ]
    return (*pairs, ("", f"… {len(notes) - most} more")) if len(notes) > most else tuple(pairs)


def _tables(incident: Incident, limits: Limits) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    tables = []
    for title, data in (("environment", incident.environment), ("settings", incident.settings)):
        pairs = [(clean(name, 60), clean(_flat(value, limits.text), limits.text)) for name, value in list(data.items())[: limits.items]]
        if len(data) > limits.items:
            pairs.append((f"… {len(data) - limits.items} more", ""))
        if pairs:
            tables.append((title, tuple(pairs)))
    if incident.opaque:
        names = ", ".join(_some(incident.opaque, limits.items // 2, 60))
        tables.append(("not recorded", (("operators", names),)))
    return tuple(tables)


def _flat(value: object, limit: int, depth: int = 3) -> str:
    """Settings as one line: {"torch": "2.13"} is torch 2.13."""
    if isinstance(value, dict):
        parts = [f"{key} {_flat(item, limit, depth - 1)}" for key, item in list(value.items())[:limit]] if depth else ["…"]
        return " · ".join(parts)
    if isinstance(value, (list, tuple)):
        return ", ".join(_flat(item, limit, depth - 1) for item in value[:limit]) if depth else "…"
    return numeral(value) if isinstance(value, float) else str(value)


# -- drawing -------------------------------------------------------------------------------------------------------------------------

CHART = (480, 120)  # width and height of a chart in its own units


def _map(incident: Incident, limits: Limits) -> Map | None:
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
    share = (ring[1] + 0.5) / columns if ring else 0.0
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
        layers=tuple(Layer(look, _outline(cells)) for look, cells in sorted(looks.items())),
        hatch=_outline({(r, c) for r, c in spots if grid.masked[r][c] and not grid.bad[r][c]}),
        crosses=_outline(looks.get("bad", set())),
        ring=ring,
        flag=f"{show_index(incident.origin.index)}  {numeral(grid.values[ring[0]][ring[1]])}" if ring else "",
        flag_at=f"{100 * share:.2f}",
        flag_side=at_edge,
        x=_ticks(columns, grid.first_column, ring[1] if ring else None, 8 if columns > 16 else 4 if columns > 8 else 1),
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


def _outline(cells: set[tuple[int, int]]) -> str:
    """An SVG path around cells, runs of a row joined."""
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
    return tuple(Tick(f"{100 * (n + 0.5) / count:.2f}", str(first + n), n == strong) for n in shown)


def _chart(panel: Panel) -> Chart:
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
    )


def numeral_step(step: float) -> str:
    """Return a step number in full."""
    return f"{step:.0f}" if abs(step) < 1e15 else numeral(step)


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
