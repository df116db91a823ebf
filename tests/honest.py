"""What no verdict may do, whatever the step: tick what was not measured, recommend what changes healthy tokens, contradict itself."""

from __future__ import annotations

from collections.abc import Iterator

from contradictions import contradictions

from nanscope.report.html import render_html
from nanscope.report.tried import best_of, tried_json
from nanscope.snapshot.observation import CHANGED, HOOKED
from nanscope.text import MOST
from nanscope.verdict.incident import Incident, Verdict


def dishonest(incident: Incident) -> list[str]:
    """Return what is said of an incident and not true, or not everywhere the same."""
    said = contradictions(incident.origin, incident.phase, incident.cause, incident.sentence, incident.blame)
    return [*_rows(incident), *_fixes(incident), *_reproduction(incident), *said]


def _rows(incident: Incident) -> Iterator[str]:
    for row in tried_json(incident):
        if row["kind"] not in ("fix", "asked"):
            continue
        measured = isinstance(row["distortion"], float) and row["distortion"] <= MOST and not row["cost"]
        if row["outcome"].startswith("✓") != (row["works"] and measured) or row["proven"] != (row["works"] and measured):
            yield f"{row['id']}: {row['outcome']}, distortion {row['distortion']}"
        if row["best"] and not row["proven"]:
            yield f"{row['id']} is the best, and not proven"


def _fixes(incident: Incident) -> Iterator[str]:
    executed = [fix for fix in incident.fixes if fix.executed]
    if any(fix.proven for fix in executed) and not executed[0].proven:
        yield f"{executed[0].id} is named before what is proven"
    best = best_of(incident)
    rows = [row["id"] for row in tried_json(incident) if row["best"]]
    if rows != ([best.id] if best else []):
        yield f"the best is {best}, and in the table {rows}"


def _reproduction(incident: Incident) -> Iterator[str]:
    found = incident.reproduction
    recorded = [row for row in tried_json(incident) if row["kind"] == "recorded"]
    for row in recorded if found.loss is not None else ():  # the rows of a step that was tried in the process are that process's
        if row["outcome"] != found.words:
            yield f"as recorded: {row['outcome']}; and {found.words}"
    if (found.words == "reproduces bit for bit") != (found.exact is True and found.gradients == 0):
        yield f"{found.words}: {found}"
    if found.exact is False and incident.origin.op not in (HOOKED, CHANGED):  # it was recorded on this machine a moment ago
        yield f"does not come out again: {found}"
    told = _json(incident)["reproduction"]["words"] == found.words
    if not told or (found.words and found.words not in " ".join(render_html(Verdict((incident,))).split())):
        yield f"not everywhere: {found.words}"


def _json(incident: Incident) -> dict[str, dict[str, str]]:
    (found,) = Verdict((incident,)).to_json()["incidents"]
    return dict(found)
