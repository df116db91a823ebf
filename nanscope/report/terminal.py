"""The report in a terminal: what one reads at 3 a.m., top to bottom, without scrolling sideways.

● step 412 · rank 0 · backward   loss 0.264 (finite) · 21 of 21 weight gradients non-finite · optimizer stepped
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.causes import Cause
from nanscope.report.chain import chain_of
from nanscope.report.clean import WHOLE, clean, numeral
from nanscope.report.console import DOUBT, HARM, PROVEN, QUIET, STRONG, Command, pairs, plain, show, table
from nanscope.report.diff import NO_DIFF, NO_DIFF_AT_ALL, changed, hunks_of, rest_of, unmeasured_fix, written_fix
from nanscope.report.headline import RANK_HEADS, consequences_of, rank_rows
from nanscope.report.origin import element, mask_words, token_words, where_in
from nanscope.report.tried import INPUT_GRADIENTS, best_of, groups_of, heads_of, tested, unmeasured
from nanscope.snapshot.coverage import gap_words
from nanscope.text import count
from nanscope.verdict.arithmetic import SHOWN
from nanscope.verdict.incident import Fix, Incident, Verdict
from nanscope.verdict.sentence import blamed
from nanscope.verdict.standing import Ranks

CHAIN = 12  # links shown
TRIED_AGAIN = ": what was tried there was tried here, and came to the same."
STATES = {"harm": HARM, "doubt": DOUBT, "proven": PROVEN, "quiet": QUIET}


OF_RANKS = ("numbered_apart", "skipped_alone")  # notes without which the table of ranks would mislead
OF_RUN = ("carried_on", "said_before", "checked_beforehand", "mixed_runs")  # and without which the counts would, or the next step


def render_text(verdict: Verdict) -> str:
    """Return the report as plain text."""
    return plain(_verdict(verdict))


def print_verdict(verdict: Verdict, written: Sequence[str] = (), *, file: IO[str]) -> None:
    """Print the report of a run, and which files were written."""
    show(Group(_verdict(verdict), *map(_wrote, written)), file=file)


def print_written(path: str, *, file: IO[str]) -> None:
    """Print that another file was written."""
    show(_wrote(path), file=file)


def _wrote(path: str) -> Text:
    return Text(f"  wrote {path}", QUIET)


def _verdict(verdict: Verdict) -> RenderableType:
    if not verdict.incidents:
        parts: list[RenderableType] = [Text.assemble(("● ", STATES[verdict.status.tone]), clean(verdict.sentence))]
        parts += [Text(f"  note: {clean(note.text)}", QUIET) for note in verdict.notes if note.slug != "nonfinite_absorbed"]
        return Group(*parts)
    parts, told = [], dict[object, Incident]()
    for incident in verdict.causes:
        first = told.setdefault(_alike(incident), incident)
        parts += [Text(""), incident_shown(incident) if first is incident else _again(incident, first)]
    followed = consequences_of(verdict)
    parts += [Text(""), *(Text(f"  {words}") for words in followed)] if followed else []
    if verdict.ranks is not None:
        about = [note for note in verdict.notes if note.slug in OF_RANKS]
        parts += [Text(""), _ranks(verdict.ranks), *(_note(note.text) for note in about)]
    shown = len({(incident.step, incident.update) for incident in verdict.causes})
    more = verdict.bad_steps - shown - sum(found.count for found in verdict.aftermath)
    counts = f"{count(verdict.steps, 'step')}{f' of {verdict.processes} processes' if verdict.processes > 1 else ''} watched"
    counts += f", {count(more, 'more bad step')} not saved" if more > 0 else ""
    counts += f", {verdict.skipped} skipped" if verdict.skipped else ""
    counts += f", {verdict.repaired} repaired" if verdict.repaired else ""
    parts += [Text(""), Text(f"  {counts}", QUIET)]
    said = dict.fromkeys(note.text for note in verdict.notes if note.slug in OF_RUN)
    parts += [_note(text) for text in said]
    if verdict.gaps:
        parts.append(Padding(Text(f"not seen: {clean(gap_words(verdict.gaps))}", DOUBT), (0, 2)))
    return Group(*parts)


def _note(text: str) -> RenderableType:
    return Padding(Text(f"note: {clean(text)}", QUIET), (0, 2))


def _ranks(ranks: Ranks) -> RenderableType:
    """The table of who was first, and who followed."""
    shown = table(*RANK_HEADS)
    for row in rank_rows(ranks):
        shown.add_row(Text(row.standing, STATES[row.state]), Text(row.which), Text(row.since), Text(row.how))
    return Padding(shown, (0, 2))


def _alike(incident: Incident) -> object:
    """What incidents have in common of which the second tells nothing that the first has not: the place, the cause, and what heals it."""
    origin, rows = incident.origin, tuple((row.id, row.works, row.proven, row.then) for row in incident.rows)
    return incident.phase, incident.cause, origin.op, origin.file, origin.line, origin.masked, rows


def _again(incident: Incident, first: Incident) -> RenderableType:
    """The report of a bad step that is like another one: where, and that."""
    parts: list[RenderableType] = [
        Text.assemble(("● ", HARM), (clean(incident.headline), STRONG)),
        Text(""),
        Padding(Text(clean(incident.sentence)), (0, 2)),
        Padding(Text(f"As in {clean(first.place)}, above{TRIED_AGAIN if incident.rows else '.'}", QUIET), (0, 2)),
    ]
    known = {note.text for note in first.notes}
    parts += [_note(note.text) for note in incident.notes if note.text not in known]
    return Group(*parts, *_commands(incident, "replay", why=False))


def incident_shown(incident: Incident, next_verb: str = "replay") -> RenderableType:
    """Return the report of one bad step. next_verb: which is proposed to go on with, "" for none."""
    parts: list[RenderableType] = [
        Text.assemble(("● ", HARM), (clean(incident.headline), STRONG)),
        Text(""),
        Padding(Text(clean(incident.sentence)), (0, 2)),
        Text(""),
        _facts(incident),
    ]
    best = best_of(incident)
    if (fix := written_fix(incident)) is not None:
        if best is not None and best is not fix:
            parts += [Text(""), _named("best", best, NO_DIFF)]
        parts += [Text(""), *_diff(fix)]
    elif best is not None:
        parts += [Text(""), _named("fix", best, NO_DIFF_AT_ALL)]
    elif (fix := unmeasured_fix(incident)) is not None:
        parts += [Text(""), *_diff(fix, f", {unmeasured(incident)}")]
    if incident.rows:
        parts += [Text(""), tried_shown(incident)]
    parts += [Text(f"  advice (not run): {fix.id}: {clean(fix.label)}") for fix in incident.fixes if not fix.executed]
    parts += [_note(note.text) for note in incident.notes]
    return Group(*parts, *_commands(incident, next_verb))


def _commands(incident: Incident, next_verb: str, *, why: bool = True) -> list[RenderableType]:
    """What to go on with. why: with what explains the cause."""
    proposed: list[RenderableType] = []
    if incident.snapshot and next_verb:
        proposed.append(Command(f"nanscope {next_verb} {shlex.quote(clean(incident.snapshot))}", lead="  next  "))
    if why and incident.cause is not Cause.UNKNOWN:
        proposed.append(Command(f"nanscope explain {incident.cause}", lead="  why   "))
    return [Text(""), *proposed] if proposed else []


def _named(lead: str, fix: Fix, why: str) -> RenderableType:
    """A fix that is not written out. why: it is not."""
    shown = pairs()
    shown.add_row(lead.ljust(6), Text.assemble((f"{clean(fix.id)}: ", STRONG), clean(fix.label), (f" ({why})", QUIET)))
    return Padding(shown, (0, 2))


def _diff(fix: Fix, proof: str = "") -> Iterator[RenderableType]:
    """The fix as it is in the source. proof: what is known of it, if it is not proven."""
    for hunk in hunks_of(fix):
        yield Text.assemble(("  fix     ", QUIET), (hunk.where, ""), (f"   {clean(fix.id)}{proof}", QUIET))
        for line in changed(hunk):
            yield Padding(Text(f"{line.sign} {line.text}", HARM if line.sign == "-" else PROVEN), (0, 2, 0, 10))
    for words in rest_of(fix):
        yield Text.assemble(("  and     ", QUIET), words, (f"   {NO_DIFF_AT_ALL}", QUIET))


def _facts(incident: Incident) -> RenderableType:
    o = incident.origin
    facts = pairs()
    marked = next((text.strip() for line, text in o.source if line == o.line), o.expression or o.op)
    facts.add_row("origin", Text.assemble((clean(marked), STRONG), (f"   {where_in(o) or 'no source line'}", QUIET)))
    words = [*filter(None, [element(o)]), f"{o.op} → {numeral(o.value)}"]
    if o.operands and len(o.operands) <= SHOWN:
        words.append(", ".join(f"{clean(name)} = {numeral(value)}" for name, value in o.operands))
    if o.limit is not None:
        words.append(f"limit in {clean(o.dtype)} {o.limit}")
    elif o.headroom is not None:
        words.append(f"headroom {numeral(o.headroom)} bits")
    facts.add_row("", " · ".join(words))
    if incident.token is not None:
        facts.add_row("", f"token id {token_words(incident.token)}")
    if o.masked is not None:
        facts.add_row("", mask_words(o))
    if incident.blame is not None:
        facts.add_row("behind it", clean(blamed(incident.blame)))
    if o.module:
        facts.add_row("", f"inside {clean(o.module)}")
    if incident.chain:
        facts.add_row("chain", _chain(incident))
    if test := tested(incident):
        facts.add_row("tested", test)
    if incident.loss_words:
        facts.add_row("objective", clean(incident.loss_words))
    for index, remedy in enumerate(incident.remedies):
        facts.add_row(f"in {clean(incident.framework)}" if index == 0 else "", clean(remedy))
    if incident.opaque:
        facts.add_row("opaque", f"not recorded, results taken as they were: {clean(', '.join(incident.opaque[:8]))}")
    return Padding(facts, (0, 2))


def _chain(incident: Incident) -> Text:
    text = Text()
    for item in chain_of(incident, CHAIN, WHOLE.text):
        if item.kind == "end":
            continue
        if text and not text.plain.endswith("backward: "):
            text.append(" → ", QUIET)
        if item.kind == "turn":
            text.append("backward: ", QUIET)
        elif item.kind == "gap":
            text.append(f"{item.text} …", QUIET)
        else:
            text.append(f"{'∂ ' if item.kind == 'grad' else ''}{item.text} ")
            text.append(item.value, HARM if item.bad else "")
    return text


def tried_shown(incident: Incident) -> RenderableType:
    """Return the table of what was tried."""
    heads = heads_of(incident)
    shown = table(*heads[:-1], "", under="what")
    for name in ("replay", "loss", INPUT_GRADIENTS):
        shown.columns[heads.index(name)].no_wrap = True
    for row in (row for group in groups_of(incident, WHOLE) for row in group.rows):
        gradients = Text(row.gradients, HARM if row.bad else PROVEN if row.gradients == "finite" else "")
        outcome = Text(row.outcome, STATES[row.state])
        shown.add_row(Text(row.id, STRONG if row.best else ""), Text(row.label), row.loss, gradients, Text(row.healthy), outcome)
    return Padding(shown, (0, 2))


def print_next(verdict: Verdict, page: Path, *, file: IO[str]) -> None:
    """Print what to do with a report that was written: look at the page, and replay its first incident."""
    proposed = [f"nanscope open {shlex.quote(clean(page))}"] if page.suffix == ".html" else []
    saved = [clean(incident.snapshot) for incident in verdict.causes if incident.snapshot]
    proposed += [f"nanscope replay {shlex.quote(saved[0])}"] if saved else []
    lines = [Command(words, lead="        " if index else "  next  ") for index, words in enumerate(proposed)]
    if lines:
        show(Group(*lines), file=file)


def print_demo_end(verdict: Verdict, out: Path, *, file: IO[str]) -> None:
    """Print what to try next."""
    if not verdict.incidents:
        words: list[RenderableType] = [Text(f"  This run stayed healthy: {verdict.steps} steps. Try another one: nanscope demo --seed 1")]
    else:
        snapshot = shlex.quote(clean(verdict.incidents[0].snapshot or out))
        words = [
            Text("\n  The picture and the page are in the folder above. Try next:"),
            Command(f"nanscope replay {snapshot} --sweep clamp", lead="    ", style=STRONG),
            Command("nanscope run your_training_script.py", lead="    ", style=STRONG),
        ]
    show(Group(*words), file=file)
