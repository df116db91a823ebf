"""One after the other: several threads write into one logbook."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Turns:
    """A lock that a thread may take again, and that is free in a forked process, whoever held it when that was made."""

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


class Shared(Protocol):
    """What several threads use."""

    turns: Turns


_S = TypeVar("_S", bound=Shared)


def in_turn(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Let one thread at a time run the methods of an object that are marked so."""

    @functools.wraps(method)
    def waits(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.turns:
            return method(self, *args, **kwargs)

    return waits
