"""What every picture of a verdict shows, as plain data: clean words, the map of the tensor, the history, the replay.

Drawing is somebody else's: the page and the PNG read the same things from here.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from nanscope.case import Place
from nanscope.causes import CAUSES
from nanscope.diagnose import Fix, Incident, Verdict
from nanscope.ledger import Entry
from nanscope.replay import Row
from nanscope.words import is_exact, number


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


def numeral_step(step: float) -> str:
    """Return a step number in full."""
    return f"{step:.0f}" if abs(step) < 1e15 else numeral(step)


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
    overflowed = not is_finite_number(incident.origin.value)
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
    entries = sorted((entry for entry in incident.history if is_finite_number(entry.step)), key=lambda entry: entry.step)
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


def is_finite_number(value: object) -> bool:
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
    if distortion is None or row.bad or not is_finite_number(row.loss):
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
