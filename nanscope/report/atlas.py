"""The atlas as people read it, in a terminal and as a page.

trl 1.16.0 · 28 paths · a fault at a masked token
          policy             old
          −inf NaN  +200     −inf NaN  +200
  grpo;  dapo;  bnpo;  dr_grpo;  luspo
    A>0   ·    LM   M        M    LM   M
    A<0   ·    LM   LM       LM   LM   LM
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanscope.atlas.cells import Atlas
from nanscope.atlas.harm import LEGEND, Harm
from nanscope.atlas.verification import Verification
from nanscope.report.console import HARM, QUIET, STRONG, plain, show
from nanscope.report.render import choose
from nanscope.report.sheets import Column, FaultBlock, Sheet, look, sheets, spans
from nanscope.report.takeaways import takeaways, verification_words
from nanscope.report.template import fill
from nanscope.snapshot.files import write_whole
from nanscope.text import count
from nanscope.version import __version__

COLUMNS = (
    "A column is one value in one tensor: −inf, NaN, or what makes the log-ratio +200 or −200 (policy − old, ref − policy, old − rollout).",
    "A=0: an old log-prob that makes the log-ratio +200, in a row with advantage 0. row, batch: a row or a batch without a valid token.",
    "A row has three counted tokens: the mean of a log-ratio of 200 over it is 67, which exp survives.",
    "†: a clamp that the framework does not have; nanscope adds it to show what it would do.",
    "Paths that answer alike share a line. Columns in which nothing happens on any path of a framework are left out.",
)

_LOOK_OF_LETTER = {"·": "clean", "L": "loud", "V": "silent", "M": "silent", "≠": "changed"}

_MARGIN = "      "  # before the cells
_SIGNS = ("  A>0 ", "  A<0 ")
_STYLES = {"clean": QUIET, "changed": "yellow", "loud": "red", "silent": HARM}


def print_atlas(atlas: Atlas, verification: Verification | None = None, *, file: IO[str]) -> None:
    """Print the atlas, and what verifying it gave."""
    show(_shown(atlas, verification), file=file)


def print_verification(verification: Verification, *, file: IO[str]) -> None:
    """Print how the atlas compares with the installed frameworks."""
    show(_verification(verification), file=file)


def render_text(atlas: Atlas, verification: Verification | None = None) -> str:
    """Return the atlas as plain text."""
    return plain(_shown(atlas, verification))


def _shown(atlas: Atlas, verification: Verification | None) -> RenderableType:
    return _atlas(atlas) if verification is None else Group(_atlas(atlas), _verification(verification))


def _atlas(atlas: Atlas) -> RenderableType:
    parts: list[RenderableType] = [*_legend(), Text("")]
    for sheet in sheets(atlas):
        for block in sheet.blocks:
            parts += [*_drawn(sheet, block), Text("")]
    parts += [Padding(Text(sentence), (0, 2, 1, 2)) for sentence in takeaways(atlas)]
    return Group(*parts)


def _legend() -> Iterator[RenderableType]:
    codes = Table.grid(padding=(0, 2))
    for code, words in LEGEND.items():
        codes.add_row(Text(code, _STYLES[_LOOK_OF_LETTER[code]]), Text(words, QUIET))
    yield Padding(codes, (0, 2))
    for words in COLUMNS:
        yield Padding(Text(words, QUIET), (0, 2))


def _drawn(sheet: Sheet, block: FaultBlock) -> Iterator[RenderableType]:
    heading = Text.assemble(
        (f"{sheet.framework} {sheet.version}", STRONG), (f" · {count(sheet.paths, 'path')} · ", QUIET), (block.title, STRONG)
    )
    if not block.columns:
        yield heading.append(": all clean", "green")
        return
    yield heading
    yield _Cells(block)
    for pattern in block.patterns:
        if pattern.clean:
            yield _Names(pattern.names, "clean: ")


@dataclass(frozen=True, slots=True)
class _Cells:
    """What happens on each path, a column a fault: all beside each other, or, where they do not fit, one part of them after another."""

    block: FaultBlock

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = _widths(self.block)
        first = 0
        while first < len(widths):
            end = first + 1
            while end < len(widths) and len(_MARGIN) + sum(widths[first : end + 1]) <= options.max_width + 1:  # a cell ends in a space
                end += 1
            yield from self._part(slice(first, end), widths[first:end])
            first = end

    def _part(self, part: slice, widths: Sequence[int]) -> Iterator[RenderableType]:
        yield _heads(self.block.columns[part], widths)
        for pattern in self.block.patterns:
            if pattern.clean:
                continue
            yield _Names(pattern.names)
            if pattern.plus == pattern.minus:
                yield _line(_MARGIN, pattern.plus[part], widths)
            else:
                yield _line(_SIGNS[0], pattern.plus[part], widths)
                yield _line(_SIGNS[1], pattern.minus[part], widths)


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of paths, broken between them and not inside them where that is possible."""

    names: tuple[str, ...]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = ", ".join(name.replace(" ", "\0") for name in self.names)
        lines = _wrapped(self.title + text, options.max_width, "  ", "  ").splitlines()
        wide = (_wrapped(line.replace("\0", " "), options.max_width, "", "      ") for line in lines)
        yield Text("\n".join(wide), "green" if self.title else "")


def _wrapped(text: str, width: int, first: str, others: str) -> str:
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False)


def _widths(block: FaultBlock) -> list[int]:
    """Return how wide each column is: its head, its cells, and under a long name of a group the last one a little more."""
    rows = [cells for pattern in block.patterns for cells in (pattern.plus, pattern.minus)]
    widths = [1 + max(len(column.head), *(len(row[at].code) for row in rows)) for at, column in enumerate(block.columns)]
    for group, _ in spans(block.columns):
        inside = [at for at, column in enumerate(block.columns) if column.group == group]
        widths[inside[-1]] += 1 + max(0, len(group) - sum(widths[at] for at in inside))
    return widths


def _heads(columns: Sequence[Column], widths: Sequence[int]) -> Text:
    """Two lines: groups over the first of their columns, and kinds."""
    groups, kinds = _MARGIN, _MARGIN
    for column, width in zip(columns, widths, strict=True):
        first = groups.strip() == "" or not groups.rstrip().endswith(column.group)
        groups = groups.ljust(len(kinds)) + (column.group if first else "")
        kinds += column.head.ljust(width)
    return Text(f"{groups.rstrip()}\n{kinds.rstrip()}", QUIET)


def _line(margin: str, cells: Sequence[Harm], widths: Sequence[int]) -> Text:
    text = Text(margin, QUIET)
    for harm, width in zip(cells, widths, strict=True):
        text.append(harm.code.ljust(width), _STYLES[look(harm)])
    return text


def _verification(verification: Verification) -> RenderableType:
    parts: list[RenderableType] = [Text("against the frameworks themselves", STRONG)]
    parts += [Padding(Text(words), (0, 2)) for words in verification_words(verification)]
    return Group(*parts)


def render_atlas(atlas: Atlas, path: Path, verification: Verification | None = None) -> None:
    """Write the atlas; the suffix chooses the form, and a reader never sees half a file.

    Raises NanscopeError for a suffix that no renderer has, OSError if the file cannot be written.
    """
    write_whole(path, choose(RENDERERS, path)(atlas, verification).encode())


def render_json(atlas: Atlas, verification: Verification | None = None) -> str:
    """Return the atlas as JSON, with the sentences and, if it was verified, with what that gave."""
    data = atlas.to_json() | {"takeaways": takeaways(atlas)}
    if verification is not None:
        data["verification"] = verification.to_json()
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def render_html(atlas: Atlas, verification: Verification | None = None) -> str:
    """Return the atlas as one self-contained page."""
    return fill(
        "atlas.html",
        ("page.css", "atlas.css"),
        version=__version__,
        paths=len(atlas.paths),
        cells=sum(len(row) for row in atlas.cells),
        legend=[(code, words, _LOOK_OF_LETTER[code]) for code, words in LEGEND.items()],
        columns=COLUMNS,
        sentences=takeaways(atlas),
        sheets=[(sheet, [(block, spans(block.columns), list(_rows(block))) for block in sheet.blocks]) for sheet in sheets(atlas)],
        verified=list(verification_words(verification)) if verification is not None else [],
    )


def _rows(block: FaultBlock) -> Iterator[tuple[list[tuple[str, str]], list[tuple[str, str]]]]:
    """Yield (names, each as key and settings; cells, each as text and look)."""
    for pattern in block.patterns:
        names = [name.partition(" · ") for name in pattern.names]
        cells = [_cell(plus, minus) for plus, minus in zip(pattern.plus, pattern.minus, strict=True)]
        yield [(key, settings) for key, _, settings in names], cells


def _cell(plus: Harm, minus: Harm) -> tuple[str, str]:
    """Return text and look: the worse of the two signs, and silent is the worst."""
    text = plus.code if plus == minus else f"{plus.code}/{minus.code}"
    looks = {look(plus), look(minus)}
    return text, next(look for look in ("silent", "loud", "changed", "clean") if look in looks)


RENDERERS: dict[str, Callable[[Atlas, Verification | None], str]] = {".html": render_html, ".txt": render_text, ".json": render_json}
