"""The terminal: how wide, in which styles, how text from a file is made harmless, and progress."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    pass


import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    pass


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


T = TypeVar("T")


WIDTH = 118


HARM, PROVEN, QUIET, STRONG = "bold red", "green", "dim", "bold"


def safe(text: object) -> str:
    """Return text from a file without what a terminal would obey or what would hide part of it."""
    return _CONTROL.sub("·", str(text).replace("\t", "    "))


def console_for(file: IO[str]) -> Console:
    """Return a console that writes to a file as this package's reports look."""
    terminal = file.isatty()
    return Console(
        file=file,
        width=None if terminal or os.environ.get("COLUMNS", "").isdigit() else WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


@contextmanager
def progress(what: str, *, file: IO[str]) -> Iterator[None]:
    """Show that something is running, on a terminal only."""
    console = console_for(file)
    if not file.isatty():
        yield
        return
    with console.status(what):
        yield


@contextmanager
def steps_bar(what: str, total: int, *, file: IO[str]) -> Iterator[Callable[[str], None]]:
    """Yield a function that advances a progress bar by one step and sets the words beside it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = console_for(file)
    if not file.isatty():
        console.print(Text(f"{what} …", QUIET))
        yield lambda words: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, words="")
        yield lambda words: bar.update(task, advance=1, words=words)


def track(items: Sequence[T], what: str, *, file: IO[str]) -> Iterable[T]:
    """Yield items, with a progress bar on a terminal."""
    if not file.isatty() or len(items) < 2:
        return items
    from rich.progress import track as bar

    return bar(items, what, console=console_for(file), transient=True)
