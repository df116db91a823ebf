"""Each loss of a run is checked once, when it is first seen healthy: `nanscope run --check`, `nanscope.watch(check=True)`.

    nanscope [check]: step 1: 6 hazards, 4 of them reachable in training; next: nanscope check runs/…/batch-000001.rank0.safetensors
    nanscope [check]: ratio = torch.exp(log_ratio), loss.py:206: old_logps[0, 3], at a masked token, falls by 88.7 nats: …; fix: …

It runs in the trainer's process, on what the backward pass has read, and training waits for it; of several ranks the first one checks.
"""

from __future__ import annotations

from nanscope.foresight.search import check
from nanscope.program.program import Program
from nanscope.watching.keeping import Keeper
from nanscope.watching.logbook import Logbook
from nanscope.watching.place import rank_and_world
from nanscope.watching.recording import Recording

LOSSES = 4  # of one process that are checked: an actor's, a critic's, and two more


class Beforehand:
    """Checks the losses of one process. wanted: was that asked for?"""

    def __init__(self, keeper: Keeper, logbook: Logbook, wanted: bool) -> None:
        self._keeper, self._logbook, self._wanted = keeper, logbook, wanted
        self._known: set[object] = set()

    def look(self, recording: Recording) -> None:
        """A backward pass has ended in which nothing was seen to be wrong."""
        if not self._wanted or len(self._known) >= LOSSES:
            return
        program = recording.program
        if program is None or not program.calls or _line(program) in self._known:
            return
        self._known.add(_line(program))  # whatever becomes of it: what failed once fails again
        snapshot = self._keeper.healthy(recording) if rank_and_world()[0] == 0 else None
        if snapshot is not None:
            self._logbook.keep_check(check(snapshot), snapshot)


def _line(program: Program) -> object:
    """What tells a loss from another: the line that makes it."""
    maker = program.maker(program.output)
    site = None if maker is None else program.site_of(maker)
    return None if site is None else (site.file, site.line)
