"""Keeps a directory on this machine and a remote one alike: a run writes here, and what it wrote is sent from a thread of its own.

Training never waits for a store, but at the end of the block, and then for so many seconds; what could not be sent by then stays where it
is, and the log says where that is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nanscope.snapshot.history import SUFFIX as HISTORY
from nanscope.snapshot.remote import Kept, Remote

PERIOD = 60.0  # seconds between two sendings of a history, which is sent whole: stores cannot append
SHARE = 1 << 16  # bytes a second that a history may take of the line, so that a long one is sent less often
AGAIN = 5.0  # seconds until a store that failed is asked again


class Mirror:
    """One directory and its remote. failed: told once, when a store fails for the first time; called in the thread that sends."""

    def __init__(self, folder: Path, remote: Remote, failed: Callable[[OSError], None]) -> None:
        self.folder, self.remote = folder, remote
        self._failed: Callable[[OSError], None] | None = failed
        self._due: dict[str, float] = {}  # name of a file → when it may be sent, by the monotonic clock
        self._sent: dict[str, float] = {}
        self._known: dict[str, Kept] = {}
        self._changed, self._closing = threading.Condition(), False
        self._sender: threading.Thread | None = None

    def changed(self, name: str) -> None:
        """Send a file when there is time: a history once a while, everything else at once. A file that is gone is removed there."""
        with self._changed:
            if name not in self._due:
                self._due[name] = self._next(name)
                self._changed.notify()
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_all, name="nanscope-mirror", daemon=True)
                self._sender.start()

    def fetch(self, pattern: str) -> None:
        """Fetch what others wrote and has changed. Raises OSError."""
        self._known = self.remote.fetch(self.folder, pattern, self._known)

    def close(self, patience: float) -> list[str]:
        """Send what is left, for so many seconds; return the names of the files that could not be sent."""
        with self._changed:
            self._closing = True
            self._due = dict.fromkeys(self._due, 0.0)
            self._changed.notify()
        if self._sender is not None:
            self._sender.join(patience)
        with self._changed:
            return sorted(self._due)

    def _next(self, name: str) -> float:
        if not name.endswith(HISTORY) or name not in self._sent:
            return 0.0
        size = 0
        with contextlib.suppress(OSError):
            size = (self.folder / name).stat().st_size
        return self._sent[name] + max(PERIOD, size / SHARE)

    def _send_all(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                if not self._due and self._closing:
                    return
                now = time.monotonic()
                ready = [name for name, due in self._due.items() if due <= now] if pause <= now or self._closing else []
                if not ready:
                    until = max(min(self._due.values()), pause) if self._due else None
                    self._changed.wait(None if until is None else max(0.0, until - now))
                    continue
                taken = {name: self._due.pop(name) for name in ready}
            for name in ready:
                try:
                    self._send(name)
                except OSError as error:
                    pause = time.monotonic() + AGAIN
                    with self._changed:
                        self._due.setdefault(name, taken[name])
                    self._tell(error)
                    if self._closing:
                        return
                else:
                    self._sent[name] = time.monotonic()

    def _send(self, name: str) -> None:
        path = self.folder / name
        if not path.exists():
            self.remote.remove(name)
        elif name.endswith(HISTORY):
            lines = path.read_bytes()
            self.remote.put(name, lines[: lines.rfind(b"\n") + 1])  # it may be written to at this moment
        else:
            self.remote.put(name, path)

    def _tell(self, error: OSError) -> None:
        if self._failed is not None:
            tell, self._failed = self._failed, None
            tell(error)
