"""Any result, as a notebook's cell and as a file: which renderer it has, by its class.

Notable: a cell is a frame (`<iframe srcdoc=… sandbox>`): the page's style stays in it, and the notebook's does not get in. The one
script that the page's own policy names may run there, in an origin of its own, from which the notebook cannot be reached. So the frame
cannot be told its height by it: it is given one by how much is in it; what is longer scrolls, and the corner can be pulled.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nanscope.given import a_path
from nanscope.report.exit import writing
from nanscope.report.render import choose, render
from nanscope.snapshot.files import write_whole

if TYPE_CHECKING:
    from nanscope.replay.tries import Replay
    from nanscope.replay.under import Others
    from nanscope.report.figures import FigureSheet
    from nanscope.snapshot.step import Snapshot
    from nanscope.verdict.incident import Incident, Verdict

LOWEST, HIGHEST = 160, 720  # CSS pixels of a cell
HEAD = 110  # of what is above and below the text of a page
HEIGHTS = {"<p": 27, "<li": 27, "<dt": 27, "<h3": 27, "<h2": 40, "<tr": 44, "<svg": 200}  # of what stands in it

FRAME = (
    '<div style="height:{height}px;min-height:120px;resize:vertical;overflow:hidden">'
    '<iframe sandbox="allow-scripts" title="nanscope" srcdoc="{page}" '
    'style="width:100%;height:100%;box-sizing:border-box;border:1px solid #8884;border-radius:6px"></iframe></div>'
)

Forms = Mapping[str, Callable[[Any], bytes]]


def cell(result: object) -> str:
    """Return what a notebook shows of a result: its page in a frame."""
    told = _told(result)
    page = FORMS[_called(told)]()[".html"](told).decode()
    page = re.sub(r'(<a [^>]*?)href="#[^"]*"', r"\1", page)  # in a frame some browsers would look for it in the notebook's address
    return FRAME.format(height=_height(page), page=escape(page, quote=True))


def write(result: object, path: str | os.PathLike[str]) -> None:
    """Write the report of a result; the suffix chooses the form. A reader never sees half a file.

    Raises NanscopeError for a suffix that no renderer has, and if the file cannot be written.
    """
    path = Path(a_path("report(…)", path, "the path of a file"))
    told = _told(result)
    form = choose(FORMS[_called(told)](), path)
    with writing(path):
        if _called(told) == "Verdict":
            render(cast("Verdict", told), path)  # which may leave a picture beside it
        else:
            write_whole(path, form(told))


def _told(result: object) -> object:
    """What a result is drawn as."""
    name = _called(result)
    return TOLD_AS[name](result) if name in TOLD_AS else result


def _called(result: object) -> str:
    """The class of a result by its name: of one that a person has derived, the one that is known here."""
    return next(kind.__name__ for kind in type(result).__mro__ if kind.__name__ in {*TOLD_AS, *FORMS})


def _height(page: str) -> int:
    """Return how high a page is shown, in CSS pixels: by what is in it, roughly."""
    body = page.partition("<body>")[2]
    return max(LOWEST, min(HIGHEST, HEAD + sum(each * body.count(tag) for tag, each in HEIGHTS.items())))


def _incident(incident: Incident) -> Verdict:
    from nanscope.verdict.incident import Verdict
    from nanscope.version import __version__

    return Verdict((incident,), steps=1, bad_steps=1, version=__version__)


def _replay(replay: Replay) -> Verdict | FigureSheet:
    """A step that goes wrong again is told as its incident, any other as what was run."""
    from nanscope.report.held import rows_sheet
    from nanscope.verdict.diagnose import diagnose

    if replay.bench is None or (replay.location is None and not replay.bench.snapshot.observation.outside):
        return rows_sheet(replay)
    return _incident(diagnose(replay.bench.snapshot, None, replay))


def _snapshot(snapshot: Snapshot) -> FigureSheet:
    from nanscope.report.held import sheet_of

    return sheet_of(snapshot)


def _others(others: Others) -> FigureSheet:
    from nanscope.report.held import others_sheet

    return others_sheet(others)


TOLD_AS: dict[str, Callable[[Any], object]] = {  # what has no page of its own
    "Incident": _incident,
    "Others": _others,
    "Replay": _replay,
    "Scope": lambda scope: scope.verdict,
    "Snapshot": _snapshot,
}


def _of_verdict() -> Forms:
    from nanscope.report.render import RENDERERS

    return {suffix: partial(_alone, form) for suffix, form in RENDERERS.items()}


def _alone(form: Callable[[Any, None], bytes], verdict: Verdict) -> bytes:
    return form(verdict, None)


def _of_sheet() -> Forms:
    from nanscope.report.figures import sheet_html, sheet_text

    return {
        ".html": lambda sheet: sheet_html(sheet).encode(),
        ".txt": lambda sheet: sheet_text(sheet).encode(errors="backslashreplace"),
        ".json": lambda sheet: _data(sheet.data),
    }


def _of_audit() -> Forms:
    from nanscope.report.audit import render_audit, sheet_of
    from nanscope.report.figures import sheet_html

    return {
        ".html": lambda audit: sheet_html(sheet_of(audit)).encode(),
        ".txt": lambda audit: render_audit(audit).encode(errors="backslashreplace"),
        ".json": lambda audit: _data(audit.to_json()),
    }


def _data(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def _of_check() -> Forms:
    from nanscope.report.check_page import RENDERERS

    return RENDERERS


def _of_precision() -> Forms:
    from nanscope.report.precision import RENDERERS

    return RENDERERS


def _of_atlas() -> Forms:
    from nanscope.report.atlas import RENDERERS

    return {suffix: partial(_text, form) for suffix, form in RENDERERS.items()}


def _text(form: Callable[[Any, None], str], result: Any) -> bytes:
    return form(result, None).encode()


FORMS: dict[str, Callable[[], Forms]] = {  # what it can be written as, by suffix; each renderer is imported when it is asked for
    "Atlas": _of_atlas,
    "Audit": _of_audit,
    "Check": _of_check,
    "FigureSheet": _of_sheet,
    "Precision": _of_precision,
    "Verdict": _of_verdict,
}
