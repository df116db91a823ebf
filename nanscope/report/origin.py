"""The origin in words: where it is, what code made it, and what that computed."""

from __future__ import annotations

from pathlib import PurePath

from nanscope.report.clean import clean, numeral
from nanscope.snapshot.observation import Origin


def where(place: Origin, limit: int = 240) -> str:
    """Return file name and line of the origin, "" if unknown."""
    if not place.file:
        return ""
    name = PurePath(clean(place.file, limit)).name
    return name if place.line is None else f"{name}:{clean(place.line, 12)}"


def subject(place: Origin, limit: int = 240) -> str:
    """Return the code that made the origin: variable = expression, as far as known."""
    if place.variable and place.expression and place.op != "input":
        return clean(f"{place.variable} = {place.expression}", limit)
    return clean(place.variable or place.expression or place.op, limit)


def calculation(place: Origin, limit: int = 240) -> str:
    """Return what the op computed: exp(200) = +inf."""
    args = ", ".join(numeral(value) for _, value in place.operands[:3]) + (", …" if len(place.operands) > 3 else "")
    return clean(f"{place.op}({args}) = {numeral(place.value)}" if place.operands else numeral(place.value), limit)
