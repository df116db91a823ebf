"""Frozen dataclasses as JSON data and back, exactly, by their type hints: what is read again is equal to what was written.

    written(Note, Note("second_fault", "with clamp …", 412))     {"slug": "second_fault", "text": "with clamp …", "step": 412}
    read(Note, …)                                                Note("second_fault", "with clamp …", 412)

Notable: `plain` makes JSON for others, where NaN is text. Here a number stays one (Python's json writes and reads NaN and Infinity), and so
the text "nan" stays text. Nothing in the data is code, and nothing in it chooses a class: only the hints do. A value that is not what its
hint says is a TypeError in both directions, so that nothing is kept that would come back as something else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def written(kind: type[T], value: T) -> Any:
    """Return an instance of a dataclass as JSON data. Raises TypeError if something in it is not what its hint says."""
    return _codec(cast(Hashable, kind)).write(value)


def read(kind: type[T], data: Any) -> T:
    """Return what `written` wrote. Raises TypeError or ValueError for anything else."""
    return cast(T, _codec(cast(Hashable, kind)).read(data))


class _Codec(NamedTuple):
    """How values of one hint are written and read. same: the types whose values are JSON as they are."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    same: frozenset[type] = frozenset()


_LEAVES: dict[Any, frozenset[type]] = {  # a whole number may stand where any number may
    str: frozenset({str}),
    int: frozenset({int}),
    bool: frozenset({bool}),
    float: frozenset({float, int}),
    NoneType: frozenset({NoneType}),
}
_ANY = frozenset().union(*_LEAVES.values())


@cache
def _codec(hint: Hashable) -> _Codec:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return _Codec(_json, _json)
    if hint in _LEAVES:
        return _leaf(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _of_fields(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if origin in (Union, UnionType):
        return _first_of([_codec(arg) for arg in args])
    if origin is tuple:
        return _many(_codec(args[0])) if args[1:] == (...,) else _tuple([_codec(arg) for arg in args])
    if isinstance(origin, type) and issubclass(origin, Mapping) and args[0] in (str, int):
        return _mapping(args[0], _codec(args[1]))
    raise TypeError(f"{hint} cannot be written")


def _must(holds: bool, value: object, hint: object) -> None:
    if not holds:
        raise TypeError(f"{type(value).__name__}, not {getattr(hint, '__name__', hint)}")


def _leaf(hint: Any) -> _Codec:
    same = _LEAVES[hint]

    def write(value: Any) -> Any:
        if type(value) in same:
            return value
        _must(hint is str and isinstance(value, str), value, hint)  # of an enum of text, its text
        return str.__str__(value)

    def back(value: Any) -> Any:
        _must(type(value) in same, value, hint)
        return value

    return _Codec(write, back, same)


def _enum(hint: type[Enum]) -> _Codec:
    def write(value: Any) -> Any:
        _must(type(value) is hint, value, hint)
        return value.value

    return _Codec(write, hint)


def _json(value: Any) -> Any:
    """JSON data that comes back as it is."""
    if type(value) is list:
        return [_json(item) for item in value]
    if type(value) is dict:
        _must(all(type(key) is str for key in value), value, "names")
        return {key: _json(item) for key, item in value.items()}
    _must(type(value) in _ANY, value, "JSON")
    return value


def _first_of(kinds: list[_Codec]) -> _Codec:
    same: frozenset[type] = frozenset().union(*(kind.same for kind in kinds))

    def by(ways: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
        def either(value: Any) -> Any:
            if type(value) in same:
                return value
            for way in ways:
                with suppress(TypeError, ValueError):
                    return way(value)
            raise TypeError(f"{type(value).__name__} is nothing that it may be")

        return either

    return _Codec(by([kind.write for kind in kinds]), by([kind.read for kind in kinds]), same)


def _many(item: _Codec) -> _Codec:
    def write(value: Any) -> Any:
        _must(type(value) is tuple, value, tuple)
        return list(value) if set(map(type, value)) <= item.same else [item.write(one) for one in value]

    def back(value: Any) -> Any:
        _must(type(value) is list, value, list)
        return tuple(value) if set(map(type, value)) <= item.same else tuple([item.read(one) for one in value])

    return _Codec(write, back)


def _tuple(items: list[_Codec]) -> _Codec:
    def write(value: Any) -> Any:
        _must(type(value) is tuple, value, tuple)
        return [item.write(one) for item, one in zip(items, value, strict=True)]

    def back(value: Any) -> Any:
        _must(type(value) is list, value, list)
        return tuple([item.read(one) for item, one in zip(items, value, strict=True)])

    return _Codec(write, back)


def _mapping(named: type, item: _Codec) -> _Codec:
    """By names, or by whole numbers, which are names in JSON."""

    def write(value: Any) -> Any:
        _must(type(value) is dict and all(type(key) is named for key in value), value, dict)
        return {str(key): item.write(one) for key, one in value.items()}

    def back(value: Any) -> Any:
        _must(type(value) is dict and all(type(key) is str for key in value), value, dict)
        found = {named(key): item.read(one) for key, one in value.items()}
        _must([str(key) for key in found] == list(value), value, dict)
        return found

    return _Codec(write, back)


def _of_fields(kind: type) -> _Codec:
    @cache
    def parts() -> list[tuple[str, _Codec]]:  # when it is first asked for: a class may hold its own kind
        hints = get_type_hints(kind)
        return [(field.name, _codec(hints[field.name])) for field in fields(cast(Any, kind))]

    def write(value: Any) -> Any:
        _must(type(value) is kind, value, kind)
        return {name: part.write(getattr(value, name)) for name, part in parts()}

    def back(value: Any) -> Any:
        _must(type(value) is dict and value.keys() == {name for name, _ in parts()}, value, kind)
        return kind(**{name: part.read(value[name]) for name, part in parts()})

    return _Codec(write, back)
