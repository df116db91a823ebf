"""What one rank may write of a run of many, so that a thousand ranks with the same NaN do not write it a thousand times.

A step that came from elsewhere is written by the first ranks only, and of ranks that make the same by themselves by those that come first:
they take a numbered place, a file that only one can make. All the others leave it to them, and say so in their record. What is on the disk
is counted for the whole run. No rank waits for another.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from nanscope.snapshot.step import Snapshot

FEW = 8  # ranks that write the same step

PLACES = ".places"


class Share:
    """The part of one rank. folder: of the run. world: how many ranks it has, 0 or 1 for a run of one process."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self._folder, self._rank, self._world = folder, rank, world
        self._known: dict[str, bool] = {}  # what of → is it ours to write?

    def leaves(self, snapshot: Snapshot) -> bool:
        """Is a step left to other ranks?"""
        if self._world <= FEW or snapshot.asked:
            return False
        if follows(snapshot):
            return self._rank >= FEW
        key = f"{snapshot.step:06d}-{hashlib.sha256(snapshot.site.encode()).hexdigest()[:8]}"
        if key not in self._known:
            self._known[key] = any(self._takes(f"{key}.{number}") for number in range(FEW))
        return not self._known[key]

    def taken(self, own: int) -> int:
        """Return the bytes of all snapshots of the run, as far as the folder lists them. own: of this rank's."""
        if self._world < 2:
            return own
        found = 0
        for path in self._folder.glob("*.safetensors"):
            with contextlib.suppress(OSError):
                found += path.stat().st_size
        return max(found, own)

    def limit(self, snapshot: Snapshot, max_bytes: int) -> int:
        """Return how much there may be on the disk: what came from elsewhere leaves room for what made it."""
        return max_bytes // 2 if self._world > 1 and follows(snapshot) else max_bytes

    def _takes(self, name: str) -> bool:
        places = self._folder / PLACES
        try:
            places.mkdir(exist_ok=True)
            (places / name).open("x").close()
        except FileExistsError:
            return False
        except OSError:  # whoever cannot ask writes: the disk says what is wrong with it
            return True
        return True


def follows(snapshot: Snapshot) -> bool:
    """Did a bad step come from an earlier one, or from another rank?"""
    return snapshot.consequence_of is not None or snapshot.came.arrived
