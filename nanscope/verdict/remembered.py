"""What was diagnosed before: to diagnose a step is to run it some forty times, and a second report of it costs the drawing only.

    ~/.cache/nanscope/1f0c….diagnosis       the diagnosis of one file, by one nanscope, on one machine
    ~/.cache/nanscope/9b27….diagnosis       its precision, or the smallest script that fails as it did

Notable: it is this user's on this machine, and lies beside no snapshot, where it would be something that a stranger's folder says. Its key
is all that a diagnosis depends on: every byte of the file, nanscope's own code, torch, Python, the processor and how torch is set to
calculate. What is damaged, written by somebody else or by another release is as if it was not there; and nothing in here raises, or stops
a run: where nothing can be read or written, everything is diagnosed as ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from nanscope.exact import read, written
from nanscope.program.cost import LARGE_FILES
from nanscope.snapshot.file import holds
from nanscope.snapshot.files import reading, sweep, write_whole
from nanscope.snapshot.step import Snapshot
from nanscope.verdict.incident import Incident

FOLDER = "NANSCOPE_CACHE"  # where it is kept; "off" or nothing: nowhere
OFF = ("", "off")
ENDING = ".diagnosis"

MOST = 64 << 20  # bytes of all that is kept; the oldest goes first
AT_ONCE = 1 << 20  # bytes
LARGEST = 1 << 28  # bytes that one may unfold to
WORTH = 0.5  # seconds: what takes less is not kept

BEGAN = time.time()  # when this process loaded the code that it runs


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What came of a step that was explained. failing: it goes wrong again, or was seen where the file does not reach. ran: it was run."""

    incident: Incident
    failing: bool
    ran: bool

    def lasts(self) -> bool:
        """Would it come out again? What could not be run, perhaps for want of memory or room, may run the next time."""
        unrun = any(row.loss is None and not row.total for row in self.incident.rows)
        return self.ran and not unrun and not any(note.slug == "not_replayed" for note in self.incident.notes)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a file holds. key: all that it depends on. at: when it was made, in seconds since 1970. made: as `exact` writes it."""

    key: tuple[str, ...]
    at: float
    made: Any


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key(Generic[T]):
    """What something that is made of a file depends on. kind: what that is, a dataclass. file, state: which file that is, and what tells
    that nobody has written to it since."""

    kind: type[T]
    parts: tuple[str, ...]
    file: Path
    state: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the file that the diagnosis is kept in."""
        return hashlib.sha256(json.dumps(self.parts).encode()).hexdigest()[:40] + ENDING


class Memory:
    """What this user had diagnosed on this machine. fresh: nothing of it is used, and what is diagnosed now takes its place.

    at: when the oldest was made of what it was asked for and had, in seconds since 1970; None if it had nothing.
    """

    def __init__(self, fresh: bool = False) -> None:
        self.folder, self._fresh = _folder(), fresh
        self.at: float | None = None

    def of(self, key: Key[T] | None, make: Callable[[], T], lasts: Callable[[T], bool] = lambda _: True) -> T:
        """Return what was made before, or make it, and keep it if that took long. lasts: would it come out again?"""
        known = None if key is None else self.recall(key)
        if known is not None:
            return known
        began = time.perf_counter()
        made = make()
        if key is not None and time.perf_counter() - began >= WORTH and lasts(made):
            self.keep(key, made)
        return made

    def key(
        self, kind: type[T], file: Path | None, held: Snapshot | None = None, *, poisoned_at: int | None = None, source: str = ""
    ) -> Key[T] | None:
        """Return what something that is made of a file depends on; None where nothing can be kept.

        kind: what it is. held: the step as it is in memory; there is no key if the file is not what would be read of it. poisoned_at,
        source: as in `Observation`.
        """
        if self.folder is None or file is None:
            return None
        try:
            code, state = _code(), _state(file)
            if code is None or (held is not None and not holds(file, held)):
                return None
            with reading(file) as opened:
                content = hashlib.sha256()
                while chunk := opened.read(AT_ONCE):
                    content.update(chunk)
            parts = (content.hexdigest(), code, *_numbers(), repr(poisoned_at), source, kind.__name__)
            return Key(kind, parts, file.absolute(), state)
        except Exception:  # noqa: BLE001 - whatever it is, the step is diagnosed without
            return None

    def recall(self, key: Key[T]) -> T | None:
        """Return what is kept for a key, None if there is nothing, or nothing that can be read."""
        if self.folder is None or self._fresh:
            return None
        try:
            if not _is_own(self.folder):
                return None
            with reading(self.folder / key.name) as file:
                unfolded = zlib.decompressobj()
                text = unfolded.decompress(file.read(MOST), LARGEST)
            kept = read(_Kept, json.loads(text)) if unfolded.eof else None
            if kept is None or kept.key != key.parts:
                return None
            made = read(key.kind, kept.made)
        except Exception:  # noqa: BLE001 - a damaged one is made again
            return None
        self.at = kept.at if self.at is None else min(self.at, kept.at)
        return made

    def keep(self, key: Key[T], made: T) -> None:
        """Keep what was made of a file, if that is still what it was made of."""
        if self.folder is None:
            return
        try:
            text = json.dumps(written(_Kept, _Kept(key.parts, time.time(), written(key.kind, made))))
            folded = zlib.compress(text.encode(), 1)
            if len(text) > LARGEST or len(folded) > MOST or _state(key.file) != key.state or not _made(self.folder):
                return
            write_whole(self.folder / key.name, folded, private=True)
            _bound(self.folder)
        except Exception:  # noqa: BLE001 - a full disk, a folder of somebody else: it is diagnosed again
            return


def _folder() -> Path | None:
    """Where diagnoses are kept, None for nowhere."""
    given = os.environ.get(FOLDER)
    if given is not None:
        return None if given.strip().lower() in OFF else Path(given).expanduser().absolute()
    above = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(above) if Path(above).is_absolute() else Path.home() / ".cache") / "nanscope"
    except RuntimeError:  # nobody has a home here
        return None


def _made(folder: Path) -> bool:
    """Make the folder if it is not there; False if others may write to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return _is_own(folder)


def _is_own(folder: Path) -> bool:
    if not hasattr(os, "getuid"):  # Windows, where a folder below that of a user is that user's
        return True
    found = folder.stat()
    return found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o022


def _bound(folder: Path) -> None:
    """Let the oldest go until what is kept is within its bound, and what killed processes left of their writing."""
    sweep(folder)
    found = []
    for path in folder.glob(f"*{ENDING}"):
        with contextlib.suppress(OSError):  # another process lets go of it, too
            about = path.stat()
            found.append((about.st_mtime_ns, about.st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= MOST:
            break
        path.unlink(missing_ok=True)
        left -= size


def _state(file: Path) -> tuple[int, ...]:
    about = file.stat()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


@cache
def _code() -> str | None:
    """The code that this process runs, by name, size and time of each file; None if a file was written since it was loaded, and of an
    archive."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    files = sorted(path for path in package.rglob("*") if path.parent.name != "__pycache__" and path.is_file())
    for path in files:
        about = path.stat()
        if max(about.st_mtime, about.st_ctime) > BEGAN:  # what it runs is older, perhaps
            return None
        found.update(f"{path.relative_to(package)}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    return found.hexdigest() if files else None


def _numbers() -> tuple[str, ...]:
    """What the same calls on the same numbers may come out differently by, and what a file may ask for."""
    return (
        torch.__version__,
        sys.version,
        platform.machine(),
        platform.node(),
        sys.byteorder,
        torch.backends.cpu.get_cpu_capability(),
        f"{torch.get_num_threads()} threads",  # the order of a sum depends on them
        str(torch.get_default_dtype()),
        torch.get_float32_matmul_precision(),
        f"mkldnn {torch.backends.mkldnn.enabled}",
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        f"denormal {sys.float_info.min * 0.5 > 0}",
        f"large {os.environ.get(LARGE_FILES)}",
    )
