"""How indices, numbers and counts are written everywhere."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from pathlib import PurePath


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at a flat (row-major) position."""
    index = []
    for length in reversed(shape):
        index.append(flat % length if length else 0)
        flat //= max(length, 1)
    return tuple(reversed(index))


def ravel(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the flat (row-major) position of an index."""
    flat = 0
    for position, length in zip(index, shape, strict=True):
        flat = flat * length + position
    return flat


def show_index(index: Sequence[int]) -> str:
    """Return an index or a shape as text: [2, 27]."""
    return "[" + ", ".join(str(i) for i in index) + "]"


def row_token(row: int, token: int | None = None) -> str:
    """Return a place in the batch as it is said: "row 10, token 4,117", "row 57"."""
    return f"row {row:,}" + ("" if token is None else f", token {token:,}")


def line_in(file: str, line: int | None) -> str:
    """Return a line as it is said: "loss.py:206"."""
    return f"{PurePath(file).name}:{line}"


def number(value: float | None) -> str:
    """Return a number as reports write it."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+inf" if value > 0 else "−inf"
    return f"{value:.4g}".replace("-", "−")


def count(many: int, noun: str) -> str:
    """Return "1 row", "3 rows", "2 batches", "4 passes"."""
    return f"{many} {noun}" if many == 1 else f"{many} {noun}{'es' if noun.endswith(('ch', 'ss')) else 's'}"


def is_round(many: int) -> bool:
    """Is it 1, 10, 100, …? What is counted is told at these."""
    return str(many).rstrip("0") == "1"


_UNITS = ((86400, "day"), (3600, "h"), (60, "min"), (1, "s"))  # seconds


def ago(seconds: float) -> str:
    """Return "14 s ago", "3 min ago", "5 h ago", "2 days ago"."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), (1, "s"))
    many = max(0, int(seconds // size))
    return f"{count(many, unit) if unit == 'day' else f'{many} {unit}'} ago"


def listed(words: Sequence[str]) -> str:
    """Return "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def meant(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean where_grad_trap?" for a word that is none of those known, "" if none of them looks like it."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near is not None else ""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the one of the words known that looks most like a word, None if none does."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


MOST = 0.01  # of the largest healthy gradient: an edit that changes a healthy element by more is not proven


def is_spared(distortion: float | None) -> bool:
    """Is a distortion measured, and small enough to say that an edit leaves the healthy elements alone?"""
    return distortion is not None and distortion <= MOST


def is_exact(distortion: float | None) -> bool:
    """Is a distortion nothing but rounding?"""
    return distortion is not None and distortion <= 1e-6


def spans(numbers: Sequence[int], shown: int = 8) -> str:
    """Return ascending whole numbers as "0–6, 8, 10–1023"; the first so many stretches of them."""
    found: list[list[int]] = []
    for one in numbers:
        if found and one == found[-1][1] + 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    words = [str(first) if first == last else f"{first}–{last}" for first, last in found[:shown]]
    return ", ".join([*words, *(["…"] if len(found) > shown else [])])
