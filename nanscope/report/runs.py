"""The runs of a folder, one a line, on the terminal.

began                script  status      steps  bad  ranks    size  nanscope report …
2026-11-21 20:15:03  train   non-finite    412    1      1  120 kB  nanscope-runs/2026-11-21T20-15-03-train
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import IO

from rich.console import Group
from rich.text import Text

from nanscope.report.clean import clean
from nanscope.report.console import HARM, PROVEN, QUIET, show, table
from nanscope.snapshot.record import Listed

SHOWN_BY = "nanscope report …"

STYLES = {"healthy": PROVEN, "non-finite": HARM, "suspect": HARM, "killed": HARM, "damaged": HARM}


def print_runs(runs: Sequence[Listed], folder: str, *, file: IO[str]) -> None:
    """Print a table of runs, the latest last."""
    if not runs:
        show(Text(f"no run in {clean(folder)}"), file=file)
        return
    shown = table("began", "script", "status", "steps", "bad", "ranks", "size", SHOWN_BY, under=SHOWN_BY, said="nanscope report ")
    for name in ("steps", "bad", "ranks", "size"):
        next(column for column in shown.columns if column.header == name).justify = "right"
    for run in runs:
        began = clean(run.started[:19].replace("T", " "), 19)
        status = Text(clean(run.status, 24), STYLES.get(run.status, QUIET))
        counts = (f"{run.steps}", f"{run.bad_steps}", f"{run.ranks}", _size(run.size))
        shown.add_row(began, clean(run.script, 40), status, *counts, Text(shlex.quote(clean(run.path))))
    show(Group(shown), file=file)


def _size(many: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if many < 1000 or unit == "GB":
            break
        many /= 1000
    return f"{many:.0f} {unit}" if many >= 10 or unit == "B" else f"{many:.1f} {unit}"
