"""What hands over each thing once: iterators, files, queues, connections. Code that reads from one a second time robs the trainer of it.

A twin hands over what the original would, and leaves that where it stands. An iterator of the language is taken apart into what it was
made of and how far it has come; generators, files, queues, loaders and connections have no twin.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

from nanscope.capture.alone import NotIsolated
from nanscope.capture.foreign import is_foreign

_HANDS_OVER = ("__next__", "__anext__", "get_nowait", "recv")  # what of a class gives away something that it then has no more
_SHARES: type = type(itertools.tee(())[0])  # several of them read one iterator, and only they know how far each of them is


def hands_over(thing: object) -> bool:
    """Does something hand over each thing once, and not say by its attributes how far it is, as a class of the trainer's does?"""
    for base in type(thing).__mro__:
        for name in _HANDS_OVER:
            if name in vars(base):
                told = isinstance(vars(base)[name], types.FunctionType) and not is_foreign(base.__module__)
                return not (told and hasattr(thing, "__dict__"))
    return False


def lacks_twin(thing: object) -> NotIsolated:
    """Return what is to be raised where something hands over each thing once, and nothing can do it instead."""
    return NotIsolated(f"its code leads to a {type(thing).__name__}, which hands over each thing only once")


class Twins:
    """Twins of what hands over each thing once; each has one. shared: is told of all that a twin and its original both lead to."""

    def __init__(self, shared: Callable[[object], None]) -> None:
        self._shared = shared
        self._pairs: dict[int, tuple[Any, Any]] = {}  # id of an original → it and its twin

    def needed(self, thing: object) -> bool:
        """Does something hand over each thing once, or hold what does and cannot be put in its place?"""
        return hands_over(thing) or (isinstance(thing, tuple) and any(map(self.needed, thing)))

    def of(self, thing: Any, own: bool = False) -> Any:
        """Return what stands for something in a twin: a twin where one is needed, else itself. own: a list is one that it writes to.

        Raises NotIsolated if there is none.
        """
        if hands_over(thing):
            if id(thing) not in self._pairs:
                self._pairs[id(thing)] = (thing, self._twin(thing))
            return self._pairs[id(thing)][1]
        if isinstance(thing, tuple):
            return tuple.__new__(type(thing), [self.of(item, own) for item in thing])
        if own and isinstance(thing, list):
            return [self.of(item, own) for item in thing]
        self._shared(thing)
        return thing

    def _twin(self, thing: Any) -> Any:
        try:
            make, args, state = (*thing.__reduce_ex__(4), None)[:3]
        except Exception as error:  # what cannot be taken apart says so in its own way
            raise lacks_twin(thing) from error
        if isinstance(thing, _SHARES) or isinstance(state, dict) or getattr(thing, "__dict__", None):
            raise lacks_twin(thing)
        twin = make(*self.of(args))
        if state is not None:
            twin.__setstate__(self.of(state, own=True))
        return twin
