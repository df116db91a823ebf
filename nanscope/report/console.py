"""The terminal: how wide, in which styles, in which characters, as a file or a pipe gets it, and progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import IO, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Span, Text

from nanscope.errors import visible
from nanscope.report.clean import clean
from nanscope.report.folding import command, folded
from nanscope.report.streams import spelled

T = TypeVar("T")

WIDTH = 118
LEAST = 8  # characters, of a terminal that says less

HARM, DOUBT, PROVEN, QUIET, STRONG = "bold red", "yellow", "green", "dim", "bold"


def show(shown: RenderableType, *, file: IO[str]) -> None:
    """Print: in colour on a terminal, as `plain` text elsewhere."""
    if file.isatty():
        console_for(file).print(shown)
    else:
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdigit() and int(columns) else WIDTH
        file.write(plain(shown, width, getattr(file, "encoding", None) or "utf-8"))


def plain(shown: RenderableType, width: int = WIDTH, encoding: str = "utf-8") -> str:
    """Return as text without colours, and without spaces at the ends of lines. width: characters. encoding: what it is written in."""
    stream = StringIO()
    console = Folding(
        encoding, file=stream, width=max(width, LEAST), highlight=False, markup=False, emoji=False, no_color=True, force_terminal=False
    )
    console.print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def console_for(file: IO[str]) -> Console:
    """Return a console that writes to a terminal as this package's reports look."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    console = Folding(encoding, file=file, highlight=False, markup=False, emoji=False, soft_wrap=False)
    if console.width < LEAST:
        console.width = LEAST  # rich fails where a table has no room for a letter
    return console


class Folding(Console):
    """A console that folds text where it is best read, in the characters that its stream has: a substitute may be longer."""

    def __init__(self, spelling: str, *, width: int | None = None, **how: object) -> None:
        super().__init__(width=width, **how)  # type: ignore[arg-type]
        self.spelling = spelling

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything; text is folded before."""
        if isinstance(renderable, str):
            renderable = Text(renderable)
        if isinstance(renderable, Text):
            renderable = in_characters(renderable, self.spelling)
            room = options or self.options
            if not (renderable.no_wrap or room.no_wrap):
                renderable = folded(renderable, room.max_width)
        return super().render(renderable, options)


def in_characters(text: Text, encoding: str) -> Text:
    """Return a text in characters that an encoding has, and of which none commands a terminal, its styles kept."""
    pieces = [char if char in "\n\t" else spelled(visible(char), encoding) for char in text.plain]
    if len(pieces) == sum(map(len, pieces)) and "".join(pieces) == text.plain:
        return text
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    found = text.copy()
    found.plain = "".join(pieces)
    found.spans = [Span(starts[span.start], starts[min(span.end, len(pieces))], span.style) for span in text.spans]
    return found


READABLE = 16  # characters: a column that is to fold its text is given as many, if it has as many
WORD = 26  # characters: a longer word may be folded

VALUES = 28  # the same of what is said beside a name


class Columns(Table):
    """A table whose columns are as wide as their words. Where there is no room for that one column, if one was named, goes under its row;
    and where there is still none it becomes a list: a block a row, "head: cell" a line.
    """

    under: int | None = None
    said: str = ""  # before what goes under its row

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it as wide as there is room."""
        width = options.max_width
        spelling = console.spelling if isinstance(console, Folding) else "utf-8"
        texts = [[in_characters(_text(cell), spelling) for cell in column._cells] for column in self.columns]
        heads = [spelled(str(column.header), spelling) if self.show_header else "" for column in self.columns]
        whole = list(range(len(self.columns)))
        widths = self._widths(texts, heads, whole, width)
        if widths is not None:
            for column, wide, (counted, drawn) in zip(self.columns, widths, self._pads(), strict=True):
                column.width = wide + drawn - counted
            yield from super().__rich_console__(console, options)
            return
        beside = [index for index in whole if index != self.under]
        widths = self._widths(texts, heads, beside, width) if self.under is not None else None
        if widths is not None:
            yield from self._over(texts, heads, beside, widths)
        else:
            yield from self._listed(texts, heads)

    def _pads(self) -> list[tuple[int, int]]:
        """How many blanks rich counts in the width of each column, and how many it draws; before 14 it counted more."""
        _, right, _, left = self.padding
        last = len(self.columns) - 1
        inner = max(0, left - right) if self.collapse_padding else left
        drawn = [(inner if index else 0) + (right if index < last else 0) for index in range(last + 1)]
        return [(self._get_padding_width(index), pads) for index, pads in enumerate(drawn)]

    def _over(self, texts: list[list[Text]], heads: list[str], beside: list[int], widths: list[int]) -> RenderResult:
        """The rows, each above what one of their columns says."""
        if any(heads):
            yield self._row([Text(heads[index], QUIET) for index in beside], beside, widths)
        for row in zip(*texts, strict=True):
            yield self._row([row[index] for index in beside], beside, widths)
            if self.under is not None and row[self.under].plain:
                yield Padding(Text.assemble(self.said, row[self.under], style=QUIET), (0, 0, 0, 2))

    def _row(self, cells: list[Text], beside: list[int], widths: list[int]) -> Table:
        row = Columns(box=None, padding=self.padding, pad_edge=False, show_header=False)
        for index, width in zip(beside, widths, strict=True):
            column = self.columns[index]
            row.add_column(min_width=width, justify=column.justify, style=column.style, no_wrap=column.no_wrap, overflow="fold")
        row.add_row(*cells)
        return row

    def _listed(self, texts: list[list[Text]], heads: list[str]) -> RenderResult:
        """The rows as blocks."""
        if heads[0]:
            yield Text(heads[0], QUIET)
        for first, *rest in zip(*texts, strict=True):
            if first.plain:
                first.stylize(self.columns[0].style)
                yield first
            for name, cell in zip(heads[1:], rest, strict=True):
                if cell.plain:
                    head = Text(f"{name.strip()}: ", QUIET) if name else Text()
                    yield Padding(head.append_text(cell), (0, 0, 0, 2))

    def _widths(self, texts: list[list[Text]], heads: list[str], which: list[int], width: int) -> list[int] | None:
        """How wide these columns are, in characters; None where there is no room to read them."""
        least = VALUES if len(which) == 2 and not self.show_header else READABLE
        lines = {index: [heads[index], *(line for text in texts[index] for line in text.plain.split("\n"))] for index in which}
        natural = {index: max([self.columns[index].min_width or 0, *map(cell_len, lines[index])]) for index in which}
        words = {index: max((cell_len(word) for line in lines[index] for word in line.split()), default=0) for index in which}
        needed = {
            index: wide if self.columns[index].no_wrap else min(wide, max(least, min(words[index], WORD)))
            for index, wide in natural.items()
        }
        free = width - sum(needed.values()) - self.padding[1] * (len(which) - 1)
        lacking = {index: natural[index] - needed[index] for index in which}
        if free < 0:
            return None
        for done, index in enumerate(sorted(which, key=lacking.__getitem__)):  # what lacks little is given all of it
            given = min(lacking[index], free // (len(which) - done))
            needed[index], free = needed[index] + given, free - given
        return [needed[index] for index in which]


class Command:
    """A command that a person can paste, however narrow the terminal is. lead: before it, on the first line."""

    def __init__(self, words: str, *, lead: str = "", style: str = "") -> None:
        self._words, self._lead, self._style = words, lead, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Fold it as a shell reads it."""
        first, *rest = command(self._words, options.max_width, len(self._lead))
        yield Text.assemble((self._lead, QUIET), (first, self._style))
        for line in rest:
            yield Text(line, self._style)


def _text(cell: RenderableType) -> Text:
    return cell.copy() if isinstance(cell, Text) else Text(str(cell))


def table(*heads: str, under: str = "", said: str = "") -> Table:
    """Return a table without lines, its columns two spaces apart. under: the column that goes under its row where there is no room, said:
    what is said before it there."""
    found = Columns(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(heads), header_style=QUIET)
    for head in heads:
        found.add_column(head, overflow="fold")
    found.under, found.said = heads.index(under) if under else None, said
    return found


def pairs(*, style: str = QUIET) -> Table:
    """Return a table of names, in one style, and of what there is to say of each."""
    found = Columns(box=None, padding=(0, 2), collapse_padding=True, pad_edge=False, show_header=False, show_footer=False, show_edge=False)
    found.add_column(style=style, no_wrap=True)
    found.add_column(overflow="fold")
    return found


@contextmanager
def progress(what: str, *, file: IO[str]) -> Iterator[Callable[[str], None]]:
    """Show what is running, and for how long, on a terminal only; what is yielded says that something else is now."""
    if not file.isatty():
        yield lambda now: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = console_for(file)
    words = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    spinner = SpinnerColumn("line" if console.options.ascii_only else "dots")
    with Progress(spinner, words, TimeElapsedColumn(), console=console, transient=True) as shown:
        task = shown.add_task(clean(what))
        yield lambda now: shown.update(task, description=clean(now))


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
    if not file.isatty() or not items:
        return items
    if len(items) == 1:
        return _one(items[0], what, file)
    from rich.progress import track as bar

    return bar(items, what, console=console_for(file), transient=True)


def _one(item: T, what: str, file: IO[str]) -> Iterator[T]:
    """Yield one item, and say what is running until the next one is asked for."""
    with progress(what, file=file):
        yield item
