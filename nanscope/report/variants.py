"""The list of losses and edits on the terminal."""

from __future__ import annotations

from typing import IO

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanscope.replay.variants import KnownLoss, Variants
from nanscope.report.console import HARM, QUIET, STRONG, pairs, show, table


def print_variants(found: Variants, detailed: bool, *, file: IO[str]) -> None:
    """Print the losses, one line each or with all their settings, and the edits."""
    parts: list[RenderableType] = []
    if detailed:
        first: dict[object, str] = {}  # what was shown already, and with which loss
        parts += [_loss(loss, first) for loss in found.losses]
    else:
        losses = _table("loss", "version", "where, and what is wrong there")
        for loss in found.losses:
            lines = [Text(loss.site, QUIET), *(Text(f"⚠ {flaw}") for flaw in loss.flaws)]
            losses.add_row(Text(loss.key, STRONG), loss.version, Text("\n").join(lines))
        hint = "nanscope replay --list verl shows the settings; nanscope replay FILE --as verl.vanilla:clip_ratio=0.3 uses them"
        parts += [losses, Text(f"\n{hint}", QUIET)]
    if found.edits:
        edits = _table("edit of the recorded step", "short", "what it does")
        for edit in found.edits:
            edits.add_row(Text(edit.id, STRONG), edit.short or "", edit.what + ("  (tempting, and wrong)" if edit.control else ""))
        parts += [Text(""), edits, Text("\nnanscope replay FILE --edit clamp:10 tries one at the origin", QUIET)]
    show(Group(*parts), file=file)


def _table(*heads: str) -> Table:
    """A table of which only the last column folds."""
    found = table(*heads)
    for column in found.columns[:-1]:
        column.no_wrap = True
    return found


def _loss(loss: KnownLoss, first: dict[object, str]) -> Padding:
    """A loss with its settings and clamps; those that another one has alike are not repeated."""
    told = pairs()
    own = tuple(f"{knob.name}={knob.default!r}" for knob in loss.settings if not knob.by_key)
    fixed = [f"{knob.name}={knob.default!r}" for knob in loss.settings if knob.by_key]
    told.add_row("where", f"{loss.site}, in {loss.version}")
    like = first.setdefault(own, loss.key)
    told.add_row("settings", ", ".join(own) if like == loss.key else f"as {like}")
    if fixed:
        told.add_row("by its key", ", ".join(fixed))
    like = first.setdefault(loss.clamps, loss.key)
    shown = [f"{clamp.name}   {clamp.own}; {clamp.unit}" for clamp in loss.clamps] if like == loss.key else [f"as {like}"]
    for index, words in enumerate(shown):
        told.add_row("clamps" if index == 0 else "", words)
    for flaw in loss.flaws:
        told.add_row(Text("flaw", HARM), flaw)
    return Padding(Group(Text(loss.key, STRONG), Padding(told, (0, 2))), (0, 0, 1, 0))
