"""What other ranks of the run wrote into the same folder: a collective that asked them could be one that only some ranks enter.

However many there are, a rank asks a few, by the names of their files: a folder may list late, and a thousand ranks that read each other's
files would be a million reads.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from nanscope.errors import NanscopeError
from nanscope.snapshot.alignment import called_by
from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.file import load
from nanscope.snapshot.history import Entry, last_entries, last_entry
from nanscope.snapshot.observation import Kind
from nanscope.snapshot.record import RUNNING, RunRecord, record_of
from nanscope.snapshot.runs import bad_step_files, history_path, step_and_rank
from nanscope.snapshot.step import Snapshot
from nanscope.verdict.standing import say_ranks, told_of

PATIENCE = 3.0  # seconds that a finished rank waits for the files of the others
PART = 0.1  # of the time that the run took, which waiting for its end may take at most


LATELY = 1 << 13  # bytes of another rank's history that are read: the last steps
TRIES = 8  # times that the others are asked for a step; their files may lie on another machine
ALL = 16  # ranks of which each asks all others


class Peers:
    """The other ranks' files. rank, worker: our own. world: how many there are, 0 or 1 where there is nobody to ask."""

    def __init__(self, folder: Path, rank: int, world: int, worker: str = "") -> None:
        self._folder, self._rank, self._world, self._worker = folder, rank, world, worker
        self._near = near(rank, world)
        self._asked: Counter[int] = Counter()

    def asks(self, steps: Collection[int]) -> bool:
        """Are the others still to be asked for one of these steps?"""
        return any(self._asked[step] < TRIES for step in steps)

    def lines(self, steps: Collection[int], patience: float, dropped: Sequence[int] = ()) -> dict[int, list[Entry]]:
        """Return what others wrote of these steps, once: of those of which all that are asked have written. patience: seconds to wait.

        dropped: our own numbers of steps that the trainer dropped here.
        """
        wanted = {step for step in steps if self._asked[step] < TRIES}
        self._asked.update(wanted)
        found: dict[int, list[Entry]] = {}
        for _ in _pauses(patience) if wanted and self._near else ():
            lines = [self._lines_of(rank, wanted, dropped) for rank in self._near]
            found = {step: [own[step] for own in lines] for step in sorted(wanted) if all(step in own for own in lines)}
            if len(found) == len(wanted):
                break
        self._asked.update(dict.fromkeys(found, TRIES))
        return found

    def _lines_of(self, rank: int, steps: Collection[int], dropped: Sequence[int]) -> dict[int, Entry]:
        """Return the lines of steps by our numbers, whatever the other rank calls them."""
        theirs = self._record_of(rank)
        names = {step: step if theirs is None else called_by(step, dropped, theirs.dropped) for step in steps}
        last = last_entries(history_path(self._folder, rank, self._worker), LATELY)
        known = {entry.step: entry for entry in takewhile(lambda entry: entry.step >= min(names.values()), last)}
        return {step: known[name] for step, name in names.items() if name in known}

    def unheard(self, patience: float) -> str:
        """Return which ranks have not ended the run, in words, "" if all have; rank 0 asks for all. patience: seconds to wait for them."""
        missing = [rank for rank in range(self._world) if rank != self._rank] if self._rank == 0 else []
        for _ in _pauses(patience):
            missing = [rank for rank in missing if not self._has_ended(rank)]
            if not missing:
                return ""
        last = last_entry(history_path(self._folder, missing[0], self._worker))
        line = "there is no line of it" if last is None else f"its last line is step {last.step}"
        names = say_ranks(missing, self._world)
        return f"{names} has not reported: {line}" if len(missing) == 1 else f"{names} have not reported"

    def _has_ended(self, rank: int) -> bool:
        record = self._record_of(rank)
        return record is not None and record.status != RUNNING

    def _record_of(self, rank: int) -> RunRecord | None:
        with contextlib.suppress(NanscopeError):
            return record_of(self._folder, rank, self._worker)
        return None


def near(rank: int, world: int) -> tuple[int, ...]:
    """Return whom a rank asks: all others where they are few, else those whose number differs from its own in one bit.

    Whatever mesh the ranks are laid out in, some of these are in each of its groups.
    """
    few = range(world) if world <= ALL else sorted(rank ^ (1 << bit) for bit in range(world.bit_length()))
    return tuple(other for other in few if other != rank and other < world)


def _pauses(patience: float) -> Iterator[None]:
    """Yield now, and after ever longer pauses until the patience is spent, the last time when it is."""
    until, pause = time.monotonic() + patience, 0.02
    while True:
        yield
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause *= 2


def of_other_ranks(folder: Path, own: Sequence[Snapshot], *, wait: bool, dropped: Sequence[int] = ()) -> dict[str, Snapshot]:
    """Return the snapshots of other ranks that made what arrived from elsewhere at these steps, by path: one of each cause.

    Their steps have our numbers, whatever they are called there. dropped: our own numbers of steps that the trainer dropped here.
    """
    steps = {snapshot.step for snapshot in own if snapshot.observation.kind is Kind.ARRIVED}
    ranks, workers = {snapshot.rank for snapshot in own}, {snapshot.worker for snapshot in own}
    made: dict[BadStep, Path] = {}
    for _ in _pauses(PATIENCE if wait else 0.0) if steps else ():
        named = [(*numbers, path) for path in bad_step_files(folder) if (numbers := step_and_rank(path)) is not None]
        names = {rank: [_names(folder, rank, worker, dropped) for worker in workers] for _, rank, _ in named if rank not in ranks}
        for step, path in [(ours(step), path) for step, rank, path in named for ours in names.get(rank, ()) if ours(step) in steps]:
            with contextlib.suppress(NanscopeError):
                one = BadStep.read(path)
                if not one.came.arrived and one.worker in workers:
                    made[replace(one, step=step)] = path
        if made:
            break
    found: dict[str, Snapshot] = {}
    for one in told_of(made):
        with contextlib.suppress(NanscopeError):
            found[str(made[one])] = replace(load(made[one]), step=one.step)
    return found


def _names(folder: Path, rank: int, worker: str, own: Sequence[int]) -> Callable[[int], int]:
    """Return what we call a step, given what another rank calls it. own: the steps that the trainer dropped here, by our numbers."""
    theirs: Sequence[int] = ()
    with contextlib.suppress(NanscopeError):
        record = record_of(folder, rank, worker)
        theirs = () if record is None else record.untaken
    return lambda step: called_by(step, theirs, own)
