"""The check in a terminal: what training could reach first, each hazard with its line, its trigger and its fix.

● step 4 · 46 runs   3 hazards, 2 of them reachable in training

  reachable in training
    exp   coef_1 = torch.exp(log_importance_weights)   grpo_trainer.py:3095
          old_per_token_logps[3, 27], at a masked token, falls by 88.7: the gradient of masked tokens is not finite, silently
          fix: fill log_importance_weights with 0 where completion_mask excludes it, before exp   ✓ leaves the healthy step as it is
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import IO

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.foresight.hazard import Check, Hazard
from nanscope.foresight.pushes import Severity
from nanscope.report.clean import clean
from nanscope.report.console import DOUBT, HARM, PROVEN, QUIET, STRONG, WIDTH, pairs, plain, show
from nanscope.text import count, is_exact, is_spared, number

STYLE = {Severity.REACHABLE: HARM, Severity.BROKEN_DATA: DOUBT, Severity.THEORY: QUIET}
HALF = ("bfloat16", "float16")
OTHERS = 3  # further triggers that are told of one line


def render_check(check: Check, width: int = WIDTH) -> str:
    """Return a check as plain text."""
    return plain(_page(check), width)


def print_check(check: Check, *, file: IO[str]) -> None:
    """Print a check."""
    show(_page(check), file=file)


def _page(check: Check) -> RenderableType:
    style = HARM if check.reachable else PROVEN
    parts: list[RenderableType] = [
        Text.assemble(("● ", style), (f"step {check.step} · {count(check.runs, 'run')}", STRONG), f"   {check.sentence}")
    ]
    if check.healed:
        parts.append(Text(f"  the step was bad; ordinary numbers were put in: {clean(', '.join(dict.fromkeys(check.healed)))}", QUIET))
    for severity in Severity:
        lines = [list(hazards) for _, hazards in groupby((h for h in check.hazards if h.severity is severity), key=lambda h: h.where)]
        if lines:
            parts += [Text(""), Text(f"  {severity.words}", STYLE[severity]), *(Padding(_told(hazards), (0, 4)) for hazards in lines)]
    parts += _listed(
        "guarded", PROVEN, [Text.assemble((clean(g.expression), STRONG), f"   {clean(g.where)}\n{clean(g.words)}") for g in check.guards]
    )
    parts += _listed("settled when it was recorded", QUIET, [Text(clean(words)) for words in check.fixed])
    return Group(*parts)


def _listed(title: str, style: str, told: Sequence[Text]) -> list[RenderableType]:
    return [Text(""), Text(f"  {title}", style), *(Padding(one, (0, 4)) for one in told)] if told else []


def _told(hazards: Sequence[Hazard]) -> RenderableType:
    """The hazards of one line."""
    told = pairs(style="")
    head = hazards[0]
    told.add_row(
        clean("input" if head.origin.op == "cut" else head.origin.op), Text.assemble((clean(head.line), STRONG), f"   {clean(head.where)}")
    )
    for hazard in hazards:
        told.add_row("", clean(f"{hazard.trigger.words}{_dtype(hazard)}: {hazard.spoils.words}"))
        if hazard.fix is not None:
            told.add_row("", Text.assemble("  fix: ", clean(hazard.fix.label), "   ", _proof(hazard)))
        if hazard.others:
            more = len(hazard.others) - OTHERS
            told.add_row("", Text(f"  also: {clean('; '.join(hazard.others[:OTHERS]))}{f'; and {more} more' if more > 0 else ''}", QUIET))
    told.add_row("", "")
    return told


def _dtype(hazard: Hazard) -> str:
    return f" ({hazard.dtype})" if hazard.dtype in HALF and hazard.trigger.kind != "dtype" else ""


def _proof(hazard: Hazard) -> Text:
    fix = hazard.fix
    if fix is None or not fix.executed:
        return Text("advised, not run", QUIET)
    if not fix.works:
        return Text("does not help", HARM)
    if hazard.change is None:
        return Text("✓", PROVEN)
    if is_exact(hazard.change):
        return Text("✓ leaves the healthy step as it is", PROVEN)
    style = PROVEN if is_spared(hazard.change) else DOUBT
    return Text(f"✓ changes the healthy gradient by {number(100 * hazard.change)} %", style)
