"""What a run writes into its directory: each file whole, a limit on all of them, and one warning when no more can be written.

What cannot be written stays in memory, and is written when the run ends if there is room again.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from nanscope.program.numbers import tensor_bytes
from nanscope.snapshot.aside import AT_ONCE, Aside
from nanscope.snapshot.file import save
from nanscope.snapshot.record import RunRecord
from nanscope.snapshot.runs import MAX_BYTES
from nanscope.snapshot.step import Snapshot
from nanscope.watching.share import Share

log = logging.getLogger("nanscope")


class Disk:
    """The directory of a run, as one of its processes writes to it. folder: None if nothing can be written anywhere.

    max_bytes: of all snapshots of the run. Consequences make room for causes, the oldest first; a cause that was written stays, and the
    first is written however large it is. problem: why something could not be written, "" as long as all was. share: of this process.
    aside: of the writes that training does not wait for.
    """

    def __init__(self, folder: Path | None, max_bytes: int = MAX_BYTES, share: Share | None = None, aside: Aside = AT_ONCE) -> None:
        self.folder, self._max_bytes, self._share, self.aside = folder, max_bytes, share, aside
        self.problem = ""
        self._sizes: dict[Path, int] = {}
        self._consequences: list[Path] = []
        self._record: RunRecord | None = None  # as it is to be written

    def write(self, record: RunRecord) -> None:
        """Write what the run says of itself."""
        if self.folder is not None:
            try:
                self._record = record
                self.aside.do(self._write_record)
            except OSError as error:
                self.failed(f"{record.file_name} could not be written", error)

    def save(self, snapshot: Snapshot) -> Path | None:
        """Write a snapshot, in place of an earlier state of it; None if it could not be written, or if there is no room for it."""
        if self.folder is None or self.leaves(snapshot):
            return None
        path = self.folder / snapshot.file_name
        need = tensor_bytes(snapshot.tensors) + tensor_bytes(snapshot.grads)
        if path not in self._sizes and not self._make_room(need, snapshot):
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save(snapshot, self.folder)
            self._sizes[path] = path.stat().st_size
        except OSError as error:
            self.failed(f"step {snapshot.step} could not be saved", error)
            return path if self.holds(path) else None
        if snapshot.consequence_of is not None and path not in self._consequences:
            self._consequences.append(path)
        return path

    def leaves(self, snapshot: Snapshot) -> bool:
        """Is a snapshot left to other ranks, which have the same?"""
        return self._share is not None and self._share.leaves(snapshot)

    def holds(self, path: Path) -> bool:
        """Is a snapshot that was written still there? A consequence may have made room, and a person or a script may have deleted it."""
        return path in self._sizes and path.exists()

    def failed(self, what: str, error: OSError) -> None:
        """Say, once, that something could not be written."""
        if not self.problem:
            self.problem = f"{what}: {error.strerror or error}"
            log.warning("nanscope [unwritten]: %s; training goes on, what is found is kept in memory", self.problem)

    def unsent(self, error: OSError) -> None:
        """Say that a store does not answer: what is written stays on this machine until it does."""
        self.problem = self.problem or str(error)
        log.warning("nanscope [unsent]: %s; training goes on, what is found is kept in %s", error, self.folder)

    def _write_record(self) -> None:
        if self.folder is not None and self._record is not None:
            self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
            self._record.write(self.folder)

    def end(self, patience: float) -> None:
        """Wait for what is not written yet, for so many seconds."""
        try:
            self.aside.end(patience)
        except OSError as error:
            self.failed("not all could be written", error)

    def _make_room(self, need: int, snapshot: Snapshot) -> bool:
        while self._is_over(need, snapshot):
            if not self._consequences or snapshot.consequence_of is not None:
                if not self.problem:
                    self.problem = f"step {snapshot.step} takes {need:,} bytes, and max_bytes leaves no room for it"
                    log.warning("nanscope [unwritten]: %s; it is kept in memory", self.problem)
                return False
            oldest = self._consequences.pop(0)
            with contextlib.suppress(OSError):
                oldest.unlink(missing_ok=True)
            del self._sizes[oldest]
        return True

    def _is_over(self, need: int, snapshot: Snapshot) -> bool:
        taken, most = sum(self._sizes.values()), self._max_bytes
        if self._share is not None:
            taken, most = self._share.taken(taken), self._share.limit(snapshot, most)
        return taken > 0 and taken + need > most
