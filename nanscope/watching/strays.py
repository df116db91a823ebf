"""Processes that a run has started, that have loaded torch, and that take no part: their environment was replaced, or they ignore it.

Seen in /proc, from a thread of the process that began the run, so on Linux only. A process that watches itself bears a mark, a page of
memory with a name: a fork inherits it, and a program that takes the process's place does not. git and ninja load no torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nanscope.watching.invitation import CHILDREN, MEMBER
from nanscope.watching.marked import MARK

PERIOD = 0.5  # seconds between two looks; importing torch takes longer
SHARE = 0.01  # of the time that looking may take, where there are thousands of processes

TORCH = b"/libtorch_python."  # in the memory of every Python that has loaded torch

_PROC = Path("/proc")

Image = tuple[bytes, bytes]  # of a process: when it began, and where its arguments lie, which another program has elsewhere

TAKES_A_WORD = {"-W", "-X", "--check-hash-based-pycs"}  # options of Python with a value of their own

NOT_TOLD = "it was started without the environment of the run"
REPLACED = "its PYTHONPATH has taken the place of the run's; put the old one after the new"
SWITCHED_OFF = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps nanscope from it"


@dataclass(slots=True)
class Strays:
    """What descends from this process. found: called with each kind of stray, in words that follow "not seen: "."""

    found: Callable[[str], None]
    _ours: dict[int, bool] = field(default_factory=dict)
    _known: dict[int, Image] = field(default_factory=dict)  # what need not be looked at again, unless it becomes another program
    _said: set[str] = field(default_factory=set)

    @contextlib.contextmanager
    def looked_for(self) -> Iterator[None]:
        """While it lasts, look for them."""
        over = threading.Event()

        def look_on() -> None:
            took = 0.0
            while not over.wait(max(PERIOD, took / SHARE)):
                began = time.thread_time()
                self.look()
                took = time.thread_time() - began

        thread = threading.Thread(target=look_on, name="nanscope-strays", daemon=True)
        if mark_is_seen():
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.is_alive():
                thread.join(1.0)

    def look(self) -> None:
        """Look at all of them once."""
        with contextlib.suppress(OSError):
            with os.scandir(_PROC) as entries:
                now = {int(entry.name) for entry in entries if entry.name.isdecimal()}
            for gone in self._ours.keys() - now:
                del self._ours[gone]
                self._known.pop(gone, None)
            for pid in sorted(now):
                if self._is_ours(pid):
                    with contextlib.suppress(OSError, IndexError):  # it has ended, or is somebody else's by now
                        self._look_at(pid)

    def _is_ours(self, pid: int) -> bool:
        """Does it descend from this process? Asked once: a process whose parent has ended has another one."""
        if pid not in self._ours:
            self._ours[pid] = False
            with contextlib.suppress(OSError, IndexError):
                parent = int(_stat(pid)[1])
                self._ours[pid] = parent == os.getpid() or (parent > 1 and self._is_ours(parent))
        return self._ours[pid]

    def _look_at(self, pid: int) -> None:
        stat = _stat(pid)
        image = stat[19], stat[45]
        if self._known.get(pid) == image:
            return
        why = why_unwatched(_texts(pid, "cmdline"), _texts(pid, "environ"))
        memory = (_PROC / str(pid) / "maps").read_bytes()  # last: what has memory now had a command line and an environment
        if MARK.encode() in memory:
            self._known[pid] = image
        elif TORCH in memory and why:
            self._known[pid] = image
            text = f"what `{called(_texts(pid, 'cmdline'))}` did, which has loaded torch: {why}"
            if text not in self._said:
                self._said.add(text)
                self.found(text)


def mark_is_seen() -> bool:
    """Can marks be seen here?"""
    try:
        return MARK.encode() in (_PROC / "self/maps").read_bytes()
    except OSError:
        return False


def why_unwatched(command: Sequence[str], environment: Sequence[str]) -> str:
    """Return what keeps a Python that was started so from taking part, in words, "" if nothing does."""
    variables = dict(text.partition("=")[::2] for text in environment)
    ignoring = [word for word in _parted(command)[0] if word[0] == "-" and word[1] not in "-WX" and set("IE") & set(word)]
    if ignoring:
        return f"{ignoring[0]} makes it ignore its environment"
    if MEMBER not in variables:
        return NOT_TOLD
    if str(CHILDREN) not in variables.get("PYTHONPATH", "").split(os.pathsep):
        return REPLACED
    return SWITCHED_OFF if variables.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1" else ""


def called(command: Sequence[str]) -> str:
    """Return a command as far as it says what runs; what follows may be a secret."""
    options, rest = _parted(command)
    code = options and options[-1].startswith("-") and options[-1].endswith("c")
    return " ".join([Path(command[0]).name, *options, *("…" if code else Path(word).name for word in rest[:1])])


def _parted(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of Python itself in a command, up to the one whose value is what runs, and the rest."""
    number = 1
    while number < len(command) and command[number].startswith("-") and command[number] != "-":
        option = command[number]
        number += 2 if option in TAKES_A_WORD else 1
        if not option.startswith(("--", "-W", "-X")) and option[-1] in "cm":
            break
    return list(command[1:number]), list(command[number:])


def _stat(pid: int) -> list[bytes]:
    """What /proc says of a process, after its name: its state first, then its parent."""
    return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def _texts(pid: int, name: str) -> list[str]:
    return [os.fsdecode(text) for text in (_PROC / str(pid) / name).read_bytes().split(b"\0")][:-1]
