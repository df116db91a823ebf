"""The one table of what was tried, for all renderers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanscope.report.clean import (
    LIMITS,
    Limits,
    clean,
    numeral,
    real,
)
from nanscope.report.history import is_finite_number
from nanscope.snapshot.observation import Row
from nanscope.text import is_exact
from nanscope.verdict.incident import Fix, Incident


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
