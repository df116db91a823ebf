"""A check as rows of clean text: the lines that would die, by severity, each with its triggers and fixes; every renderer shows these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from nanscope.foresight.hazard import Check, Hazard
from nanscope.foresight.pushes import Severity
from nanscope.report.clean import clean
from nanscope.text import is_exact, is_spared, number

HALF = ("bfloat16", "float16")
OTHERS = 3  # further triggers that are told of one
ADVISED = "advised, not run"


@dataclass(frozen=True, slots=True)
class ToldTrigger:
    """One way in which a line dies. trigger: what is put in. spoils: what that does. silent: the loss looks well. fix: the best edit, "" if
    none is known; proof: what was seen of it, state: how good that is, "proven", "doubt", "harm" or "quiet". others: further triggers.
    headroom: how the run was moving towards it, "" where nobody knows."""

    trigger: str
    spoils: str
    silent: bool
    fix: str
    proof: str
    state: str
    others: str
    headroom: str


@dataclass(frozen=True, slots=True)
class ToldLine:
    """A line that would die. op: what makes the first bad value, "input" where it comes in bad. first: the hazard that tells of its
    source."""

    op: str
    code: str
    where: str
    triggers: tuple[ToldTrigger, ...]
    first: Hazard


@dataclass(frozen=True, slots=True)
class ToldGuard:
    """A guard of the code, its place, and what would die without it."""

    code: str
    where: str
    without: str


def lines_of(check: Check, severity: Severity) -> list[ToldLine]:
    """Return the lines with a hazard of that severity, in the order of the check."""
    own = (hazard for hazard in check.hazards if hazard.severity is severity)
    return [_line(list(hazards)) for _, hazards in groupby(own, key=lambda hazard: (hazard.where, hazard.line))]


def guards_of(check: Check) -> list[ToldGuard]:
    """Return the guards of a check."""
    return [ToldGuard(clean(guard.expression), clean(guard.where), clean(guard.words)) for guard in check.guards]


def fixed_of(check: Check) -> list[str]:
    """Return what the recording has settled."""
    return [clean(words) for words in check.fixed]


def head_of(check: Check) -> str:
    """Return which step was checked, and how often it was run."""
    return f"step {check.step} · {number(check.runs)} run{'' if check.runs == 1 else 's'}"


def nearest_of(check: Check) -> str:
    """Return what the step is nearest to of all that training reaches, "" where none of that is a distance."""
    near = check.nearest
    place = "" if near is None or not near.where else f" ({clean(near.where)})"
    return "" if near is None else f"Nearest: {clean(near.trigger.words)}{place}, and {near.spoils.words}."


def healed_of(check: Check) -> str:
    """Return what was made ordinary before anything else, "" for a healthy step."""
    return f"the step was bad; ordinary numbers were put in: {clean(', '.join(dict.fromkeys(check.healed)))}" if check.healed else ""


def _line(hazards: Sequence[Hazard]) -> ToldLine:
    first = hazards[0]
    op = "input" if first.origin.op == "cut" else first.origin.op  # what was over the vocabulary is no matter here
    return ToldLine(clean(op), clean(first.line), clean(first.where), tuple(map(_trigger, hazards)), first)


def _trigger(hazard: Hazard) -> ToldTrigger:
    dtype = f" ({hazard.dtype})" if hazard.dtype in HALF and hazard.trigger.kind != "dtype" else ""
    more = len(hazard.others) - OTHERS
    others = clean("; ".join(hazard.others[:OTHERS])) + (f"; and {more} more" if more > 0 else "")
    fix = "" if hazard.fix is None else clean(hazard.fix.label)
    return ToldTrigger(
        clean(f"{hazard.trigger.words}{dtype}"),
        hazard.spoils.words,
        hazard.spoils.silent,
        fix,
        *_proof(hazard),
        others,
        clean(hazard.headroom),
    )


def _proof(hazard: Hazard) -> tuple[str, str]:
    """What was seen of the fix, and how good that is."""
    fix = hazard.fix
    if fix is None or not fix.executed:
        return ADVISED, "quiet"
    if not fix.works:
        return "does not help", "harm"
    if hazard.change is None:
        return "✓", "proven"
    if is_exact(hazard.change):
        return "✓ leaves the healthy step as it is", "proven"
    return f"✓ changes the healthy gradient by {number(100 * hazard.change)} %", "proven" if is_spared(hazard.change) else "doubt"
