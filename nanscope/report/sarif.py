"""The hazards of a check as SARIF 2.1.0, so that a code host shows each at its line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nanscope.causes import ADVICE, CAUSES
from nanscope.foresight.hazard import Check, Hazard
from nanscope.foresight.pushes import Severity
from nanscope.report.clean import LIMITS, clean
from nanscope.version import __version__

LEVELS = {Severity.REACHABLE: "error", Severity.BROKEN_DATA: "warning", Severity.THEORY: "note"}
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_of(check: Check) -> dict[str, Any]:
    """Return a check as a SARIF log: a rule for every cause, a result for every hazard that has a line."""
    causes = dict.fromkeys(hazard.cause for hazard in check.hazards)
    rules = [{"id": str(cause), "shortDescription": {"text": CAUSES[cause].title}} for cause in causes]
    results = [_result(hazard) for hazard in check.hazards if hazard.origin.file and (hazard.origin.line or 0) > 0]
    tool = {"driver": {"name": "nanscope", "version": __version__, "rules": rules}}
    run: dict[str, Any] = {"tool": tool, "results": results}
    if not check.complete:  # nothing here may be taken for the whole
        said = {"level": "warning", "message": {"text": check.sentence}}
        run["invocations"] = [{"executionSuccessful": True, "toolExecutionNotifications": [said]}]
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(hazard: Hazard) -> dict[str, Any]:
    fix = f" {ADVICE.get(hazard.fix.id, hazard.fix.label).capitalize()}." if hazard.fix is not None else ""
    place = {"artifactLocation": {"uri": _uri(hazard.origin.file or "")}, "region": {"startLine": hazard.origin.line}}
    return {
        "ruleId": str(hazard.cause),
        "level": LEVELS[hazard.severity],
        "message": {"text": _text(f"{hazard.trigger.words}: {hazard.spoils.words}. {hazard.sentence}{fix}")},
        "locations": [{"physicalLocation": place}],
    }


def _text(words: str) -> str:
    """Return words in which nothing hides, and nothing is a link: a message of SARIF takes `[words](address)` for one."""
    return clean(words, LIMITS[0].long).replace("](", "] (")


def _uri(file: str) -> str:
    """Return a file as a code host finds it: from the root of the checkout, which is where we are; another one as it is called.

    It is a path in any case, and never an address of another scheme or host.
    """
    path = Path(file)
    found = path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path
    return re.sub("^//+", "/", quote(clean(found.as_posix(), LIMITS[0].long)))
