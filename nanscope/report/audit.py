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
from nanscope.report.figures import FigureRow, FigureSheet, FigureTable
from nanscope.text import count, number

USES = 3  # names beside a reduction
STYLE = {Effect.CHANGES: HARM, Effect.RISK: STRONG, Effect.NOTE: QUIET}


def sheet_of(audit: Audit) -> FigureSheet:
    """Return an audit as a page shows it."""
    several = len(audit.parts) > 1
    findings = tuple(FigureRow((str(one.effect), clean(one.sentence), str(one.sure))) for one in audit.findings)
    figures = [*(("averaged", "in one piece") if several else ("loss",)), "× token mean", "short : long row"]
    heads = ("the same tokens, as", *figures, *(("adds up",) if several else ()), "as in")
    reductions = tuple(
        FigureRow(tuple(map(str, _reduced(one, one.scheme in audit.used, several))), strong=one.scheme in audit.used)
        for one in _told(audit)
    )
    tables = (
        FigureTable("findings", ("what it does", "finding", "how sure"), findings, words=True),
        FigureTable("the same step under every reduction", heads, reductions, words=True),
    )
    tone = "harm" if audit.changes_loss else "proven"
    return FigureSheet("audit", _where(audit), clean(audit.sentence), tone, tables)


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
    style = HARM if audit.changes_loss else PROVEN
    return Text.assemble(("● ", style), (_where(audit), STRONG), f"   {clean(audit.sentence)}")


def _where(audit: Audit) -> str:
    where = [f"step {audit.step}"] * (audit.step is not None) + [count(audit.ranks, "rank")] * (audit.ranks > 1)
    if len(audit.parts) > audit.ranks:
        where.append(count(len(audit.parts), "micro-batch"))
    where.append(f"{count(audit.tokens, 'token')} in {count(audit.rows, 'row')}")
    return " · ".join(where)


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
    shown = table("  the same tokens, as", *figures, *(("adds up",) if several else ()), "as in", under="as in", said="  as in ")
    shown.columns[0].no_wrap = True
    shown.columns[-1].style = QUIET
    for column in shown.columns[1 : 1 + len(figures)]:
        column.justify = "right"
    for reduced in _told(audit):
        shown.add_row(*_reduced(reduced, reduced.scheme in audit.used, several))
    return Padding(shown, (0, 2))


def _told(audit: Audit) -> list[Reduced]:
    """The reductions that say something of their own: without empty rows one of them is the row mean."""
    return [one for one in audit.reductions if audit.empty_rows or one.scheme is not Scheme.FILLED_ROW_MEAN]


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
