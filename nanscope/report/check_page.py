"""A check as a file: a page, text, JSON or SARIF, by the suffix."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanscope.foresight.hazard import Check
from nanscope.foresight.pushes import Severity
from nanscope.report.check import render_check
from nanscope.report.check_lines import ToldLine, ToldTrigger, fixed_of, guards_of, head_of, healed_of, lines_of, nearest_of
from nanscope.report.clean import LIMITS, clean
from nanscope.report.headline import Fact
from nanscope.report.render import choose
from nanscope.report.sarif import sarif_of
from nanscope.report.template import fill
from nanscope.report.way import SourceLine, source_lines
from nanscope.snapshot.files import write_whole
from nanscope.version import __version__

MOST = 24  # lines of one severity that are shown, and guards
TONES = {Severity.REACHABLE: "harm", Severity.BROKEN_DATA: "doubt", Severity.THEORY: "quiet"}
NEEDS = {  # what it takes, under each heading
    Severity.REACHABLE: "Nothing has to be broken: a run gets to these numbers by itself.",
    Severity.BROKEN_DATA: "NaN or an infinity has to come in where the loss counts it.",
    Severity.THEORY: "Finite numbers that no run is known to reach.",
}


@dataclass(frozen=True, slots=True)
class ShownLine:
    """A line that would die, with its source where that is known."""

    op: str
    code: str
    where: str
    triggers: tuple[ToldTrigger, ...]
    source: tuple[SourceLine, ...]


@dataclass(frozen=True, slots=True)
class HazardPart:
    """All lines of one severity. more: that are left out."""

    title: str
    needs: str
    tone: str
    lines: tuple[ShownLine, ...]
    more: int


def write_check(check: Check, path: Path) -> None:
    """Write it; the suffix chooses the form.

    Raises NanscopeError for a suffix that no renderer has, OSError if the file cannot be written.
    """
    write_whole(path, choose(RENDERERS, path)(check))


def parts_of(check: Check) -> tuple[HazardPart, ...]:
    """Return what the page shows of a check's hazards, worst first; a severity without any is left out."""
    told = ((severity, lines_of(check, severity)) for severity in Severity)
    return tuple(
        HazardPart(
            severity.words,
            NEEDS[severity],
            TONES[severity],
            tuple(_shown(line, severity) for line in lines[:MOST]),
            max(0, len(lines) - MOST),
        )
        for severity, lines in told
        if lines
    )


def facts_of_check(check: Check) -> tuple[Fact, ...]:
    """Return the figures at the top of the page."""
    many = {severity: sum(hazard.severity is severity for hazard in check.hazards) for severity in Severity}
    counts = [Fact(severity.words, str(many[severity]), "", TONES[severity] if many[severity] else "") for severity in Severity]
    silent = sum(hazard.spoils.silent for hazard in check.reachable)
    told = [Fact("of these silent", str(silent), "the loss looks well", "")] if silent else []
    tried = "of the step" if check.complete else f"{check.left} of {check.places} places left out"
    rest = (Fact("guarded", str(len(check.guards)), "", ""), Fact("runs", str(check.runs), tried, "" if check.complete else "doubt"))
    return (*counts[:1], *told, *counts[1:], *rest)


def _shown(line: ToldLine, severity: Severity) -> ShownLine:
    source = tuple(source_lines(line.first.origin, LIMITS[1])) if severity is Severity.REACHABLE else ()
    return ShownLine(line.op, line.code, line.where, line.triggers, source)


def _html(check: Check) -> bytes:
    guards, fixed = guards_of(check), fixed_of(check)
    return fill(
        "check.html",
        ("page.css", "check.css"),
        version=__version__,
        head=head_of(check),
        sentence=clean(check.sentence),
        tone="harm" if check.reachable else "proven" if check.complete else "doubt",
        healed=healed_of(check),
        nearest=nearest_of(check),
        facts=facts_of_check(check),
        parts=parts_of(check),
        guards=guards[:MOST],
        more_guards=max(0, len(guards) - MOST),
        fixed=[list(enumerate(words.split("`"))) for words in fixed],  # every second piece is code
    ).encode()


def _text(check: Check) -> bytes:
    return render_check(check).encode(errors="backslashreplace")


def _data(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


RENDERERS: dict[str, Callable[[Check], bytes]] = {
    ".html": _html,
    ".txt": _text,
    ".json": lambda check: _data(check.to_json()),
    ".sarif": lambda check: _data(sarif_of(check)),
}
