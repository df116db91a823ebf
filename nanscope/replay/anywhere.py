"""`nanscope.replay`: a saved step, run again and changed, by the step itself, its path or its address."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nanscope.given import texts
from nanscope.replay import tries
from nanscope.replay.edits import parse_edit
from nanscope.replay.tries import Replay
from nanscope.snapshot.anywhere import loaded
from nanscope.snapshot.step import Snapshot


def replay(snapshot: Snapshot | str | os.PathLike[str], edits: str | Sequence[str] = ()) -> Replay:
    """Run a saved step again: as recorded, in float64, and with edits at the origin, each forward and backward.

    snapshot: a saved step, its path or address. edits: to be tried beside the usual ones, as on the command line: "clamp:20", "mask",
    "clamp_denominator:1e-8"; one may be given as it is.
    Raises NanscopeError for an edit that is not known, SnapshotError if the file cannot be read, ProgramError if the step cannot be run.
    """
    asked = [(text, parse_edit(text)) for text in texts("edits", edits, "names of edits, as clamp:20")]
    return tries.replay(loaded(snapshot, "replay(…)"), asked)
