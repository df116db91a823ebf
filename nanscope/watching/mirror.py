"""Keeps the directory of a run on this machine and its remote folder alike: what is written here is sent, from a thread of its own.

Training never waits for a store, but at the end of the block, and then for so many seconds; what could not be sent by then stays where it
is, and the log says where that is. Whoever writes knows nothing of this: the thread looks what has changed.

Notable: the processes of one machine share the directory. What one of them wrote there is newer than what the store has of it, and is
neither fetched nor removed by another one; what was fetched can be told from it, since nobody may write to it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nanscope.snapshot.files import PREFIX
from nanscope.snapshot.history import SUFFIX as HISTORY
from nanscope.snapshot.remote import Kept, Remote

PERIOD = 2.0  # seconds between two looks
SELDOM = 60.0  # seconds between two sendings of a history that grows at every look: it is sent whole, since stores cannot append
SHARE = 1 << 16  # bytes a second that a history may take of the line, so that a long one is sent less often
PATIENCE = 10.0  # seconds that the end of a run waits for its files to be sent

State = tuple[int, int]  # of a file: when it was written, and its size


class Mirror:
    """The files that one process writes. own: whether a file is one of these, by its name. failed: told when the store fails first.

    led: the process that began the run is on this machine, too, reads the files when all is over, and removes them. adopts: this is that
    process, and all is over: what others of this machine came not to send is sent with its own.
    """

    def __init__(
        self, folder: Path, remote: Remote, own: Callable[[str], bool], failed: Callable[[OSError], None], *, led: bool = False
    ) -> None:
        self.folder, self.remote = folder, remote
        self._own, self._failed, self._led = own, failed, led
        self.adopts = False
        self._sent: dict[str, State] = {}
        self._seen: dict[str, State] = {}
        self._last: dict[str, float] = {}  # when a history was sent
        self._fetched: dict[str, Kept] = {}
        self._ending, self._sending, self._told = threading.Event(), threading.Lock(), False
        self._over = False
        threading.Thread(target=self._look_on, name="nanscope-mirror", daemon=True).start()
        atexit.register(self._leave)

    def fetch(self) -> None:
        """Fetch what others wrote elsewhere and has changed. Raises OSError."""
        before = self._fetched
        self._fetched = self.remote.fetch(self.folder, lambda name: not self._own(name) and not self._is_from_here(name), before)
        for name in (name for name, kept in self._fetched.items() if before.get(name) != kept):
            with contextlib.suppress(OSError):
                (self.folder / name).chmod(0o444)

    def _is_from_here(self, name: str) -> bool:
        """Was a file written on this machine, and not fetched?"""
        try:
            return bool((self.folder / name).stat().st_mode & stat.S_IWUSR)
        except OSError:
            return False

    def flush(self, patience: float = PATIENCE) -> list[str]:
        """Send what is left, for so many seconds, and look on no more; return the names of the files that could not be sent."""
        self._ending.set()
        sender = threading.Thread(target=self._send_changed, args=(True,), daemon=True)
        sender.start()
        sender.join(patience)
        return self._unsent()

    def _unsent(self) -> list[str]:
        return sorted(name for name, state in self._files().items() if self._sent.get(name) != state)

    def _leave(self) -> None:
        """The process ends: the page of the verdict may have come last. What is there is not kept here, too."""
        self._ending.set()
        if not self._sending.acquire(timeout=PATIENCE):  # a store that does not answer
            return
        try:
            self._send(everything=True)  # here and now: no thread can be started any more
            self._over = True  # what is removed here from now on is kept there
            if not self._unsent() and not self._led:
                fetched = [name for name in self._fetched if not self._is_from_here(name)]
                for name in (*self._files(), *fetched):
                    with contextlib.suppress(OSError):
                        (self.folder / name).unlink()
                with contextlib.suppress(OSError):
                    self.folder.rmdir()
        finally:
            self._sending.release()

    def _look_on(self) -> None:
        while not self._ending.wait(PERIOD):
            self._send_changed(False)

    def _send_changed(self, everything: bool) -> None:
        with self._sending:
            if not self._over:
                self._send(everything)

    def _send(self, everything: bool) -> None:
        """Send what has changed, what was found first. everything: also what is not due yet. A store that fails is asked again later."""
        files = self._files()
        try:
            if self.adopts:
                self._sent |= self._sent_by_others(files)
            due = [name for name, state in files.items() if self._sent.get(name) != state and (everything or self._is_due(name, state))]
            for name in sorted(due, key=lambda name: name.endswith(HISTORY)):
                self._put(name)
                self._sent[name] = files[name]
            for name in [name for name in self._sent if name not in files and self._own(name)]:
                self.remote.remove(name)
                del self._sent[name]
        except OSError as error:
            if not self._told:
                self._told = True
                self._failed(error)
        self._seen = files

    def _sent_by_others(self, files: Mapping[str, State]) -> dict[str, State]:
        """What they have sent themselves, as far as its size tells; a record may have changed within it."""
        others = [name for name in files if name not in self._sent and not self._own(name) and not name.endswith(".json")]
        there = self.remote.names() if others else {}
        return {name: files[name] for name in others if name in there and there[name].size == files[name][1]}

    def _put(self, name: str) -> None:
        path = self.folder / name
        if name.endswith(HISTORY):
            lines = path.read_bytes()
            self.remote.put(name, lines[: lines.rfind(b"\n") + 1])  # it may be written to at this moment
            self._last[name] = time.monotonic()
        elif path.exists():  # a consequence may have made room meanwhile
            self.remote.put(name, path)

    def _is_due(self, name: str, state: State) -> bool:
        """Is it time to send a file? A history when it has come to rest, or once a while."""
        if not name.endswith(HISTORY) or self._seen.get(name) == state or name not in self._last:
            return True
        return time.monotonic() - self._last[name] > max(SELDOM, state[1] / SHARE)

    def _files(self) -> dict[str, State]:
        found = {}
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    about = entry.stat()
                    adopted = self.adopts and entry.is_file() and bool(about.st_mode & stat.S_IWUSR)
                    if (adopted or self._own(entry.name)) and not entry.name.startswith(PREFIX):
                        found[entry.name] = about.st_mtime_ns, about.st_size
        return found
