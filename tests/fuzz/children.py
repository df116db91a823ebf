"""Runs cases in children, so that a signal, a hang or a full memory is a finding and not the end of the search.

    for finding in hunt(run, range(10_000), Limits(seconds=20, memory=1 << 30)):
        print(finding)                                   # case 412: signal 11 (SIGSEGV)

A child is forked after torch was imported and runs many cases; one that died, hung or grew is replaced by a new one, which goes on behind
the case that did it. A case is a number, and everything about it follows from that number: what is found can be run again alone.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

POLL = 0.05  # seconds between two looks at the children


@dataclass(frozen=True)
class Limits:
    """What one case may take. seconds: on the clock, several times what it takes alone. memory: bytes that come on top of those before it.
    hard: bytes of address space on top of a child's own; an allocation beyond it fails at once, and is a finding, too."""

    seconds: float
    memory: int
    hard: int = 6 << 30


@dataclass(frozen=True)
class Finding:
    """A case and what came of it."""

    case: int
    what: str

    def __str__(self) -> str:
        return f"case {self.case}: {self.what}"


@dataclass
class Tally:
    """What a hunt saw beside its findings. memory: bytes of the greediest case; seconds: of the slowest; said: how often a case said what."""

    cases: int = 0
    memory: tuple[int, int] = (0, -1)
    seconds: tuple[float, int] = (0.0, -1)
    said: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        said = ", ".join(f"{count} {what}" for what, count in sorted(self.said.items(), key=lambda item: -item[1]))
        return (
            f"{self.cases} cases; most memory {self.memory[0] / 2**20:.0f} MiB (case {self.memory[1]}), "
            f"longest {self.seconds[0]:.1f} s (case {self.seconds[1]}); {said}"
        )


class Wrong(Exception):
    """What a case raises about what it saw."""


def hunt(
    run: Callable[[int], str], cases: Sequence[int], limits: Limits, tally: Tally, jobs: int = 1, until: float = float("inf")
) -> Iterator[Finding]:
    """Run the cases and yield what went wrong: any exception (its last lines), a signal, a hang, too much memory.

    run: returns one word about how the case ended. jobs: children at a time. until: `time.monotonic()` at which no further case begins.
    """
    shares = [_Share(list(cases[start::jobs]), run, limits, until) for start in range(jobs)]
    waiting = [share for share in shares if not share.done]
    while waiting:
        time.sleep(POLL)
        for share in list(waiting):
            yield from share.look(tally)
            if share.done:
                waiting.remove(share)


class _Share:
    """The cases of one child after another. Shared with the child: how many cases it has begun, and when the last one began."""

    def __init__(self, cases: list[int], run: Callable[[int], str], limits: Limits, until: float) -> None:
        self._cases, self._run, self._limits, self._until = cases, run, limits, until
        self._place = mmap.mmap(-1, 16)
        self._next, self.done, self._pid = 0, not cases, 0
        if cases:
            self._fork()

    def _fork(self) -> None:
        sys.stdout.flush()
        self._place[:] = struct.pack("qd", self._next, time.monotonic())
        self._out, into = os.pipe()
        os.set_blocking(self._out, False)
        self._buffer = b""
        self._pid = os.fork()
        if not self._pid:
            status = 1
            try:
                os.close(self._out)
                self._child(into)
                status = 0
            finally:
                os._exit(status)
        os.close(into)

    def _child(self, into: int) -> None:
        limit = _status("VmSize") + self._limits.hard
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 2)
        gc.freeze()
        for number in range(self._next, len(self._cases)):
            if time.monotonic() > self._until:
                return
            case, begun = self._cases[number], time.monotonic()
            self._place[:] = struct.pack("qd", number, begun)
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
            before = _status("VmRSS")
            try:
                said, wrong = self._run(case), ""
            except Wrong as found:
                said, wrong = "wrong", str(found)
            except BaseException:
                said, wrong = "raised", "".join(traceback.format_exc().splitlines(keepends=True)[-14:])
            grown = _status("VmHWM") - before
            if grown > self._limits.memory:
                wrong += f" took {grown / 2**20:.0f} MiB"
            os.write(into, json.dumps([number, case, said, wrong, grown, time.monotonic() - begun]).encode() + b"\n")

    def look(self, tally: Tally) -> Iterator[Finding]:
        """Take what the child has said; replace it where it ended too early."""
        died, status = os.waitpid(self._pid, os.WNOHANG)
        yield from self._said(tally)
        number, begun = struct.unpack("qd", self._place[:])
        hung = not died and time.monotonic() - begun > self._limits.seconds
        if hung:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        elif not died:
            return
        os.close(self._out)
        if died and not status:
            self.done = True
            return
        what = f"still running after {self._limits.seconds:.0f} s" if hung else _ending(status)
        tally.cases += 1
        tally.said[what] = tally.said.get(what, 0) + 1
        yield Finding(self._cases[number], what)
        self._next = number + 1
        if self._next < len(self._cases) and time.monotonic() < self._until:
            self._fork()
        else:
            self.done = True

    def _said(self, tally: Tally) -> Iterator[Finding]:
        while True:
            try:
                data = os.read(self._out, 1 << 20)
            except BlockingIOError:
                break
            if not data:
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            _, case, said, wrong, grown, seconds = json.loads(line)
            tally.cases += 1
            tally.said[said] = tally.said.get(said, 0) + 1
            tally.memory = max(tally.memory, (grown, case))
            tally.seconds = max(tally.seconds, (seconds, case))
            if wrong:
                yield Finding(case, wrong.strip())


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"signal {number} ({signal.Signals(number).name})"
    return f"exit status {os.WEXITSTATUS(status)}"


def _status(key: str) -> int:
    """Bytes that the kernel counts for this process under a name of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0
