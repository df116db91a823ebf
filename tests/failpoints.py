"""Plants failures in functions of ours: which of them a run calls while it is watched, and each of those made to raise."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import nanscope

HOUSE = str(Path(nanscope.__file__).parent)


class Planted(Exception):
    """The failure that is planted."""


@dataclass(frozen=True, order=True)
class Point:
    """A function of ours. owner: the class that it is a method of, "" for a function of the module."""

    module: str
    owner: str
    name: str

    def __str__(self) -> str:
        return ".".join(part for part in (self.module.removeprefix("nanscope."), self.owner, self.name) if part)

    def holder(self) -> Any:
        """Return the class or module that it is an attribute of."""
        module = sys.modules[self.module]
        return functools.reduce(getattr, self.owner.split("."), module) if self.owner else module


def called(act: Callable[[], object]) -> set[Point]:
    """Run something, and return which functions of ours were called by it."""
    codes: set[CodeType] = set()

    def look(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOUSE):
            codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(before)
    return {point for code in codes if (point := _point(code)) is not None}


def _point(code: CodeType) -> Point | None:
    if "<" in code.co_qualname:  # a function inside another one goes with it
        return None
    module = Path(code.co_filename).relative_to(Path(HOUSE).parent).with_suffix("")
    owner, _, name = code.co_qualname.rpartition(".")
    point = Point(".".join(module.parts).removesuffix(".__init__"), owner, name)
    return point if name in vars(point.holder()) else None


@contextmanager
def planted(point: Point, only_first: bool) -> Iterator[list[int]]:
    """Let a function raise at its first call, or at every one. Yields a list that has one entry for each failure."""
    hits: list[int] = []
    holder = point.holder()
    original = vars(holder)[point.name]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def fails(*args: Any, **kwargs: Any) -> Any:
            if only_first and hits:
                return function(*args, **kwargs)
            hits.append(len(hits))
            raise Planted(str(point))

        return fails

    replacement: Any
    if isinstance(original, (staticmethod, classmethod)):
        replacement = type(original)(wrap(original.__func__))
    elif isinstance(original, property):
        replacement = property(wrap(original.fget), original.fset)  # type: ignore[arg-type]
    elif isinstance(original, functools.cached_property):
        replacement = functools.cached_property(wrap(original.func))
        replacement.__set_name__(holder, point.name)
    else:
        replacement = wrap(original)
    places = _places(original) if not point.owner else [(holder, point.name)]  # a function may have been imported by name
    for place, name in places:
        setattr(place, name, replacement)
    try:
        yield hits
    finally:
        for place, name in [*places, *_places(replacement)]:  # and may have been since, by a module that was first needed now
            setattr(place, name, original)


def _places(value: object) -> list[tuple[Any, str]]:
    """Where in the modules of ours a function has a name."""
    modules = [module for path, module in list(sys.modules.items()) if path == "nanscope" or path.startswith("nanscope.")]
    return [(module, name) for module in modules for name, known in list(vars(module).items()) if known is value]


def is_plain(point: Point) -> bool:
    """Is it a function that can be replaced? (Not a class, or a descriptor that nobody here knows.)"""
    value = vars(point.holder())[point.name]
    kinds = (FunctionType, staticmethod, classmethod, property, functools.cached_property, functools._lru_cache_wrapper)
    return isinstance(value, kinds)
