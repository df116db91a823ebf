"""Text and numbers of a run as reports show them: one line, nothing hidden, nothing hostile, cut to a limit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from nanscope.errors import visible
from nanscope.text import number


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
WHOLE = replace(LIMITS[0], text=LIMITS[0].long, rows=10_000)  # for what scrolls, or is read by programs


def clean(value: object, limit: int = LIMITS[0].long) -> str:
    """Return a string from a run as one line that hides nothing: control, bidi and invisible characters become visible.

    limit: characters kept; what is longer ends in "…".
    """
    raw = value if isinstance(value, str) else str(value)
    text = re.sub(r"\s*[\r\n]+\s*", " ", raw[: 4 * limit].replace("\t", "    "))
    text = visible(text[: limit + 1])
    return text if len(text) <= limit and len(raw) <= 4 * limit else text[: limit - 1] + "…"


def real(value: object) -> float | None:
    """Return a number as a float, None for anything else: what comes from a file can be of any type."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def is_finite_number(value: object) -> bool:
    """Tell whether a value is a number, and a finite one."""
    found = real(value)
    return found is not None and math.isfinite(found)


def numeral(value: object) -> str:
    """Return a number as reports write it, "–" for what is none."""
    return number(real(value))


def numeral_step(step: float) -> str:
    """Return a step number in full."""
    return f"{step:.0f}" if abs(step) < 1e15 else numeral(step)


def two(pair: object) -> tuple[int, int] | None:
    """Return (bad, total) from what `Incident.reached` says, None if it was not looked at."""
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(n, int) for n in pair):
        return None
    return int(pair[0]), int(pair[1])
