"""The report as one self-contained page: no network, readable from file:// and on paper, and to be looked around in.

    page = render_html(scope.verdict)

The page is built in two moves: first plain data (`Page`, made of strings that are already clean and short), then `page.html` around it.
Everything that comes out of a run or a file is hostile until proven otherwise: it passes `clean` and is escaped by the template, and it
never lands in a style, a script or an id. The page has one script, ours, which its policy names by a hash: nothing else runs in it. What
that reads is JSON without a `<`. However large the run, the page stays below `MOST_BYTES`: rows of `LIMITS` are tried in order.
"""

from __future__ import annotations

from nanscope.foresight.precision_model import Precision
from nanscope.report.clean import LIMITS, clean
from nanscope.report.page import build, page_data
from nanscope.report.precision_tables import tables
from nanscope.report.template import fill
from nanscope.verdict.incident import Verdict

MOST_BYTES = 1_500_000
WINDOWS = (6, 3, 1, 0)  # of the map, that the script can go to; of none it has nothing to read


def render_html(verdict: Verdict, title: str | None = None, precision: Precision | None = None) -> str:
    """Return the report as a page, complete in itself.

    title: heading of the page and of the browser's tab; by default what happened at which step. precision: of the step, if it was measured.
    """
    measured = precision and {"sentence": clean(precision.sentence), "tables": tables(precision)}
    text = ""
    for windows, limits in ((windows, limits) for limits in LIMITS for windows in WINDOWS):
        page, data = build(verdict, title, limits), page_data(verdict, limits, windows) if windows else None
        data = data if data and (data["maps"] or data["charts"]) else None  # nothing to look around in
        text = fill("page.html", ("page.css", "precision.css"), "page.js", data, page=page, precision=measured)
        if len(text.encode()) < MOST_BYTES:
            break
    return text
