"""Writes that training does not wait for: a folder on the network may answer late, or not at all for an hour.

On a disk of this machine a write is made at once. Elsewhere a thread makes it, in order; who writes waits for that, so that a process that
is killed has written what it did, but no longer than a small part of the time that has gone by.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

FIRST, PART = 0.2, 0.01  # seconds that may be waited for, and the part of all time since
MOUNTS = Path("/proc/self/mountinfo")

# Kinds of file systems that are disks of this machine, or its memory.
NEAR = frozenset(
    ("apfs", "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "hfs", "ntfs", "ntfs3", "overlay", "ramfs", "reiserfs")
) | {"tmpfs", "vfat", "xfs", "zfs"}


class Aside:
    """The writes into one folder. near: it answers at once."""

    def __init__(self, near: bool = True) -> None:
        self._near = near
        self._left: deque[Callable[[], None]] = deque()  # the first is being made
        self._changed = threading.Condition()
        self._began, self._waited = time.monotonic(), 0.0
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def do(self, write: Callable[[], None], *, wait: bool = True) -> None:
        """Have it written after what came before, once if it is still to be. Raises what this or an earlier write has raised."""
        if self._near:
            write()
            return
        with self._changed:
            if write not in islice(self._left, 1, None):
                self._left.append(write)
                self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._go_on, name="nanscope-writer", daemon=True)
                self._thread.start()
            if wait:
                now = time.monotonic()
                self._wait(FIRST + PART * (now - self._began) - self._waited)
                self._waited += time.monotonic() - now
        self._raise()

    def end(self, patience: float) -> None:
        """Wait for all of it, for so many seconds. Raises what `do` raises, and OSError if something is not written by then."""
        with self._changed:
            if not self._wait(patience):
                raise OSError(errno.ETIMEDOUT, "the folder does not answer")
        self._raise()

    def _wait(self, patience: float) -> bool:
        return self._changed.wait_for(lambda: not self._left, max(patience, 0.0))

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _go_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._left))
                write = self._left[0]
            try:
                write()
            except Exception as error:  # noqa: BLE001 - who writes next is told
                self._error = error
            with self._changed:
                self._left.popleft()
                self._changed.notify_all()


AT_ONCE = Aside()


def is_near(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Does a folder lie on a disk of this machine, as far as is known? mounts: the kernel's table of what is mounted where."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # a system without one
        return True
    path, kind, depth = Path(os.path.realpath(folder)), "", 0
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = Path(fields.split()[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= depth:  # of two at one place the later covers the earlier
            kind, depth = rest.split()[0], len(point.parts)
    return kind in NEAR or not kind
