"""Which process wrote a file, and whether it still lives: a mark without the name of a host, for whoever reads the file later.

A mark is `machine-pid-birth`. A process that got the same number later has another birth; what runs on another machine, or in another
container, cannot be asked after.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from functools import lru_cache
from pathlib import Path

_PROC = Path("/proc")


Who = tuple[int, str]  # a process of a run: its rank, and what it is called where that is not a rank alone


def writes_as(rank: int, worker: str) -> str:
    """Return what stands in the names of a process's files: "rank3", or "rank0.actor" of one with a name. No two of a run have the same."""
    return f"rank{rank}.{worker}" if worker else f"rank{rank}"


def called(rank: object, worker: str) -> str:
    """Return what a person calls a process of a run: "rank 3", "actor", or "actor rank 1"."""
    return " ".join([*filter(None, [worker]), *([f"rank {rank}"] if rank or not worker else [])])


def mark(pid: int | None = None) -> str:
    """Return the mark of a process, of this one without a number."""
    return _own(os.getpid()) if pid is None else _marked(pid)


def _marked(pid: int) -> str:
    return f"{machine()}-{pid}-{_birth(pid) or 0}"


_own = lru_cache(maxsize=1)(_marked)  # every file that is written bears it; a fork has another number


def lives(found: str) -> bool | None:
    """Does the process of a mark still run? None where nobody here can tell."""
    where, _, rest = found.partition("-")
    pid, _, birth = rest.partition("-")
    if where != machine() or not (pid.isdecimal() and birth.isdecimal()) or len(pid) > 9 or os.name != "posix":
        return None
    if int(birth):
        return _birth(int(pid)) == int(birth)
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def age(pid: int) -> float | None:
    """Return for how many seconds a process has run, by the clock of the machine that nobody sets; None where that is not known."""
    birth = _birth(pid)
    return None if not birth else time.clock_gettime(time.CLOCK_BOOTTIME) - birth / os.sysconf("SC_CLK_TCK")


def _birth(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None for one that has ended, though its parent has not asked after it."""
    try:
        about = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if about[0] in "ZX" else int(about[19])
    except (OSError, ValueError, IndexError):
        return None


def machine() -> str:
    """Return the machine since it was switched on, and the container: numbers of processes mean nothing elsewhere."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8")
        return hashlib.sha256(f"{boot}{(_PROC / 'self/ns/pid').readlink()}".encode()).hexdigest()[:8]
    except OSError:
        return hashlib.sha256(platform.node().encode()).hexdigest()[:8]
