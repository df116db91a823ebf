"""A comparison in a terminal: the sentence, then what came in, the calls, the history, and what stood around.

● what came in differs (old_logps), and torch.exp(log_ratio) (loss.py:12) is the first that it changes
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.compare.model import ComparedCall, Comparison, Difference
from nanscope.report.clean import clean, numeral
from nanscope.report.console import HARM, PROVEN, QUIET, STRONG, pairs, show, table
from nanscope.text import show_index

LISTED = 12


def print_comparison(found: Comparison, *, file: IO[str]) -> None:
    """Print two steps or runs side by side."""
    show(Group(*_parts(found)), file=file)


def _parts(found: Comparison) -> Iterator[RenderableType]:
    yield Text.assemble(("● ", PROVEN if found.same else HARM), (clean(found.sentence), STRONG))
    yield Text("")
    facts = pairs()
    for name, call in (("first", found.first), ("born", found.born), ("parted", found.parted)):
        if call is not None and (name == "first" or call != found.first):
            facts.add_row(name, _call(call))
    if found.calls:
        facts.add_row("calls", f"{found.alike} of {found.calls} give the same bits")
    if found.loss_a is not None or found.loss_b is not None:
        facts.add_row("loss", f"{clean(found.a)} {numeral(found.loss_a)} · {clean(found.b)} {numeral(found.loss_b)}")
    for name, calls in ((found.a, found.only_a), (found.b, found.only_b)):
        if calls:
            facts.add_row(f"only {clean(name, 24)}", ", ".join(clean(call, 80) for call in calls))
    yield Padding(facts, (0, 2))
    differing = [leaf for leaf in found.leaves if leaf.apart is not None or leaf.note]
    if differing:
        yield Text("")
        shown = table("what came in", "differ", "largest Δ", "first at", clean(found.a, 24), clean(found.b, 24))
        for leaf in differing[:LISTED]:
            name = clean(f"{leaf.name} {leaf.role}".strip(), 60)
            shown.add_row(name, *(_apart(leaf.apart) if leaf.apart is not None else (clean(leaf.note, 80), "", "", "", "")))
        yield Padding(shown, (0, 2))
    if found.history:
        yield Text("")
        shown = table("history", "first at step", clean(found.a, 24), clean(found.b, 24), "steps that differ")
        for line in found.history[:LISTED]:
            shown.add_row(clean(line.name, 40), str(line.step), _value(line.a), _value(line.b), f"{line.differ} of {line.steps}")
        yield Padding(shown, (0, 2))
    if found.surroundings:
        yield Text("")
        shown = table("around", clean(found.a, 24), clean(found.b, 24))
        for name, left, right in found.surroundings:
            shown.add_row(clean(name, 60), clean(left, 60), clean(right, 60))
        yield Padding(shown, (0, 2))


def _call(call: ComparedCall) -> Text:
    words = "on other operands" if call.fed else "on the same operands"
    told = Text.assemble((clean(call.code, 120), STRONG), (f"   {clean(call.where, 80)}, {words}", QUIET))
    if call.settings:
        told.append(f"\n{clean(call.settings, 160)}")
    if call.apart is not None:
        elements, largest, at, left, right = _apart(call.apart)
        told.append(f"\n{elements} differ, largest Δ {largest}, first at {at}: {left} and {right}")
    return told


def _apart(gap: Difference) -> tuple[str, str, str, str, str]:
    largest = f"{numeral(gap.largest)} ({numeral(gap.relative)} of the largest)"
    return f"{gap.elements:,} of {gap.of:,}", largest, show_index(gap.index), numeral(gap.a), numeral(gap.b)


def _value(value: object) -> str:
    return numeral(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else "–" if value is None else clean(value, 60)
