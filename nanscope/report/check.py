"""The check in a terminal: what training could reach first, each hazard with its line, its trigger and its fix.

● step 4 · 46 runs   3 hazards, 2 of them reachable in training.

  reachable in training
    exp   coef_1 = torch.exp(log_importance_weights)   grpo_trainer.py:3095
          old_per_token_logps[3, 27], at a masked token, falls by 88.7 nats: the gradient of masked tokens is not finite, and the loss …
          fix: fill log_importance_weights with 0 where completion_mask excludes it, before exp   ✓ leaves the healthy step as it is

  guarded
    mask.sum().clamp(min=1.0)   grpo_trainer.py:3105
    without it (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0) in line 3105 dies: all of mask is 0
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import IO

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.causes import Cause
from nanscope.foresight.hazard import Check
from nanscope.foresight.pushes import Severity
from nanscope.replay.edits import EDITS
from nanscope.report.check_lines import ToldLine, fixed_of, guards_of, head_of, healed_of, lines_of
from nanscope.report.clean import clean
from nanscope.report.console import DOUBT, HARM, PROVEN, QUIET, STRONG, WIDTH, Command, pairs, plain, show

STYLE = {Severity.REACHABLE: HARM, Severity.BROKEN_DATA: DOUBT, Severity.THEORY: QUIET}
STATES = {"proven": PROVEN, "doubt": DOUBT, "harm": HARM, "quiet": QUIET}


def render_check(check: Check, width: int = WIDTH) -> str:
    """Return a check as plain text."""
    return plain(_page(check), width)


def print_check(check: Check, snapshot: str | None = None, *, file: IO[str]) -> None:
    """Print a check, and what to ask next. snapshot: the file that was checked, None where it was a function."""
    show(Group(_page(check), *_next(check, snapshot)), file=file)


def _next(check: Check, snapshot: str | None) -> list[RenderableType]:
    """The replay of the first fix where the step was bad; else why the first hazard that training reaches kills."""
    if snapshot is not None and check.healed:
        fixes = [hazard.fix.id for hazard in check.hazards if hazard.fix is not None and hazard.fix.id in EDITS]
        edit = f" --edit {fixes[0]}" if fixes else ""
        return [Text(""), Command(f"nanscope replay {shlex.quote(clean(snapshot))}{edit}", lead="  next  ")]
    causes = [hazard.cause for hazard in check.reachable[:1] if hazard.cause is not Cause.UNKNOWN]
    return [Text(""), Command(f"nanscope explain {causes[0]}", lead="  why   ")] if causes else []


def _page(check: Check) -> RenderableType:
    style = HARM if check.reachable else PROVEN if check.complete else DOUBT
    parts: list[RenderableType] = [Text.assemble(("● ", style), (head_of(check), STRONG), f"   {check.sentence}")]
    if check.healed:
        parts.append(Text(f"  {healed_of(check)}", QUIET))
    for severity in Severity:
        parts += _listed(severity.words, STYLE[severity], [_told(line) for line in lines_of(check, severity)])
    guards = [Text.assemble((guard.code, STRONG), f"   {guard.where}\n  {guard.without}") for guard in guards_of(check)]
    parts += _listed("guarded", PROVEN, guards)
    parts += _listed("settled when it was recorded", QUIET, [Text(words) for words in fixed_of(check)])
    return Group(*parts)


def _listed(title: str, style: str, told: Sequence[RenderableType]) -> list[RenderableType]:
    return [Text(""), Text(f"  {title}", style), *(Padding(one, (0, 4)) for one in told)] if told else []


def _told(line: ToldLine) -> RenderableType:
    """A line, and how it dies."""
    told = pairs(style="")
    told.add_row(line.op, Text.assemble((line.code, STRONG), f"   {line.where}"))
    for one in line.triggers:
        told.add_row("", f"{one.trigger}: {one.spoils}")
        if one.headroom:
            told.add_row("", f"  now: {one.headroom}")
        if one.fix:
            told.add_row("", Text.assemble("  fix: ", one.fix, "   ", (one.proof, STATES[one.state])))
        if one.others:
            told.add_row("", Text(f"  also: {one.others}", QUIET))
    told.add_row("", "")
    return told
