"""The causes on the terminal, listed and explained."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanscope.causes import CAUSES, Cause

if TYPE_CHECKING:
    pass

from nanscope.report.console import QUIET, STRONG, console_for


def print_causes(*, file: IO[str]) -> None:
    """Print every cause that is told apart, with a line about it."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for cause, info in CAUSES.items():
        if cause is not Cause.UNKNOWN:
            table.add_row(Text(cause, STRONG), info.title)
    console = console_for(file)
    console.print(table)
    console.print(Text("\nnanscope explain CAUSE tells more", QUIET))


def print_explanation(cause: Cause, *, file: IO[str]) -> None:
    """Print the long form of a cause."""
    from nanscope.verdict.explain import EXPLANATIONS

    explanation = EXPLANATIONS[cause]
    console = console_for(file)
    console.print(Text.assemble((cause, STRONG), f"   {CAUSES[cause].title}"))
    for title, text in (("", explanation.mechanism), ("what helps", explanation.right), ("what does not", explanation.wrong)):
        if title:
            console.print(Text(f"\n{title}", QUIET))
        console.print(Padding(Text(text), (0, 2)))
        if not title:
            for name, snippet in (("it fails like this", explanation.broken), ("and is mended like this", explanation.mended)):
                console.print(Text(f"\n{name}", QUIET))
                console.print(Padding(Text(snippet.rstrip(), no_wrap=True, overflow="ignore"), (0, 4)))
    if explanation.links:
        console.print(Text("\nseen in", QUIET))
        for link in explanation.links:
            console.print(Padding(Text(link, no_wrap=True, overflow="ignore"), (0, 2)))
