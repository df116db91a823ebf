"""The page as data: every string clean and short, ready for the template."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from nanscope.causes import Cause
from nanscope.report.clean import LIMITS, Limits, clean, numeral, real
from nanscope.report.diff import DiffLine, hunks_of, patch_of, rest_of, unmeasured_fix, written_fix
from nanscope.report.draw import Chart, Map, chart_of, map_of
from nanscope.report.headline import (
    RANK_HEADS,
    Fact,
    RankRow,
    calm,
    consequences_of,
    facts_of,
    is_of_a_run,
    lead_and_rest,
    rank_rows,
    resume,
    watched_of,
)
from nanscope.report.history import panels_of, panels_of_run
from nanscope.report.lookout import Lookout, chart_data, lookout_of, map_data
from nanscope.report.origin import calculation, element, mask_words, subject, token_words, where_in
from nanscope.report.segments import Segment, segments
from nanscope.report.tried import Group, best_of, fix_words, groups_of, heads_of, reproduction, tested, unit_of, unmeasured
from nanscope.report.way import Way, way_of
from nanscope.roles import role_words
from nanscope.snapshot.coverage import gap_words
from nanscope.verdict.explain import explanation
from nanscope.verdict.incident import Fix, Incident, Note, Verdict
from nanscope.verdict.sentence import blamed


@dataclass(frozen=True, slots=True)
class Why:
    """What is known of the cause, folded in. links: public threads in which it was met, as (address, words)."""

    title: str
    mechanism: str
    broken: str
    mended: str
    wrong: str
    links: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One incident, ready for the template."""

    anchor: str
    facts: tuple[Fact, ...]
    lead: tuple[Segment, ...]
    rest: tuple[Segment, ...]
    fix: str
    fix_proof: str
    fix_where: str
    fix_result: str
    code: str
    calculation: str
    details: tuple[tuple[str, str], ...]
    operands: tuple[tuple[str, str], ...]
    way: Way
    place: str
    map: Map | None
    lookout: Lookout | None
    patch: tuple[DiffLine, ...]
    patch_file: str
    patch_rest: tuple[str, ...]
    patch_id: str
    why: Why | None
    charts: tuple[Chart, ...]
    groups: tuple[Group, ...]
    heads: tuple[str, ...]
    replayed: str
    replayed_state: str
    advised: tuple[tuple[str, str, str], ...]
    framework: str
    remedies: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]
    tables: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    ahead: tuple[tuple[str, str], ...]
    trend: bool


@dataclass(frozen=True, slots=True)
class Page:
    """Everything the template shows."""

    title: str
    heading: str
    version: str
    counts: tuple[Fact, ...]
    status: str
    tone: str
    sentence: str
    watched: tuple[Fact, ...]
    sections: tuple[Section, ...]
    contents: tuple[tuple[str, str, str], ...]
    more: str
    notes: tuple[tuple[str, str], ...]
    unseen: str
    ranks: tuple[RankRow, ...]
    rank_heads: tuple[str, ...]
    charts: tuple[Chart, ...] = ()


def build(verdict: Verdict, title: str | None = None, limits: Limits = LIMITS[0]) -> Page:
    """Return a verdict as page data: clean strings, cut to `limits`."""
    shown = verdict.causes[: limits.incidents]
    listed = verdict.causes[: limits.incidents + limits.listed]
    told = {(note.slug, note.text) for incident in shown for note in incident.notes}
    notes = [note for note in verdict.notes if (note.slug, note.text) not in told]
    bad = max(verdict.bad_steps, len({(incident.step, incident.update) for incident in verdict.incidents}))
    watched = Fact("step watched" if verdict.steps == 1 else "steps watched", clean(verdict.steps, 24))
    charts = itertools.count()
    counts = [*([watched] if is_of_a_run(verdict) else []), Fact("bad", clean(bad, 24), state="harm" if bad else verdict.status.tone)]
    if verdict.skipped:
        counts.append(Fact("skipped", clean(verdict.skipped, 24)))
    if verdict.repaired:
        counts.append(Fact("repaired", clean(verdict.repaired, 24)))
    if not verdict.incidents:
        default = f"nanscope · {verdict.status} run"
    else:
        default = f"nanscope · {_name(verdict.incidents[0])}"
    contents = [(f"#incident-{n}" if n <= len(shown) else "", _name(i), lead_and_rest(i, limits)[0]) for n, i in enumerate(listed, 1)]
    return Page(
        title=clean(title, limits.text) if title else default,
        heading=clean(title, limits.text) if title else "",
        version=clean(verdict.version, 40),
        counts=tuple(counts),
        status=str(verdict.status),
        tone=verdict.status.tone,
        sentence="" if verdict.incidents else calm(verdict, limits.long),
        watched=() if verdict.incidents or not verdict.steps else watched_of(verdict),
        sections=tuple(_section(incident, index, limits, charts) for index, incident in enumerate(shown, 1)),
        contents=tuple((link, name, clean(words, limits.text)) for link, name, words in contents) if len(contents) > 1 else (),
        more=f"… {len(verdict.causes) - len(listed)} more" if len(verdict.causes) > len(listed) else "",
        notes=(*(("consequences", words) for words in consequences_of(verdict)[: limits.items]), *_notes(notes, limits)),
        unseen=clean(gap_words(verdict.gaps), limits.long) if verdict.incidents else "",
        ranks=rank_rows(verdict.ranks) if verdict.ranks is not None and verdict.incidents else (),
        rank_heads=RANK_HEADS if verdict.ranks is not None else (),
        charts=() if verdict.incidents else tuple(chart_of(panel, next(charts)) for panel in panels_of_run(verdict.history, limits.points)),
    )


def _name(incident: Incident) -> str:
    return f"{clean(incident.place, 60)} · {clean(incident.process, 60)} · {clean(incident.phase, 24)}"


def _section(incident: Incident, index: int, limits: Limits, charts: Iterator[int]) -> Section:
    place = incident.origin
    lead, rest = lead_and_rest(incident, limits)
    best, unproven = best_of(incident), unmeasured_fix(incident)
    heals, written = best or unproven, written_fix(incident) or unproven
    return Section(
        anchor=f"incident-{index}",
        facts=facts_of(incident),
        lead=segments(lead, place, limits),
        rest=segments(rest, place, limits),
        fix=clean(heals.label, limits.text) if heals else "",
        fix_proof="Proven fix" if best else f"Fix, {unmeasured(incident)}" if heals else "",
        fix_where=clean(PurePath(heals.where).name, limits.text) if heals and heals.where else "",
        fix_result=fix_words(heals, unit_of(incident)) if heals else "",
        code=subject(place, limits.text),
        calculation=calculation(place, limits.text),
        details=_details(incident, limits),
        operands=tuple((clean(name, limits.text), numeral(value)) for name, value in place.operands[:12]),
        way=way_of(incident, limits, index),
        place=where_in(place, limits.text),
        map=map_of(incident, limits),
        lookout=lookout_of(incident, limits, index - 1),
        patch=tuple(patch_of(written)),
        patch_file=", ".join(hunk.where for hunk in hunks_of(written, limits.text)),
        patch_rest=rest_of(written, limits.text),
        patch_id=clean(written.id, 60) if written is not None and written is not heals else "",
        why=_why(incident.cause),
        charts=tuple(chart_of(panel, next(charts)) for panel in panels_of(incident, limits.points)),
        groups=groups_of(incident, limits),
        heads=heads_of(incident),
        replayed=_capital(reproduction(incident)),
        replayed_state="proven" if incident.reproduction.exact else "" if incident.reproduces else "harm",
        advised=tuple(
            (clean(fix.id, 60), clean(fix.label, limits.text), clean(fix.where or "", limits.text))
            for fix in incident.fixes[: limits.rows]
            if not fix.executed
        ),
        framework=clean(incident.framework or "", 40),
        remedies=_some(incident.remedies, 12, limits.long),
        notes=_notes(incident.notes, limits),
        tables=_tables(incident, limits),
        ahead=tuple(_ahead(incident, limits)),
        trend=len(incident.history) > 1,
    )


def _ahead(incident: Incident, limits: Limits) -> Iterator[tuple[str, str]]:
    """What there is to do, in words and as a command."""
    if (written := written_fix(incident) or unmeasured_fix(incident)) is not None:
        whose = "" if incident.remedies else "; no option of a trainer that nanscope knows does the same"
        yield f"{_change(written)}{whose}", ""
    if words := resume(incident):
        yield words, ""
    if incident.snapshot:
        yield "run the step again, also under edits of your own", _command(incident.snapshot, limits)


def _change(fix: Fix) -> str:
    """What is to be changed."""
    many = len(fix.diffs) > 1 or len(fix.diffs[0].removed) > 1
    return f"change the {'lines' if many else 'line'} as above" + (", and what is told there in words" if fix.rest else "")


def _why(cause: Cause) -> Why | None:
    if cause not in set(Cause) - {Cause.UNKNOWN}:
        return None
    known = explanation(cause)
    links = tuple((link, link.removeprefix("https://").removeprefix("github.com/")) for link in known.links if link.startswith("https://"))
    return Why(known.title, known.mechanism, known.broken, known.mended, known.wrong, links)


def page_data(verdict: Verdict, limits: Limits, windows: int) -> dict[str, Any]:
    """Return what the script of the page reads: maps in the order of the sections, charts in the order of the page.

    windows: of a map, how many are kept; half as many of each further one.
    """
    shown = verdict.causes[: limits.incidents]
    maps = [map_data(incident, limits, max(1, windows >> n)) for n, incident in enumerate(shown)]
    panels = [panel for incident in shown for panel in panels_of(incident, limits.points)]
    panels += [] if verdict.incidents else panels_of_run(verdict.history, limits.points)
    return {"maps": maps, "charts": [chart_data(panel) for panel in panels]}


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _command(path: str, limits: Limits) -> str:
    return f"nanscope replay {shlex.quote(clean(path, 2 * limits.text))}"


def _details(incident: Incident, limits: Limits) -> tuple[tuple[str, str], ...]:
    place = incident.origin
    limit = real(place.limit)
    meaning = role_words(place.role)
    exponent = real(place.operands[0][1]) if place.operands else None
    headroom = ""
    if limit is not None and exponent is not None:
        headroom = f"{numeral(limit - exponent)} nat: {place.op} overflows above {limit:.2f}"
    elif place.headroom is not None:
        headroom = f"{numeral(place.headroom)} bits in {place.dtype}"
    pairs = (
        ("op", str(place.op)),
        ("element", element(place)),
        ("token id", token_words(incident.token)),
        ("value", f"{numeral(place.value)}{f' ({place.dtype})' if place.dtype else ''}"),
        ("mask", mask_words(place, limits.text)),
        ("headroom", headroom),
        ("behind it", blamed(incident.blame) if incident.blame is not None else ""),
        ("role", f"{place.role}{f': {meaning}' if meaning else ''}" if place.role else ""),
        ("module", place.module or ""),
        ("cause", f"{incident.cause}"),
        ("tested", tested(incident, limits.text)),
    )
    return tuple((name, clean(words, limits.text)) for name, words in pairs if words)


def _some(texts: Sequence[object], limit: int, length: int) -> tuple[str, ...]:
    shown = [clean(text, length) for text in texts[:limit]]
    return (*shown, f"… {len(texts) - limit} more") if len(texts) > limit else tuple(shown)


def _notes(notes: Sequence[Note], limits: Limits) -> tuple[tuple[str, str], ...]:
    most = limits.items // 2
    pairs = [
        (clean(note.slug, 60) + (f", step {clean(note.step, 24)}" if note.step is not None else ""), clean(note.text, limits.long // 2))
        for note in notes[:most]
    ]
    return (*pairs, ("", f"… {len(notes) - most} more")) if len(notes) > most else tuple(pairs)


def _tables(incident: Incident, limits: Limits) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    tables = []
    told = {"loss": incident.loss_words} if incident.loss_words else {}
    for title, data in (("objective", told), ("environment", incident.environment), ("settings", incident.settings)):
        pairs = [(clean(name, 60), clean(_flat(value, limits.text), limits.text)) for name, value in list(data.items())[: limits.items]]
        if len(data) > limits.items:
            pairs.append((f"… {len(data) - limits.items} more", ""))
        if pairs:
            tables.append((title, tuple(pairs)))
    if incident.opaque:
        names = ", ".join(_some(incident.opaque, limits.items // 2, 60))
        tables.append(("not recorded", (("operators", names),)))
    return tuple(tables)


def _flat(value: object, limit: int, depth: int = 3) -> str:
    """Settings as one line: {"torch": "2.13"} is torch 2.13."""
    if isinstance(value, dict):
        parts = [f"{key} {_flat(item, limit, depth - 1)}" for key, item in list(value.items())[:limit]] if depth else ["…"]
        return " · ".join(parts)
    if isinstance(value, (list, tuple)):
        return ", ".join(_flat(item, limit, depth - 1) for item in value[:limit]) if depth else "…"
    return numeral(value) if isinstance(value, float) else str(value)
