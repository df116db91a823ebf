"""`nanscope.diagnose`: the verdict on a run, or on saved steps, by what a person has of them.

Notable: it is not called `nanscope.verdict`, as what it returns, since that is this room; `diagnose` is what is done here all along.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nanscope.given import a_path, several
from nanscope.snapshot.anywhere import loaded
from nanscope.snapshot.fetched import fetched
from nanscope.snapshot.remote import is_remote
from nanscope.snapshot.runs import find_run
from nanscope.snapshot.step import Snapshot
from nanscope.verdict.diagnose import Question, explained, verdict
from nanscope.verdict.incident import Verdict
from nanscope.verdict.run import verdict_of

TAKES = "a run directory, a folder of runs, a snapshot, or several snapshots of one run"

Given = Snapshot | str | os.PathLike[str]


def diagnose(what: Given | Sequence[Given]) -> Verdict:
    """Return the verdict on a run, or on saved steps: what went wrong, why, and which fix works.

    what: a run directory, a folder of runs (the latest is taken), a snapshot, by its path or address or as `load` returns it; or several
    snapshots of one run.
    Raises NanscopeError with the slug "no-run" if there is no run, SnapshotError if a file cannot be read.
    """
    if not isinstance(what, (Snapshot, str, os.PathLike)):
        ones = several("diagnose(…)", what, TAKES)
        snapshots, paths = [loaded(one, "diagnose(…)") for one in ones], [_path_of(one) for one in ones]
        return verdict(snapshots, paths, files=[None if path is None or is_remote(path) else Path(path) for path in paths])
    if isinstance(what, Snapshot):
        return verdict([what])
    where = a_path("diagnose(…)", what, TAKES)
    with fetched(where) as here:
        if here.path.is_file():
            return verdict((), incidents=explained([Question(file=here.path, shown=where)]))
        return verdict_of(find_run(here.path)[0], shown=here.address)


def _path_of(one: Given) -> str | None:
    return None if isinstance(one, Snapshot) else os.fspath(one)
