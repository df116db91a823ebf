"""The list of losses and edits on the terminal."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanscope.report.console import HARM, QUIET, STRONG, console_for

if TYPE_CHECKING:
    from nanscope.replay.variants import KnownLoss, Variants


def print_variants(found: Variants, detailed: bool, *, file: IO[str]) -> None:
    """Print the losses, one line each or with all their settings, and the edits."""
    console = console_for(file)
    if detailed:
        first: dict[object, str] = {}  # what was shown already, and with which loss
        for loss in found.losses:
            console.print(_loss(loss, first))
    else:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=QUIET)
        for head in ("loss", "version", "where, and what is wrong there"):
            table.add_column(head, overflow="fold", no_wrap=head != "where, and what is wrong there")
        for loss in found.losses:
            table.add_row(
                Text(loss.key, STRONG), loss.version, Text("\n").join([Text(loss.site, QUIET), *(Text(f"⚠ {f}") for f in loss.flaws)])
            )
        console.print(table)
        console.print(
            Text("\nnanscope variants verl shows the settings; nanscope replay FILE --as verl.vanilla:clip_ratio=0.3 uses them", QUIET)
        )
    if found.edits:
        edits = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=QUIET)
        for head in ("edit of the recorded step", "short", "what it does"):
            edits.add_column(head, overflow="fold", no_wrap=head != "what it does")
        for edit in found.edits:
            edits.add_row(Text(edit.id, STRONG), edit.short or "", edit.what + ("  (tempting, and wrong)" if edit.control else ""))
        console.print(Text(""))
        console.print(edits)
        console.print(Text("\nnanscope replay FILE --edit clamp:10 tries one at the origin", QUIET))


def _loss(loss: KnownLoss, first: dict[object, str]) -> Padding:
    """A loss with its settings and clamps; those that another one has alike are not repeated."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column(overflow="fold")
    own = tuple(f"{knob.name}={knob.default!r}" for knob in loss.settings if not knob.by_key)
    fixed = [f"{knob.name}={knob.default!r}" for knob in loss.settings if knob.by_key]
    table.add_row("where", f"{loss.site}, in {loss.version}")
    like = first.setdefault(own, loss.key)
    table.add_row("settings", ", ".join(own) if like == loss.key else f"as {like}")
    if fixed:
        table.add_row("by its key", ", ".join(fixed))
    like = first.setdefault(loss.clamps, loss.key)
    shown = [f"{clamp.name}   {clamp.own}; {clamp.unit}" for clamp in loss.clamps] if like == loss.key else [f"as {like}"]
    for index, words in enumerate(shown):
        table.add_row("clamps" if index == 0 else "", words)
    for flaw in loss.flaws:
        table.add_row(Text("flaw", HARM), flaw)
    body = Table.grid()
    body.add_row(Text(loss.key, STRONG))
    body.add_row(Padding(table, (0, 2)))
    return Padding(body, (0, 0, 1, 0))
