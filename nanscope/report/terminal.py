"""The report in a terminal: what one reads at 3 a.m., top to bottom, without scrolling sideways.

● step 412 · rank 0 · backward   loss 0.264 (finite) · 21 of 21 gradients non-finite · optimizer stepped
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanscope.causes import CAUSES, Cause
from nanscope.header import Header

if TYPE_CHECKING:
    from nanscope.diagnose import Incident, Verdict
    from nanscope.replay import Row

T = TypeVar("T")
WIDTH = 118
CHAIN = 12  # links shown
HARM, PROVEN, QUIET, STRONG = "bold red", "green", "dim", "bold"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def safe(text: object) -> str:
    """Return text from a file without what a terminal would obey or what would hide part of it."""
    return _CONTROL.sub("·", str(text).replace("\t", "    "))


def console_for(file: IO[str]) -> Console:
    """Return a console that writes to a file as this package's reports look."""
    terminal = file.isatty()
    return Console(
        file=file,
        width=None if terminal or os.environ.get("COLUMNS", "").isdigit() else WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


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
    from nanscope.indices import show_index
    from nanscope.words import number

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
    from nanscope.words import number

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
    from nanscope.words import is_exact, number

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


def print_replay(incident: Incident, failing: bool, *, file: IO[str]) -> None:
    """Print what replaying a snapshot gave."""
    console = console_for(file)
    if failing or not incident.rows:
        console.print(_incident(incident))
        if not incident.rows:
            console.print(Text("  nothing can be run again: the file holds no program of this step's loss", QUIET))
        return
    console.print(
        Text.assemble(("● ", PROVEN), f"step {incident.step} · rank {incident.rank}: the replayed loss and its gradients are finite")
    )
    if incident.reproduces is False:
        console.print(
            Text("  The recorded loss does not come out again: the fault was transient (hardware, a race), or lies outside the program.")
        )
    elif incident.origin.op not in ("unknown", ""):
        console.print(Padding(Text(safe(incident.sentence)), (0, 2)))
    console.print(_table(incident))


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
    from nanscope.explanations import EXPLANATIONS

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


def print_header(header: Header, path: str, program: bool, *, file: IO[str]) -> None:
    """Print everything that is in a snapshot file."""
    console = console_for(file)
    about = header.about
    console.print(
        Text.assemble((safe(path), STRONG), f"   step {safe(about.get('step'))} · rank {safe(about.get('rank'))} · {header.size:,} bytes")
    )
    tensors = Table(box=None, padding=(0, 3, 0, 0), header_style=QUIET, title=None)
    for name in ("tensor", "dtype", "shape", "bytes"):
        tensors.add_column(name, justify="right" if name == "bytes" else "left")
    for tensor in header.tensors:
        tensors.add_row(safe(tensor.name), safe(tensor.dtype), str(list(tensor.shape)), f"{tensor.bytes:,}")
    console.print(Padding(tensors, (0, 2)))
    recorded = about.get("program") if isinstance(about.get("program"), dict) else {}
    calls, sites = _items(recorded, "calls"), _items(recorded, "sites")
    files = sorted({str(site[0]) for site in sites if isinstance(site, list) and site})
    table = Table.grid(padding=(0, 2))
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(
        "program", f"{len(calls)} calls from {len(_items(recorded, 'leaves'))} tensors, {len(sites)} source positions with their lines"
    )
    for name in files[:20]:
        table.add_row("source of", safe(name))
    for key in ("reached", "environment", "settings", "objective", "observed"):
        if about.get(key):
            table.add_row(key, safe(_flat(about[key])))
    table.add_row("history", f"{len(_items(about, 'history'))} steps")
    if about.get("opaque"):
        table.add_row("opaque", safe(", ".join(str(name) for name in about["opaque"])))
    console.print(Padding(table, (1, 2)))
    if program:
        for call in calls:
            site = (
                sites[call[4]]
                if isinstance(call, list) and len(call) > 4 and isinstance(call[4], int) and 0 <= call[4] < len(sites)
                else None
            )
            place = f"{Path(str(site[0])).name}:{site[1]}" if isinstance(site, list) and len(site) > 1 else ""
            console.print(Text(f"  {safe(call[0] if isinstance(call, list) and call else call):40} {safe(place)}"))


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


# -- progress ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def progress(what: str, *, file: IO[str]) -> Iterator[None]:
    """Show that something is running, on a terminal only."""
    console = console_for(file)
    if not file.isatty():
        yield
        return
    with console.status(what):
        yield


@contextmanager
def steps_bar(what: str, total: int, *, file: IO[str]) -> Iterator[Callable[[str], None]]:
    """Yield a function that advances a progress bar by one step and sets the words beside it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = console_for(file)
    if not file.isatty():
        console.print(Text(f"{what} …", QUIET))
        yield lambda words: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, words="")
        yield lambda words: bar.update(task, advance=1, words=words)


def track(items: Sequence[T], what: str, *, file: IO[str]) -> Iterable[T]:
    """Yield items, with a progress bar on a terminal."""
    if not file.isatty() or len(items) < 2:
        return items
    from rich.progress import track as bar

    return bar(items, what, console=console_for(file), transient=True)
