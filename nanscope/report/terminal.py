"""The report in a terminal: what one reads at 3 a.m., top to bottom, without scrolling sideways.

● step 412 · rank 0 · backward   loss 0.264 (finite) · 21 of 21 gradients non-finite · optimizer stepped
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanscope.causes import Cause

if TYPE_CHECKING:
    from nanscope.snapshot.observation import Row
    from nanscope.verdict.incident import Incident, Verdict

from nanscope.report.console import HARM, PROVEN, QUIET, STRONG, WIDTH, console_for, safe

CHAIN = 12  # links shown


def render_text(verdict: Verdict) -> str:
    """Return the report as plain text."""
    stream = StringIO()
    console = Console(file=stream, width=WIDTH, highlight=False, markup=False, emoji=False, no_color=True, force_terminal=False)
    console.print(_verdict(verdict))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def print_verdict(verdict: Verdict, written: Sequence[str], *, file: IO[str]) -> None:
    """Print the report of a run, and which files were written."""
    if file.isatty():
        console_for(file).print(_verdict(verdict))
    else:
        file.write(render_text(verdict))
    for path in written:
        console_for(file).print(Text(f"  wrote {path}", QUIET))


def _verdict(verdict: Verdict) -> RenderableType:
    if verdict.healthy:
        parts: list[RenderableType] = [Text.assemble(("● ", PROVEN), (safe(verdict.sentence), ""))]
        parts += [Text(f"  note: {safe(note.text)}", QUIET) for note in verdict.notes if note.slug != "nonfinite_absorbed"]
        return Group(*parts)
    parts = []
    for incident in verdict.incidents:
        parts += [Text(""), _incident(incident)]
    more = verdict.bad_steps - len({incident.step for incident in verdict.incidents})
    counts = f"{verdict.steps} step{'' if verdict.steps == 1 else 's'} watched"
    counts += f", {more} more bad step{'' if more == 1 else 's'} not saved" if more > 0 else ""
    counts += f", {verdict.skipped} skipped" if verdict.skipped else ""
    parts += [Text(""), Text(f"  {counts}", QUIET)]
    return Group(*parts)


def _incident(incident: Incident) -> RenderableType:
    parts: list[RenderableType] = [
        Text.assemble(("● ", HARM), (safe(incident.headline), STRONG)),
        Text(""),
        Padding(Text(safe(incident.sentence)), (0, 2)),
        Text(""),
        _facts(incident),
    ]
    if incident.rows:
        parts += [Text(""), _table(incident)]
    advised = [fix for fix in incident.fixes if not fix.executed]
    for fix in advised:
        parts.append(Text(f"  advice (not run): {fix.id}: {safe(fix.label)}", ""))
    for note in incident.notes:
        parts.append(Padding(Text(f"note: {safe(note.text)}", QUIET), (0, 2)))
    if incident.snapshot:
        parts += [Text(""), Text.assemble(("  next  ", QUIET), (f"nanscope replay {safe(incident.snapshot)}", ""))]
    if incident.cause is not Cause.UNKNOWN:
        parts.append(Text.assemble(("  why   ", QUIET), (f"nanscope explain {incident.cause}", "")))
    return Group(*parts)


def _facts(incident: Incident) -> RenderableType:
    from nanscope.text import number, show_index

    o = incident.origin
    table = Table.grid(padding=(0, 2))
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column(overflow="fold")
    where = f"{Path(safe(o.file)).name}:{o.line}, in {safe(o.function)}" if o.file else "no source line"
    marked = next((text.strip() for line, text in o.source if line == o.line), o.expression or o.op)
    table.add_row("origin", Text.assemble((safe(marked), STRONG), ("   " + where, QUIET)))
    words = []
    if o.shape:
        words.append(f"{show_index(o.index)} of {show_index(o.shape)}")
    words.append(f"{o.op} → {number(o.value)}")
    if o.operands and len(o.operands) <= 3:
        words.append(", ".join(f"{safe(name)} = {number(value)}" for name, value in o.operands))
    if o.limit is not None:
        words.append(f"limit in {safe(o.dtype)} {o.limit}")
    elif o.headroom is not None:
        words.append(f"headroom {number(o.headroom)} bits")
    table.add_row("", " · ".join(words))
    if o.masked is not None:
        table.add_row("", f"masked: {safe(o.masked_by or 'outside the loss')}" if o.masked else "not masked: the loss counts it")
    if o.module:
        table.add_row("", f"inside {safe(o.module)}")
    if incident.chain:
        table.add_row("chain", _chain(incident))
    if incident.loss_words:
        table.add_row("objective", safe(incident.loss_words))
    for index, remedy in enumerate(incident.remedies):
        table.add_row(f"in {safe(incident.framework)}" if index == 0 else "", safe(remedy))
    if incident.opaque:
        table.add_row("opaque", f"not recorded, results taken as they were: {safe(', '.join(incident.opaque[:8]))}")
    return Padding(table, (0, 2))


def _chain(incident: Incident) -> Text:
    from nanscope.text import number

    links = list(incident.chain)
    if len(links) > CHAIN:
        links = links[: CHAIN - 3] + links[-3:]
    text = Text()
    backward = False
    for position, link in enumerate(links):
        if position:
            text.append(" → ", QUIET)
        if len(incident.chain) > CHAIN and position == CHAIN - 3:
            text.append(f"… {len(incident.chain) - CHAIN} more … → ", QUIET)
        if link.backward and not backward:
            text.append("backward: ", QUIET)
            backward = True
        text.append(f"{'∂ ' if link.backward else ''}{safe(link.text)} ")
        text.append(number(link.value), HARM if number(link.value) in ("NaN", "+inf", "−inf") else "")
    return text


def _table(incident: Incident) -> RenderableType:
    from nanscope.text import is_exact, number

    best = next((fix.id for fix in incident.fixes if fix.executed), None)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=QUIET)
    for name in ("replay", "what", "loss", "gradients", "healthy tokens", ""):
        table.add_column(name, overflow="fold", justify="left", no_wrap=name in ("replay", "loss", "gradients"))
    for row in incident.rows:
        ok = row.kind not in ("recorded", "float64") and row.works
        if row.loss is None:
            table.add_row(safe(row.id), safe(row.label), "–", "–", "–", Text(f"not run: {safe(row.note)}", QUIET))
            continue
        unit = " tokens" if row.kind == "objective" else ""
        gradients = Text("finite", PROVEN) if not row.bad else Text(f"{row.bad} of {row.total}{unit} bad", HARM)
        if row.distortion is None or row.bad:
            healthy = Text("–", QUIET)
        elif is_exact(row.distortion):
            healthy = Text("unchanged")
        else:
            healthy = Text(f"off by {row.distortion:.1e}")
        table.add_row(
            Text(safe(row.id), STRONG if row.id == best and ok else ""),
            safe(row.label),
            number(row.loss),
            gradients,
            healthy,
            _mark(row, row.id == best),
        )
    return Padding(table, (0, 2))


def _mark(row: Row, best: bool) -> Text:
    if row.kind == "recorded":
        return Text(safe(row.note), QUIET)
    if row.kind == "float64":
        return Text("reference" if row.works else "fails even in float64", QUIET)
    if row.works and row.kind == "control":
        return Text("finite here, but the bad value is only hidden", QUIET)
    if row.works:
        return Text("✓ best" if best and row.kind == "fix" else "✓", PROVEN)
    return Text("✗ tempting, and wrong" if row.kind == "control" else "✗", HARM)


def _items(data: Any, key: str) -> list[Any]:
    found = data.get(key) if isinstance(data, dict) else None
    return found if isinstance(found, list) else []


def _flat(data: Any) -> str:
    if not isinstance(data, dict):
        return str(data)[:400]
    return ", ".join(
        f"{key} {value if not isinstance(value, dict) else '(' + _flat(value) + ')'}" for key, value in data.items() if value is not None
    )[:1200]


def print_demo_end(verdict: Verdict, out: Path, *, file: IO[str]) -> None:
    """Print what to try next."""
    console = console_for(file)
    if verdict.healthy:
        console.print(Text(f"  This run stayed healthy: {verdict.steps} steps. Try another one: nanscope demo --seed 1"))
        return
    snapshot = verdict.incidents[0].snapshot or str(out)
    console.print(Text("\n  The picture and the page are in the folder above. Try next:", ""))
    console.print(Text(f"    nanscope replay {safe(snapshot)} --edit clamp:5", STRONG))
    console.print(Text("    nanscope run your_training_script.py", STRONG))
