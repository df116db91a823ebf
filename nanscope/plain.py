"""Plain data: numbers and dataclasses as JSON can hold them, read back without trust, and as a pandas frame."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, cast, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    import pandas


LARGEST = 1 << 63  # a whole number in a file is smaller


_AS_IT_IS = frozenset({str, int, bool, NoneType})  # most of a file is one of these


def show(value: Any) -> Any:
    """Return JSON data as JSON can hold it, all the way down: NaN and the infinities become text."""
    if isinstance(value, dict):
        return {key: item if type(item) in _AS_IT_IS else show(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [item if type(item) in _AS_IT_IS else show(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def ordered(data: Any) -> Any:
    """Return JSON data with its names in order, all the way down, as a file of ours has them."""
    if isinstance(data, dict):
        return {key: ordered(data[key]) for key in sorted(data)}
    return [ordered(item) for item in data] if isinstance(data, list) else data


DEEPEST = 64  # lists and objects within each other, in a file of ours


def is_deep(data: Any) -> bool:
    """Is JSON data nested deeper than any of ours? Whatever goes through it afterwards may do so by recursion."""
    level = [data]
    for _ in range(DEEPEST):
        items = (item for one in level for item in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()))
        level = [item for item in items if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")  # of a surrogate pair, or all of it


def loaded(text: str) -> Any:
    """Return what a text of JSON says. Half a surrogate pair, which no encoding can write, becomes U+FFFD.

    Raises ValueError or RecursionError for anything else.
    """
    data = json.loads(text)
    if not _HALF.search(text):
        return data
    return json.loads(json.dumps(data, ensure_ascii=False).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


def parse(value: Any) -> Any:
    """Return the number that `show` wrote as text."""
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def checked(kind: Any, data: object) -> dict[str, Any]:
    """Return the fields of a dataclass out of JSON data, without the keys that it does not know.

    Raises TypeError or ValueError if a value is not what its field says: a file may hold anything.
    """
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__} is {type(data).__name__}")
    found = {}
    for name, hint in _hints(kind).items():
        if name in data:
            try:
                found[name] = read(hint, data[name])
            except TypeError as error:
                raise TypeError(f"{name} is {error}") from None
    return found


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(cast(Any, kind))}


def read(hint: Any, value: Any) -> Any:
    """Return JSON data as the type that a hint names: a number, text, an enum, a tuple, a union of these, a dataclass.

    Raises TypeError or ValueError if it is anything else.
    """
    if is_dataclass(hint) and isinstance(hint, type):
        return hint(**checked(hint, value))
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None and NoneType in args else read(next(arg for arg in args if arg is not NoneType), value)
    if origin is tuple and isinstance(value, list):
        kinds = (args[0],) * len(value) if args[1:] == (...,) else args
        return tuple(read(kind, item) for kind, item in zip(kinds, value, strict=True))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if hint is float:
        value = parse(value)
        return float(_exactly(int, value)) if type(value) is int else _exactly(float, value)
    return _exactly(hint, value)


def _exactly(hint: Any, value: Any) -> Any:
    if type(value) is not hint:
        raise TypeError(f"{type(value).__name__}, not {getattr(hint, '__name__', hint)}")
    if hint is int and not -LARGEST <= value < LARGEST:  # what is added to it could not even be shown
        raise ValueError("a number of more than 64 bits")
    return value


def frame(kind: type[Any], rows: Iterable[Any]) -> pandas.DataFrame:
    """Return instances of a flat dataclass as a pandas frame: one row each, one column per field, the first field is the index."""
    import pandas

    names = [field.name for field in fields(kind)]
    return pandas.DataFrame([[getattr(row, name) for name in names] for row in rows], columns=names).set_index(names[0])
