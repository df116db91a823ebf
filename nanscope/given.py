"""Arguments, looked at when they are given: one error, at the call, that names the argument, what it takes and what it was.

    >>> nanscope.watch(on_nonfinite="stpo")
    NanscopeError: on_nonfinite takes "record", "skip", "stop" or "repair", not 'stpo': did you mean 'stop'?

What is wrong is said before anything is installed, opened or run: after a night of training nobody wants to read it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from nanscope.errors import NanscopeError, one_line
from nanscope.text import nearest

LONGEST = 80  # characters of a value that is quoted


def refused(name: str, takes: str, given: object, hint: str = "") -> NanscopeError:
    """Return the error for an argument that is not what it may be. takes: what it may be, in words. hint: what to do, after a colon."""
    return NanscopeError(f"{name} takes {takes}, not {told(given)}{f': {hint}' if hint else ''}", slug="bad-argument")


def told(given: object) -> str:
    """Return what was given, in a few words: None, 'stpo', -1, a list, a tensor of shape [2, 3]."""
    if given is None or isinstance(given, (bool, int, float, str)):
        text = one_line(repr(given))
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    if isinstance(given, type):
        return f"the class {given.__qualname__}"
    if type(given).__module__ == "torch" and not hasattr(given, "shape"):
        return str(given)
    shape = getattr(given, "shape", None)
    if isinstance(shape, tuple):
        return f"a {type(given).__name__} of shape {list(shape)}"
    if callable(given):
        return f"the function {getattr(given, '__qualname__', type(given).__qualname__)}"
    if isinstance(given, os.PathLike):
        return f"the path {one_line(os.fsdecode(given))!r}"
    name = type(given).__qualname__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def near(word: object, known: Iterable[str]) -> str:
    """Return "did you mean 'stop'?" for a word that is misspelt, "" where nothing is like it."""
    found = nearest(word, map(str, known)) if isinstance(word, str) else None
    return f"did you mean {found!r}?" if found is not None else ""


def spelled(word: object, known: Iterable[str]) -> str:
    """Return the same amid a message: " (did you mean 'stop'?)"."""
    found = near(word, known)
    return f" ({found})" if found else ""


def a_path(name: str, given: object, takes: str = "a path or an address") -> str:
    """Return a path as text. Raises NanscopeError if it is none."""
    if not isinstance(given, (str, os.PathLike)):
        raise refused(name, takes, given)
    found = os.fsdecode(given)
    if not found or "\0" in found:
        raise refused(name, takes, found)
    return found


def whole(name: str, given: Any, takes: str, least: int = 0) -> int:
    """Return a whole number, also one that is written as 1e9. takes: what it counts.

    Raises NanscopeError for anything else, and for what is below `least`.
    """
    number = int(given) if isinstance(given, float) and given.is_integer() else given
    try:
        if isinstance(given, bool):
            raise TypeError
        found = operator.index(number)
    except TypeError:
        raise refused(name, takes, given) from None
    if found < least:
        raise refused(name, takes, given)
    return found


def a_flag(name: str, given: object) -> bool:
    """Return True or False. Raises NanscopeError for anything else: "no" is true."""
    if not isinstance(given, bool):
        raise refused(name, "True or False", given)
    return given


def a_call(name: str, given: Any, of: str) -> Any:
    """Return a function, or None. of: what it is called with. Raises NanscopeError for anything else."""
    if given is not None and (not callable(given) or isinstance(given, type)):
        raise refused(name, f"a function of {of}, or None", given)
    return given


def texts(name: str, given: object, takes: str) -> list[str]:
    """Return words of which one may be given as it is. Raises NanscopeError for anything else."""
    found = several(name, [given] if isinstance(given, str) else given, takes)
    for one in found:
        if not isinstance(one, str):
            raise refused(name, takes, one)
    return found


def several(name: str, given: Any, takes: str) -> list[Any]:
    """Return what was given as a list. Raises NanscopeError for what is none of several, and for text."""
    if isinstance(given, (str, bytes)) or getattr(given, "shape", None) == ():
        raise refused(name, takes, given)
    try:
        return list(given)
    except TypeError:
        raise refused(name, takes, given) from None


def an(name: str, given: Any, kinds: type | tuple[type, ...], takes: str, hint: str = "") -> Any:
    """Return what was given if it is of a class. Raises NanscopeError otherwise."""
    if not isinstance(given, kinds):
        raise refused(name, takes, given, hint)
    return given


def one_of(name: str, given: object, known: Collection[str]) -> str:
    """Return one of some words. Raises NanscopeError for another, with the one that was meant."""
    if not isinstance(given, str) or given not in known:
        raise refused(name, either(known), given, near(given, known))
    return given


def either(words: Collection[str]) -> str:
    """Return some words as those that may be given: "a", "b" or "c"."""
    *first, last = (f'"{word}"' for word in words)
    return " or ".join(filter(None, (", ".join(first), last)))


def check_fields(instance: object) -> None:
    """Raise NanscopeError where a field of a dataclass holds something of a class that it does not name. What stands inside a tuple, a
    mapping or a function is not looked at."""
    for name, kinds in _kinds(cast(Hashable, type(instance))).items():
        value = getattr(instance, name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            members = [f"{kind.__name__}.{one}" for kind in kinds if issubclass(kind, Enum) for one in kind.__members__]
            hint = near(value, (one.partition(".")[2].lower() for one in members))
            raise refused(f"{type(instance).__name__}({name}=…)", ", ".join(members) or kinds_of(kinds), value, hint)


@cache
def _kinds(owner: Hashable) -> dict[str, tuple[type, ...]]:
    hints = get_type_hints(owner)
    return {field.name: tuple(_classes(hints[field.name])) for field in fields(cast(Any, owner))}


def _classes(hint: Any) -> Iterator[type]:
    """Yield the classes that a type hint names; float takes whole numbers, too."""
    if get_origin(hint) in (Union, UnionType):
        for one in get_args(hint):
            yield from _classes(one)
    else:
        yield get_origin(hint) or hint
        if hint is float:
            yield int


def kinds_of(kinds: Sequence[type]) -> str:
    """Return classes in words: Ppo, Vespo or None."""
    words = ["None" if kind is NoneType else kind.__name__ for kind in kinds if kind is not int or float not in kinds]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
