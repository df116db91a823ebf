"""What code leads to beyond the objects that it is given: globals, class attributes, variables of enclosing functions.

A copy of a module shares its code with the original, and `CALLS += 1` counts for both. So before code runs once more, what its functions
name is noted: bindings, plain containers, attributes of objects, generators. Afterwards what has changed is put back. Only what is named
is looked at, from function to function and a few containers deep; what code reaches in other ways (a file, a socket, an extension in C)
it reaches twice.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch

from nanscope.capture.foreign import is_foreign
from nanscope.capture.iterators import Twins, hands_over, lacks_twin

DEPTH = 3  # containers within containers that are looked into
LARGEST = 10_000  # items of one container; what is larger is left alone

CONTAINERS: tuple[Any, ...] = (list, OrderedDict, dict, set, deque)

_MISSING = object()
_OF_GLOBALS = ("_GLOBAL", "_NAME")  # how instructions are called that read or write one; a class in a function has the second
_ENTRIES = {"forward", "__call__", "__next__", "step", "backward"}  # what of a class is called from outside


class Reach:
    """What some code leads to, as it is now. code: functions and classes.

    Raises NotIsolated if that hands over something only once, and has no twin that could do it instead.
    """

    def __init__(self, code: Iterable[object]) -> None:
        self._undo: list[Callable[[], None]] = []
        self._lend: list[Callable[[], None]] = []
        self._twins = Twins(lambda thing: self._visit(thing, 1))
        self._seen: dict[int, object] = {}  # by id, which stays its own as long as it is held
        self._names = set(_ENTRIES)
        self._spaces: dict[int, tuple[Any, set[str]]] = {}  # classes and dicts of attributes, with the names that were looked up in them
        for thing in code:
            self._visit(thing, 0)
        known = (0, 0)
        while known != (len(self._names), len(self._spaces)):
            known = (len(self._names), len(self._spaces))
            for space, done in list(self._spaces.values()):
                names = (self._names & vars_of(space).keys()) - done
                done |= names
                self._look_up(space, names)

    @property
    def names(self) -> Set[str]:
        """All names that the code names, of variables and attributes."""
        return self._names

    def lend(self) -> None:
        """Put twins in the place of what hands over each thing once, until `put_back`."""
        for lend in self._lend:
            lend()

    def put_back(self) -> None:
        """Undo what has changed since."""
        for undo in self._undo:
            undo()

    def _visit(self, thing: Any, depth: int) -> None:
        if id(thing) in self._seen or depth > DEPTH:
            return
        self._seen[id(thing)] = thing
        if hands_over(thing):  # and stands where no twin can be put
            raise lacks_twin(thing)
        if isinstance(thing, type):
            for base in thing.__mro__:
                if not is_foreign(base.__module__):
                    self._spaces.setdefault(id(base), (base, set()))
        elif isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)):
            self._visit(getattr(thing, "__func__", None), depth)
            self._visit(thing.__self__, depth)
        elif isinstance(thing, functools.partial):
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self._visit(part, depth)
        elif isinstance(thing, types.ModuleType):
            if not is_foreign(thing.__name__):
                self._spaces.setdefault(id(vars(thing)), (vars(thing), set()))
        elif isinstance(thing, (*CONTAINERS, tuple)):
            self._container(thing, depth)
        elif not self._generator(thing) and not is_foreign(type(thing).__module__):
            self._visit(type(thing), depth)
            attributes = getattr(thing, "__dict__", None)
            if isinstance(attributes, dict):
                self._spaces.setdefault(id(attributes), (attributes, set()))

    def _function(self, function: types.FunctionType) -> None:
        self._visit(getattr(function, "__wrapped__", None), 0)
        if is_foreign(function.__module__ or ""):
            return
        names = set(_names_in(function.__code__))
        self._names |= names
        names &= function.__globals__.keys()
        once = {name for name in names if self._twins.needed(function.__globals__[name])}
        if once:
            names -= once - set(_globals_in(function.__code__))
        self._look_up(function.__globals__, names)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                self._stands(functools.partial(_refill_cell, cell), cell.cell_contents)
        if function.__defaults__:
            self._stands(functools.partial(_set_defaults, function), function.__defaults__)
        self._visit(function.__kwdefaults__, 0)
        self._spaces.setdefault(id(vars(function)), (vars(function), set()))

    def _look_up(self, space: Any, names: Iterable[str]) -> None:
        for name in sorted(names):
            self._stands(functools.partial(_rebind, space, name), vars_of(space)[name])

    def _stands(self, place: Callable[[Any], None], value: Any) -> None:
        """Note what stands in a place that can be written to."""
        self._undo.append(functools.partial(place, value))
        if self._twins.needed(value):
            self._lend.append(functools.partial(place, self._twins.of(value)))
        else:
            self._visit(_function_of(value), 1)

    def _generator(self, thing: Any) -> bool:
        for kind, read, write in _generators():
            if isinstance(thing, kind):
                self._undo.append(functools.partial(write, thing, read(thing)))
                return True
        return False

    def _container(self, thing: Any, depth: int) -> None:
        if _kind_of(thing).__len__(thing) > LARGEST:
            return
        pairs = isinstance(thing, dict)
        before = _content(thing)
        if not isinstance(thing, tuple):
            self._undo.append(functools.partial(_refill, thing, before))
            if any(map(self._twins.needed, before)):
                self._lend.append(functools.partial(_refill, thing, [self._twins.of(item) for item in before]))
                return
        for item in before:
            self._visit(item[1] if pairs else item, depth + 1)


def _function_of(value: Any) -> Any:
    """Of a static method or a property, the function. Nothing else is asked: a class that stands for one which is not installed raises."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def vars_of(space: Any) -> Any:
    """Return what a class or a dict of attributes holds, by name."""
    return space if isinstance(space, dict) else vars(space)


def _names_in(code: types.CodeType) -> Iterator[str]:
    for part in _parts_of(code):
        yield from part.co_names


def _globals_in(code: types.CodeType) -> Iterator[str]:
    """The global variables that code reads: `x.data` is none. To tell them from attributes takes 20 times as long as to take both."""
    for part in _parts_of(code):
        yield from (str(step.argval) for step in dis.get_instructions(part) if step.opname.endswith(_OF_GLOBALS))


def _parts_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts_of(constant)


def _generators() -> Iterator[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]]]:
    yield random.Random, lambda one: one.getstate(), lambda one, state: one.setstate(state)
    yield torch.Generator, lambda one: one.get_state(), lambda one, state: one.set_state(state)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.random.RandomState, lambda one: one.get_state(), lambda one, state: one.set_state(state)
        yield numpy.random.Generator, lambda one: one.bit_generator.state, lambda one, state: setattr(one.bit_generator, "state", state)


def _rebind(space: Any, name: str, value: object) -> None:
    if vars_of(space).get(name, _MISSING) is value:
        return
    if isinstance(space, dict):
        space[name] = value
    else:
        type.__setattr__(space, name, value)


def _refill_cell(cell: types.CellType, value: object) -> None:
    with contextlib.suppress(ValueError):
        if cell.cell_contents is value:
            return
    cell.cell_contents = value


def _set_defaults(function: types.FunctionType, values: tuple[Any, ...] | None) -> None:
    if function.__defaults__ is not values:
        function.__defaults__ = values


def _kind_of(thing: Any) -> Any:
    """What of the language a container is. A class of the trainer's may do anything when it is asked what it holds, as to import it."""
    return next(kind for kind in (*CONTAINERS, tuple) if isinstance(thing, kind))


def _content(thing: Any) -> list[Any]:
    kind = _kind_of(thing)
    return list(kind.items(thing) if issubclass(kind, dict) else kind.__iter__(thing))


def _refill(thing: Any, before: list[Any]) -> None:
    now = _content(thing)
    pairs = zip(now, before, strict=False)
    same = all(a[0] is b[0] and a[1] is b[1] for a, b in pairs) if isinstance(thing, dict) else all(a is b for a, b in pairs)
    if not same or len(now) != len(before):
        kind = _kind_of(thing)
        kind.clear(thing)
        (kind.extend if kind in (list, deque) else kind.update)(thing, before)  # of a Counter the own update adds
