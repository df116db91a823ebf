"""The terminal: how wide, in which styles, as a file or a pipe gets it, and progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import IO, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

WIDTH = 118

HARM, DOUBT, PROVEN, QUIET, STRONG = "bold red", "yellow", "green", "dim", "bold"


def show(shown: RenderableType, *, file: IO[str]) -> None:
    """Print: in colour on a terminal, as `plain` text elsewhere."""
    if file.isatty():
        console_for(file).print(shown)
    else:
        columns = os.environ.get("COLUMNS", "")
        file.write(plain(shown, int(columns) if columns.isdigit() else WIDTH))


def plain(shown: RenderableType, width: int = WIDTH) -> str:
    """Return as text without colours, and without spaces at the ends of lines. width: characters."""
    stream = StringIO()
    Console(file=stream, width=width, highlight=False, markup=False, emoji=False, no_color=True, force_terminal=False).print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def console_for(file: IO[str]) -> Console:
    """Return a console that writes to a terminal as this package's reports look."""
    return Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=False)


def table(*heads: str) -> Table:
    """Return a table without lines, its columns two spaces apart."""
    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(heads), header_style=QUIET)
    for head in heads:
        found.add_column(head, overflow="fold")
    return found


def pairs(*, style: str = QUIET) -> Table:
    """Return a table of names, in one style, and of what there is to say of each."""
    found = Table.grid(padding=(0, 2))
    found.add_column(style=style, no_wrap=True)
    found.add_column(overflow="fold")
    return found


@contextmanager
def progress(what: str, *, file: IO[str]) -> Iterator[None]:
    """Show that something is running, on a terminal only."""
    if not file.isatty():
        yield
        return
    with console_for(file).status(what):
        yield


@contextmanager
def steps_bar(what: str, total: int, *, file: IO[str]) -> Iterator[Callable[[str], None]]:
    """Yield a function that advances a progress bar by one step and sets the words beside it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    if not file.isatty():
        show(Text(f"{what} …", QUIET), file=file)
        yield lambda words: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, console=console_for(file), transient=True) as bar:
        task = bar.add_task(what, total=total, words="")
        yield lambda words: bar.update(task, advance=1, words=words)


def track(items: Sequence[T], what: str, *, file: IO[str]) -> Iterable[T]:
    """Yield items, with a progress bar on a terminal."""
    if not file.isatty() or len(items) < 2:
        return items
    from rich.progress import track as bar

    return bar(items, what, console=console_for(file), transient=True)
