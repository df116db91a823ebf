"""What other ranks of the run wrote into the same folder: a collective that asked them could be one that only some ranks enter."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from nanscope.errors import NanscopeError
from nanscope.snapshot.file import load
from nanscope.snapshot.history import Entry, read
from nanscope.snapshot.observation import Kind
from nanscope.snapshot.step import Snapshot

PATIENCE = 3.0  # seconds that a finished rank waits for the files of the others


TRIES = 8  # times that the others are asked for a step; their files may lie on another machine


class Peers:
    """The other ranks' histories. rank: our own."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._asked: Counter[int] = Counter()

    def lines(self, steps: Collection[int], patience: float) -> dict[int, list[Entry]]:
        """Return what the others wrote of these steps, once: of those of which all have written. patience: seconds to wait for them."""
        wanted = {step for step in steps if self._asked[step] < TRIES}
        self._asked.update(wanted)
        until = time.monotonic() + patience
        while wanted:
            others = [path for path in sorted(self._folder.glob("history.rank*.jsonl")) if path.name != f"history.rank{self._rank}.jsonl"]
            lines = [{entry.step: entry for entry in read(path)} for path in others]
            found = {step: [own[step] for own in lines] for step in sorted(wanted) if lines and all(step in own for own in lines)}
            if len(found) == len(wanted) or time.monotonic() >= until:
                self._asked.update(dict.fromkeys(found, TRIES))
                return found
            time.sleep(0.1)
        return {}


def of_other_ranks(folder: Path, own: Sequence[Snapshot], *, wait: bool) -> dict[str, Snapshot]:
    """Return the snapshots that other ranks wrote for the steps at which a NaN arrived from elsewhere, by path."""
    steps = {snapshot.step for snapshot in own if snapshot.observation.kind is Kind.ARRIVED}
    ranks = {snapshot.rank for snapshot in own}
    found: dict[str, Snapshot] = {}
    until = time.monotonic() + (PATIENCE if wait else 0.0)
    while steps:
        for path in sorted(path for step in steps for path in folder.glob(f"step-{step:06d}.rank*.safetensors")):
            if str(path) not in found:
                with contextlib.suppress(NanscopeError):
                    snapshot = load(path)
                    if snapshot.rank not in ranks:
                        found[str(path)] = snapshot
        made = {path: snapshot for path, snapshot in found.items() if snapshot.observation.kind is not Kind.ARRIVED}
        if made or time.monotonic() >= until:
            return made
        time.sleep(0.1)
    return {}
