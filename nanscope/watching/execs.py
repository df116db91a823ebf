"""`os.exec…`: the program that takes a process's place belongs to the run, and the run is told to its end.

A process that takes part closes its book before it goes. Who began the run stays, since nobody else could tell the verdict: the program
runs as its child, and its status is that of the child. To the script that is the same, but for the number of the process.

Notable: all of `os.exec…` come to these two functions. An audit hook would see them as well, and could never be taken off again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from nanscope.watching.ambience import AMBIENCE
from nanscope.watching.target import run_command

Program = Callable[[], NoReturn]  # takes the place of this process, or raises OSError


@contextmanager
def stays(go: Callable[[], None]) -> Iterator[None]:
    """While it lasts, a program that is to take this process's place runs as its child, and this process leaves with its status.

    go: called where that cannot be, and the process goes: signals are handed on by the main thread only.
    """

    def instead(program: Program, path: Any, argv: Sequence[Any], env: Mapping[Any, Any] | None) -> NoReturn:
        if threading.current_thread() is threading.main_thread() and not isinstance(path, int):
            run_command(argv, path, env)
        go()
        program()

    before = _put(instead)
    try:
        yield
    finally:
        os.execv, os.execve = before


def leaves(tell: Callable[[], None] = lambda: None) -> None:
    """From here on this process closes its book before a program takes its place. tell: called then."""

    def instead(program: Program, *_: object) -> NoReturn:
        rested = AMBIENCE.rest()
        tell()
        try:
            program()
        except OSError:  # there is no such program: the script goes on
            if rested:
                AMBIENCE.resume()
            raise

    _put(instead)


def _put(instead: Callable[[Program, Any, Sequence[Any], Mapping[Any, Any] | None], NoReturn]) -> tuple[Any, Any]:
    """Call this in place of what lets a program take the place of this process. Returns what was there."""
    before, owner = (os.execv, os.execve), os.getpid()

    def execv(path: Any, argv: Any, /) -> NoReturn:
        if os.getpid() != owner:  # forked, as by os.spawnv
            before[0](path, argv)
        instead(lambda: before[0](path, argv), path, argv, None)

    def execve(path: Any, argv: Any, env: Any) -> NoReturn:
        if os.getpid() != owner:
            before[1](path, argv, env)
        instead(lambda: before[1](path, argv, env), path, argv, env)

    os.execv, os.execve = execv, execve
    return before
