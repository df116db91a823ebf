"""The audit in a terminal: first what the loss is, then what changes it, then the same step under every reduction.

● step 412 · 2 ranks · 1000 tokens in 8 rows   the loss is the token mean, 0.4: 1 finding changes it
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanscope.audit import Audit, Effect, Finding, Reduced, Sure
from nanscope.audit.weights import Scheme
from nanscope.audit.words import count
from nanscope.report.console import HARM, PROVEN, QUIET, STRONG, WIDTH, safe
from nanscope.text import number

USES = 3  # names beside a reduction
STYLE = {Effect.CHANGES: HARM, Effect.RISK: STRONG, Effect.NOTE: QUIET}


def render_audit(audit: Audit, width: int = WIDTH) -> str:
    """Return an audit as plain text."""
    stream = StringIO()
    Console(file=stream, width=width, highlight=False, markup=False, emoji=False, no_color=True, force_terminal=False).print(_page(audit))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def print_audit(audit: Audit, *, file: IO[str]) -> None:
    """Print an audit."""
    if file.isatty():
        Console(file=file, highlight=False, markup=False, emoji=False).print(_page(audit))
    else:
        file.write(render_audit(audit))


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
    is_it = f"the loss is {safe(audit.reduction)}" if audit.reduction else "which reduction the loss had is not known"
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
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    last: Effect | None = None
    for finding in findings:
        if last is not None:
            table.add_row("", "")
        lead = Text(str(finding.effect) if finding.effect is not last else "", STYLE[finding.effect])
        unsure = f" ({finding.sure})" if finding.sure is not Sure.MEASURED else ""
        table.add_row(lead, safe(finding.sentence) + unsure)
        last = finding.effect
    return Padding(table, (0, 2))


def _reductions(audit: Audit) -> RenderableType:
    several = len(audit.parts) > 1
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=QUIET)
    table.add_column("  the same tokens, as", no_wrap=True)
    table.add_column("averaged" if several else "loss", justify="right")
    if several:
        table.add_column("in one piece", justify="right")
    table.add_column("× token mean", justify="right")
    table.add_column("short : long row", justify="right")
    if several:
        table.add_column("adds up")
    table.add_column("as in", overflow="fold", style=QUIET)
    for reduced in audit.reductions:
        if audit.empty_rows or reduced.scheme is not Scheme.FILLED_ROW_MEAN:  # without empty rows it is the row mean
            table.add_row(*_reduced(reduced, reduced.scheme in audit.used, several))
    return Padding(table, (0, 2))


def _reduced(reduced: Reduced, used: bool, several: bool) -> list[str | Text]:
    name = Text(f"{'→' if used else ' '} {reduced.title}", STRONG if used else "")
    row: list[str | Text] = [name, number(reduced.averaged)]
    row += [number(reduced.whole)] * several
    row += [number(reduced.factor), f"{number(reduced.row_weight)} : 1"]
    row += [Text("yes", PROVEN) if reduced.adds_up else Text("no", HARM)] * several
    return [*row, safe(", ".join(reduced.uses[: USES - several]))]


def _floors(audit: Audit) -> Text | None:
    """One line on the frameworks, where a missing floor is a finding."""
    if not audit.denominators:
        return None
    bare = sorted({known.key.split(".")[0] for known in audit.denominators if not known.empty_batch})
    kept = sorted({known.key.split(".")[0] for known in audit.denominators if known.empty_batch} - set(bare))
    return Text(f"With nothing valid the losses of {', '.join(bare)} are 0/0; those of {', '.join(kept)} stay finite.", QUIET)
