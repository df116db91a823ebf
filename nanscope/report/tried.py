"""The one table of what was tried on a recorded step; every renderer draws its rows and decides nothing about them.

replay          what                            loss     input gradients  healthy tokens
as_recorded     as recorded                     NaN      1 of 1 bad       –               reproduces bit for bit
mask_before_op  fill logps - old with 0 where   −0.9048  finite           unchanged       ✓ best
where_after_op  torch.where on ratio, after …   −0.9048  1 of 1 bad       –               ✗ tempting, and wrong
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from nanscope.locate.layout import Layout
from nanscope.plain import show
from nanscope.report.clean import LIMITS, WHOLE, Limits, clean, numeral, real
from nanscope.snapshot.observation import FOLK, TEST, Row
from nanscope.text import is_exact
from nanscope.verdict.incident import Fix, Incident

INPUT_GRADIENTS = "input gradients"  # of what comes into the loss
UNRUN = "makes the loss finite; no gradient was run"
HEADS = ("replay", "what", "loss", INPUT_GRADIENTS, "healthy {unit}", "outcome")


def unit_of(incident: Incident) -> str:
    """Return what the offending tensor has its numbers for: tokens, or elements where it is known to have no tokens."""
    of_tokens = incident.tokens is None or bool(incident.origin.batch) or incident.tokens.layout in (Layout.TOKENS, Layout.ROWS)
    return "tokens" if of_tokens else "elements"


def unmeasured(incident: Incident) -> str:
    """Return what is said of a fix that heals, where no number is left that it might have changed. Of a loss without any gradient, as that
    of a function whose backward is its own, no more is known than that it is finite."""
    without = any(row.kind == "recorded" and _has_no_gradient(row.loss, row.total) for row in incident.rows)
    return f"which {UNRUN}" if without else f"which heals; healthy {unit_of(incident)} not measured"


def _has_no_gradient(loss: float | None, total: int) -> bool:
    return loss is not None and not total


def heads_of(incident: Incident) -> tuple[str, ...]:
    """Return the heads of the table of what was tried."""
    return tuple(head.format(unit=unit_of(incident)) for head in HEADS)


@dataclass(frozen=True, slots=True)
class Tried:
    """One row, every cell clean text. state: "harm", "proven" or "quiet"; bad: a gradient is non-finite; best: the fix to take."""

    id: str
    label: str
    loss: str
    gradients: str
    healthy: str
    outcome: str
    state: str
    bad: bool = False
    best: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Rows under one heading."""

    title: str
    rows: tuple[Tried, ...]


ASKED, NOT_RUN = "asked for", "not run"
UNSHOWN = "causes that were tested, and are not it"
ADVISED = "settings that people advise"
WRONG, HIDDEN = "tempting, and wrong", "pass here, but mend the result and not its cause"
_OWN = {  # a control stands under what came of it
    "recorded": "as it was",
    "float64": "as it was",
    "fix": "fixes",
    "control": "",
    FOLK: ADVISED,
    TEST: UNSHOWN,
}
_ORDER = ("as it was", "fixes", ASKED, ADVISED, WRONG, HIDDEN, UNSHOWN, NOT_RUN)
_OUTCOMES = {  # by kind of row, and whether it works
    ("float64", True): ("reference", "quiet"),
    ("float64", False): ("fails even in float64", "quiet"),
    (TEST, False): ("✗ still there", "quiet"),
    ("control", True): ("finite here, but the bad value is only hidden", "quiet"),
    ("control", False): ("✗ tempting, and wrong", "harm"),
}


def best_of(incident: Incident) -> Fix | None:
    """Return the first fix that is proven: it was run, works, and leaves the healthy tokens alone."""
    return next((fix for fix in incident.fixes if fix.executed and fix.proven), None)


def tested(incident: Incident, limit: int = WHOLE.text) -> str:
    """Return the test that the cause has passed, "" if none was run: "with lens as 1 where it is 0: this origin is gone"."""
    test = next((row for row in incident.rows if row.kind == TEST and row.works), None)
    if test is None:
        return ""
    return clean(f"{test.label}: this origin is gone" + (f", and the next is {test.then}" if test.then else ""), limit)


def groups_of(incident: Incident, limits: Limits = LIMITS[0]) -> tuple[Group, ...]:
    """Return the table: what was recorded, fixes, what was asked for, the tempting wrong ones, and what could not be run."""
    grouped = groupby(_table(incident, limits), key=lambda line: line[0])
    return tuple(Group(title, tuple(tried for _, _, tried in lines)) for title, lines in grouped)


def tried_json(incident: Incident) -> list[dict[str, Any]]:
    """Return the table as JSON data: the figures of every row, and what the table says of it."""
    return [
        show(asdict(row)) | {"proven": row.proven, "outcome": tried.outcome, "best": tried.best}
        for _, row, tried in _table(incident, WHOLE)
    ]


def _table(incident: Incident, limits: Limits) -> list[tuple[str, Row, Tried]]:
    """Every row with the heading that it stands under and as it is shown, in the order of the headings."""
    best = best_of(incident)
    chosen = next((row for row in incident.rows if best and row.kind != "control" and (row.id, row.label) == (best.id, best.label)), None)
    shown = [row for row in incident.rows if not (row.kind == TEST and row.works)]  # that of the cause is told with it
    unit = unit_of(incident)
    lines = [(_title(row), row, _tried(row, row is chosen, limits, unit)) for row in shown[: limits.rows]]
    return sorted(lines, key=lambda line: _ORDER.index(line[0]))


def _title(row: Row) -> str:
    if row.kind not in _OWN:
        return ASKED
    if not _ran(row):
        return NOT_RUN
    return _OWN[row.kind] or (HIDDEN if row.works else WRONG)


def _ran(row: Row) -> bool:
    return row.loss is not None or row.total > 0  # a program that ends in a gradient has no loss


def _tried(row: Row, best: bool, limits: Limits, unit: str) -> Tried:
    words, state = _outcome(row, best, clean(row.note, limits.text), unit)
    told = Tried(clean(row.id, 60), clean(row.label, limits.text), "–", "–", "–", words, state)
    if not _ran(row):
        return told
    of_tokens = " tokens" if row.kind == "objective" else ""
    gradients = f"{row.bad} of {row.total}{of_tokens} bad" if row.bad else "finite" if row.total else "–"
    healthy = "–" if row.bad or _lost(row.loss) else distortion_words(real(row.distortion))
    return replace(told, loss=numeral(row.loss), gradients=gradients, healthy=healthy, bad=row.bad > 0, best=best)


def _lost(loss: object) -> bool:
    value = real(loss)
    return value is not None and not math.isfinite(value)


def _outcome(row: Row, best: bool, note: str, unit: str) -> tuple[str, str]:
    if not _ran(row):
        return f"not run: {note}" if note else "not run", "quiet"
    if row.kind == "recorded":
        return note, "quiet"
    if (row.kind, row.works) in _OUTCOMES:
        return _OUTCOMES[row.kind, row.works]
    if row.kind == FOLK:
        words = "✓ would have helped" if row.works else "✗ does not help"
        return f"{words}: {note}" if note else words, "proven" if row.works else "harm"
    if not row.works:
        return f"✗ then {clean(row.then, 60)}" if row.then else f"✗ {note or 'does not heal'}", "harm"
    price = clean(row.cost, 120) or (UNRUN if _has_no_gradient(row.loss, row.total) else _price(row.distortion, unit))
    return (("✓ best" if best else "✓ heals, too"), "proven") if row.proven else (f"≈ {price}", "quiet")


def _price(distortion: float | None, unit: str) -> str:
    """What an edit that works and is not proven costs, or that nobody knows."""
    words = distortion_words(real(distortion))
    if words == "–":
        return f"heals; healthy {unit} not measured"
    return f"changes healthy {unit} by {words.removeprefix('off by ')}" if words.startswith("off") else f"healthy {unit} {words}"


def distortion_words(distortion: float | None) -> str:
    """Return what a change does to the gradient of the healthy elements: "unchanged", "off by 25 %"."""
    if distortion is None:
        return "–"
    if is_exact(distortion):
        return "unchanged"
    if not math.isfinite(distortion):
        return "lost"
    return f"off by {100 * distortion:.0f} %" if 0.095 <= distortion < 100 else f"off by {100 * distortion:.2g} %"


def fix_words(fix: Fix, unit: str) -> str:
    """Return what came out under a fix that works. unit: as `unit_of` has it."""
    healthy = distortion_words(real(fix.distortion))
    gradients = "no gradient was run" if _has_no_gradient(fix.loss, fix.total) else f"{INPUT_GRADIENTS} finite"
    return f"loss {numeral(fix.loss)} · {gradients}" + (f" · healthy {unit} {healthy}" if healthy != "–" else "")


def reproduction(incident: Incident) -> str:
    """Return whether the recorded step came out again, "" if there was nothing to compare with."""
    words = clean(incident.reproduction.words)
    if incident.reproduces is False:
        words += ": the fault was transient, or lies outside the program"
    return f"the recorded step {words}" if words.startswith(("reproduces", "does")) else f"the recorded step: {words}" if words else ""
