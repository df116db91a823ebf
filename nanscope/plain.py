"""Plain data: numbers and flat dataclasses as JSON can hold them, and read back without trust."""

from __future__ import annotations

import math
from dataclasses import fields
from types import NoneType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


KINDS: dict[str, tuple[type, ...]] = {  # how a field is annotated → what JSON may give for it
    "int": (int,),
    "int | None": (int, NoneType),
    "float": (int, float),
    "float | None": (int, float, NoneType),
    "bool": (bool,),
    "str": (str,),
}


def checked(kind: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a flat dataclass out of JSON data, without the keys that it does not know.

    Raises TypeError if a value is not what its field says: a file may hold anything.
    """
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__} is {type(data).__name__}")
    found = {}
    for field in fields(kind):
        if field.name not in data:
            continue
        value = parse(data[field.name])
        if not isinstance(value, KINDS[str(field.type)]) or (isinstance(value, bool) and field.type != "bool"):
            raise TypeError(f"{field.name} is {type(value).__name__}, not {field.type}")
        found[field.name] = value
    return found


def show(value: Any) -> Any:
    """Return JSON data as JSON can hold it, all the way down: NaN and the infinities become text."""
    if isinstance(value, dict):
        return {key: show(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [show(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse(value: Any) -> Any:
    """Return the number that `show` wrote as text."""
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value
