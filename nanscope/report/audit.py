"""The audit in a terminal: first what the loss is, then what changes it, then the same step under every reduction.

● step 412 · 2 ranks · 1000 tokens in 8 rows   the loss is the token mean, 0.4: 1 finding changes it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.audit import Audit, Effect, Finding, Reduced, Sure
from nanscope.audit.weights import Scheme
from nanscope.report.clean import clean
from nanscope.report.console import HARM, PROVEN, QUIET, STRONG, WIDTH, pairs, plain, show, table
from nanscope.text import count, number

USES = 3  # names beside a reduction
STYLE = {Effect.CHANGES: HARM, Effect.RISK: STRONG, Effect.NOTE: QUIET}


def render_audit(audit: Audit, width: int = WIDTH) -> str:
    """Return an audit as plain text."""
    return plain(_page(audit), width)


def print_audit(audit: Audit, *, file: IO[str]) -> None:
    """Print an audit."""
    show(_page(audit), file=file)


def _page(audit: Audit) -> RenderableType:
    parts: list[RenderableType] = [_head(audit)]
    if audit.findings:
        parts += [Text(""), _findings(audit.findings)]
    if any(finding.effect is not Effect.NOTE for finding in audit.findings) and audit.reductions:
        parts += [Text(""), _reductions(audit)]
        floors = _floors(audit)
        parts += [Text(""), Padding(floors, (0, 2))] if floors else []
    return Group(*parts)


def _head(audit: Audit) -> Text:
    where = [f"step {audit.step}"] * (audit.step is not None) + [count(audit.ranks, "rank")] * (audit.ranks > 1)
    if len(audit.parts) > audit.ranks:
        where.append(count(len(audit.parts), "micro-batch"))
    where.append(f"{count(audit.tokens, 'token')} in {count(audit.rows, 'row')}")
    style = HARM if audit.changes_loss else PROVEN
    return Text.assemble(("● ", style), (" · ".join(where), STRONG), f"   {_what(audit)}")


def _what(audit: Audit) -> str:
    """What the loss is, and whether that is all there is to say."""
    value = audit.recorded if audit.loss is None else audit.loss
    is_it = f"the loss is {clean(audit.reduction)}" if audit.reduction else "which reduction the loss had is not known"
    is_it += f": {number(value)}" if value is not None else ""
    if value is not None and audit.recorded is not None and number(audit.recorded) != number(value):
        is_it += f" (recorded {number(audit.recorded)})"
    changing = sum(finding.effect is Effect.CHANGES for finding in audit.findings)
    if changing:
        return f"{is_it}; {count(changing, 'finding')} {'changes' if changing == 1 else 'change'} it"
    if any(finding.effect is Effect.RISK for finding in audit.findings):
        return f"{is_it}; nothing changes it on this batch"
    if not audit.used:
        return is_it
    unit = "token" if Scheme.ROW_MEAN not in audit.used or Scheme.TOKEN_MEAN in audit.used else "row"
    return f"{is_it}; nothing changes it, and every {unit} weighs the same"


def _findings(findings: Sequence[Finding]) -> RenderableType:
    told = pairs(style="")
    last: Effect | None = None
    for finding in findings:
        if last is not None:
            told.add_row("", "")
        lead = Text(str(finding.effect) if finding.effect is not last else "", STYLE[finding.effect])
        unsure = f" ({finding.sure})" if finding.sure is not Sure.MEASURED else ""
        told.add_row(lead, clean(finding.sentence) + unsure)
        last = finding.effect
    return Padding(told, (0, 2))


def _reductions(audit: Audit) -> RenderableType:
    several = len(audit.parts) > 1
    figures = [*(("averaged", "in one piece") if several else ("loss",)), "× token mean", "short : long row"]
    shown = table("  the same tokens, as", *figures, *(("adds up",) if several else ()), "as in")
    shown.columns[0].no_wrap = True
    shown.columns[-1].style = QUIET
    for column in shown.columns[1 : 1 + len(figures)]:
        column.justify = "right"
    for reduced in audit.reductions:
        if audit.empty_rows or reduced.scheme is not Scheme.FILLED_ROW_MEAN:  # without empty rows it is the row mean
            shown.add_row(*_reduced(reduced, reduced.scheme in audit.used, several))
    return Padding(shown, (0, 2))


def _reduced(reduced: Reduced, used: bool, several: bool) -> list[str | Text]:
    name = Text(f"{'→' if used else ' '} {reduced.title}", STRONG if used else "")
    row: list[str | Text] = [name, number(reduced.averaged)]
    row += [number(reduced.whole)] * several
    row += [number(reduced.factor), f"{number(reduced.row_weight)} : 1"]
    row += [Text("yes", PROVEN) if reduced.adds_up else Text("no", HARM)] * several
    return [*row, clean(", ".join(reduced.uses[: USES - several]))]


def _floors(audit: Audit) -> Text | None:
    """One line on the frameworks, where a missing floor is a finding."""
    if not audit.denominators:
        return None
    bare = sorted({known.key.split(".")[0] for known in audit.denominators if not known.empty_batch})
    kept = sorted({known.key.split(".")[0] for known in audit.denominators if known.empty_batch} - set(bare))
    return Text(f"With nothing valid the losses of {', '.join(bare)} are 0/0; those of {', '.join(kept)} stay finite.", QUIET)
