"""A sheet: a sentence, and under it tables of figures; what a result is drawn as that has no page of another form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.report.console import DOUBT, HARM, PROVEN, QUIET, STRONG, plain, table
from nanscope.report.template import fill
from nanscope.version import __version__

STYLES = {"harm": HARM, "doubt": DOUBT, "proven": PROVEN, "quiet": QUIET}


@dataclass(frozen=True, slots=True)
class FigureRow:
    """A line of a table, every cell clean text. part: of the largest in its table, for a bar, 0 where there is none. strong: a total."""

    cells: tuple[str, ...]
    part: float = 0.0
    strong: bool = False


@dataclass(frozen=True, slots=True)
class FigureTable:
    """One table of the report. title: what its rows are. more: how many are left out. note: how its figures were made.
    words: its cells are sentences, and not figures, and may be broken."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[FigureRow, ...]
    more: int = 0
    note: str = ""
    words: bool = False


@dataclass(frozen=True, slots=True)
class FigureSheet:
    """A sentence and its tables, all of it clean text. what: kind of result. head: of what. tone: "harm", "doubt", "proven" or "quiet".
    data: the same for programs, as JSON can hold it."""

    what: str
    head: str
    sentence: str
    tone: str
    tables: tuple[FigureTable, ...]
    data: Mapping[str, Any] = field(default_factory=dict)


def sheet_html(sheet: FigureSheet) -> str:
    """Return it as a page, complete in itself."""
    tables = [part for part in sheet.tables if part.rows]
    named = {"what": sheet.what, "head": sheet.head, "sentence": sheet.sentence, "tone": sheet.tone}
    return fill("sheet.html", ("page.css", "precision.css"), version=__version__, tables=tables, **named)


def sheet_text(sheet: FigureSheet) -> str:
    """Return it as plain text."""
    return plain(sheet_shown(sheet))


def sheet_shown(sheet: FigureSheet) -> RenderableType:
    """Return it as a terminal shows it; a table without rows is left out."""
    shown: list[RenderableType] = [Text.assemble(("● ", STYLES[sheet.tone]), (sheet.head, STRONG), f"   {sheet.sentence}")]
    for part in (part for part in sheet.tables if part.rows):
        drawn = table(*part.heads)
        for row in part.rows:
            drawn.add_row(Text(row.cells[0], STRONG if row.strong else ""), *map(Text, row.cells[1:]))
        shown += [Text(""), Padding(drawn, (0, 2))]
        shown += [Padding(Text(f"… {part.more} more", QUIET), (0, 2))] if part.more else []
    return Group(*shown)
