"""The nodes on each of which a run was begun: who of them has ended, as their records say, and who shows the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nanscope.errors import NanscopeError
from nanscope.snapshot.record import nodes, records
from nanscope.text import count, listed
from nanscope.watching.job import Job

PATIENCE = 30.0  # seconds that a node waits at its end for the others: a launcher ends all of them
PAUSE = 0.5  # seconds between two looks; each may ask a store


class Nodes:
    """The nodes of one run. folder: of the run. own: the name of this one."""

    def __init__(self, folder: Path, own: str, job: Job) -> None:
        self._folder, self._own, self._job = folder, own, job

    def missing(self, gather: Callable[[], None], patience: float) -> str:
        """Return what of other nodes is not known, in words, "" if all have ended the run.

        gather: fetches what they wrote. patience: seconds to wait.
        """
        until = time.monotonic() + patience
        while True:
            gather()
            known = nodes(self._folder)
            running = sorted(name for name, ended in known.items() if not ended and name != self._own)
            unheard = self._unheard(set(known))
            if not (running or unheard) or time.monotonic() >= until:
                break
            time.sleep(PAUSE)
        told = [f"{listed(running)} did after {'it' if len(running) == 1 else 'they'} last reported"] * bool(running)
        told += [f"{unheard} did, of which there is no file"] * bool(unheard)
        return f"what {', and what '.join(told)}" if told else ""

    def _unheard(self, known: set[str]) -> str:
        few = self._job.nodes - len(known)
        if few <= 0:
            return ""
        if self._job.index is None:
            return f"{count(few, 'node')} of {self._job.nodes}"
        return (
            f"{listed([name for name in (f'node{index}' for index in range(self._job.nodes)) if name not in known])} of {self._job.nodes}"
        )

    def is_first(self) -> bool:
        """Is this the node that shows the verdict: the first one, or that of rank 0?"""
        if self._job.index is not None:
            return self._job.index == 0
        with suppress(NanscopeError):
            of_rank_0 = [record.node for record in records(self._folder) if record.member and record.who == (0, "") and record.node]
            return self._own == min(of_rank_0 or nodes(self._folder), default=self._own)
        return True
