"""The terminal: how wide, in which styles, as a file or a pipe gets it, and progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import IO, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
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


READABLE = 16  # characters: a column that is to fold its text is given as many, if it has as many

VALUES = 28  # the same of what is said beside a name


class Columns(Table):
    """A table that becomes a list where its columns would be too narrow to read: a block a row, "head: cell" a line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it as wide as there is room."""
        if self._needs(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.show_header and str(self.columns[0].header):
            yield Text(str(self.columns[0].header), QUIET)
        names = [column.header if self.show_header else "" for column in self.columns]
        for cells in zip(*(column._cells for column in self.columns), strict=True):
            first, *rest = (_text(cell) for cell in cells)
            if first.plain:
                first.stylize(self.columns[0].style)
                yield first
            for name, cell in zip(names[1:], rest, strict=True):
                if cell.plain:
                    head = Text(f"{str(name).strip()}: ", QUIET) if name else Text()
                    yield Padding(head.append_text(cell), (0, 0, 0, 2))

    def _needs(self, console: Console, options: ConsoleOptions) -> int:
        """How many characters its columns need to be read."""
        free = options.update_width(10_000)
        natural = [
            max((Measurement.get(console, free, cell).maximum for cell in self._texts(column)), default=0) for column in self.columns
        ]
        least = VALUES if len(natural) == 2 and not self.show_header else READABLE
        needed = [wide if column.no_wrap else min(wide, least) for column, wide in zip(self.columns, natural, strict=True)]
        return sum(needed) + sum(self.padding[1::2]) * len(needed)

    def _texts(self, column: Column) -> list[RenderableType]:
        return [*([column.header] if self.show_header else []), *column._cells]


def _text(cell: RenderableType) -> Text:
    return cell.copy() if isinstance(cell, Text) else Text(str(cell))


def table(*heads: str) -> Table:
    """Return a table without lines, its columns two spaces apart."""
    found = Columns(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(heads), header_style=QUIET)
    for head in heads:
        found.add_column(head, overflow="fold")
    return found


def pairs(*, style: str = QUIET) -> Table:
    """Return a table of names, in one style, and of what there is to say of each."""
    found = Columns(box=None, padding=(0, 2), collapse_padding=True, pad_edge=False, show_header=False, show_footer=False, show_edge=False)
    found.add_column(style=style, no_wrap=True)
    found.add_column(overflow="fold")
    return found


@contextmanager
def progress(what: str, *, file: IO[str]) -> Iterator[None]:
    """Show that something is running, on a terminal only."""
    if not file.isatty():
        yield
        return
    console = console_for(file)
    with console.status(what, spinner="line" if console.options.ascii_only else "dots"):
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
