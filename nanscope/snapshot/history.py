"""The history of a run: one line per step and rank, appended and flushed, so that a killed process still tells its story.

nanscope.history("nanscope-runs").plot(y=["grad_norm", "log_ratio_max"], logy=True)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

from nanscope.errors import NanscopeError
from nanscope.plain import checked, loaded, show
from nanscope.plain import frame as frame_of
from nanscope.snapshot.aside import AT_ONCE, Aside
from nanscope.snapshot.descriptors import Descriptor
from nanscope.snapshot.files import reading
from nanscope.snapshot.runs import histories, latest

SUFFIX = ".jsonl"

_BEGUN = b"{"

TAIL = 200  # steps kept in memory and copied into a snapshot
WAITING = 1 << 14  # steps that are written later, where the folder does not answer


@dataclass(frozen=True, slots=True)
class Entry:
    """What one optimizer step looked like. None: not seen.

    seconds: wall time of the step. loss: summed over its micro-batches as they were differentiated, without a scale against underflow.
    grad_norm: 2-norm of the gradients (where they are sharded, of this rank's part), before the trainer clipped them where it took that
    norm itself. grad_norm_clipped: of what reached the optimizer, where that is another. stepped: what became of the step where an
    optimizer did not take it, see `Stepped`. update: which one of the steps of this number, from 2 on. micro_batches: backward passes,
    from 2 on. optimizer: which one of several. thread: that made it, where it was not the main one. worker: what the process is called
    where that is not a rank alone.
    log_ratio_max, log_ratio_max_masked: largest exponent that the loss raised e to, on counted and on masked tokens, in nats.
    headroom: nats left before exp overflows, the smaller of the two. clip_fraction: part of the counted ratios outside the clip range.
    headroom_bits: doublings that were left to the end of its dtype by the call inside the models that came nearest to it, in a deep step;
    headroom_at: which call, in words. repaired: what was done to gradients that were not finite, in words; repaired_loss: the loss with
    that of the edit whose gradients were taken.
    log_ratio_min, log_ratio_min_masked: smallest exponent, likewise. kl: mean over counted tokens of the KL that the loss forms; kl_old: of
    k3 of its ratio, the distance from the policy before the batch's updates; entropy: mean, all three in nat.
    mismatch_…: between the sampler and the trainer, Δ = ℓ_trainer − ℓ_rollout of the counted tokens, see `nanscope.objective.mismatch`.
    mismatch_mean, mismatch_max: of |Δ|, nat. mismatch_k1, mismatch_k3: estimates of KL(rollout ‖ trainer), nat. mismatch_beyond,
    mismatch_far: share of tokens whose weight exp Δ leaves [1/2, 2], and [1/10, 10]. mismatch_ess: effective sample size of the weights, as
    a share of the tokens. mismatch_dropped, mismatch_cut: share of the tokens that the correction in force takes out, and whose weight it
    truncates. mismatch_unscored: tokens that the sampler has not scored.
    forecast: what was said at this step to be about to happen.
    nonfinite: something was. ruined: nothing was, and the step went bad all the same: by a "spike", or another kind of observation.
    """

    step: int
    rank: int
    time: float
    seconds: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    log_ratio_max: float | None = None
    log_ratio_max_masked: float | None = None
    headroom: float | None = None
    clip_fraction: float | None = None
    nonfinite: bool = False
    grad_norm_clipped: float | None = None
    stepped: str | None = None
    update: int | None = None
    micro_batches: int | None = None
    optimizer: str | None = None
    thread: str | None = None
    worker: str | None = None
    headroom_bits: float | None = None
    headroom_at: str | None = None
    repaired: str | None = None
    repaired_loss: float | None = None
    log_ratio_min: float | None = None
    log_ratio_min_masked: float | None = None
    kl: float | None = None
    kl_old: float | None = None
    entropy: float | None = None
    mismatch_mean: float | None = None
    mismatch_max: float | None = None
    mismatch_k1: float | None = None
    mismatch_k3: float | None = None
    mismatch_beyond: float | None = None
    mismatch_far: float | None = None
    mismatch_ess: float | None = None
    mismatch_dropped: float | None = None
    mismatch_cut: float | None = None
    mismatch_unscored: int | None = None
    forecast: str | None = None
    ruined: str | None = None

    @property
    def bad(self) -> bool:
        """Went the step bad, non-finite or finite?"""
        return self.nonfinite or self.ruined is not None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON data; non-finite numbers as text, since JSON has none."""
        return {name: show(value) for name in _FIELDS if (value := getattr(self, name)) is not None}  # `asdict` copies: in every step

    @staticmethod
    def from_json(data: dict[str, Any]) -> Entry:
        """Return the entry that `to_json` wrote; unknown keys are ignored. Raises TypeError for a value of another kind."""
        return Entry(**checked(Entry, data))


_FIELDS = tuple(one.name for one in fields(Entry))


class History:
    """The entries of one rank, in order; also written to a file if one is given, each line with the id of its run."""

    def __init__(self, path: Path | None = None, run: str = "", aside: Aside = AT_ONCE) -> None:
        self.path, self.run, self._aside = path, run, aside
        self.entries: list[Entry] = []
        self.count = 0
        self._waiting: deque[Entry] = deque()  # to be written
        self._amid = self._begun = False  # a step has begun; and that has been written
        self._file: Descriptor | None = None

    def begin(self) -> None:
        """A step begins: the first sign of its line, which tells of a process that was killed whether it was in a step. Raises OSError."""
        self._amid = True
        if self.path is not None:
            self._aside.do(self._write, wait=False)

    def append(self, entry: Entry) -> None:
        """Add a step. Raises OSError if the file cannot be written; the entry is kept in memory all the same."""
        self.entries.append(entry)
        self.count += 1
        del self.entries[:-TAIL]
        self._amid = False
        if self.path is not None:
            if len(self._waiting) == WAITING:
                raise OSError(errno.ETIMEDOUT, f"the folder does not answer, and {WAITING:,} lines wait to be written")
            self._waiting.append(entry)
            self._aside.do(self._write)

    def close(self) -> None:
        """Close the file; one that somebody has deleted is there again, with the last steps. Raises OSError."""
        self._amid = False  # a step that came to no end, and of which nothing was lost
        if self.path is not None:
            self._aside.do(self._close)

    def let_go(self) -> None:
        """In a forked process: the file is the parent's."""
        if self._file is not None:
            self._file.close()
        self.path = self._file = None

    def _write(self) -> None:
        lines = self._lines([self._waiting.popleft() for _ in range(len(self._waiting))])
        if self._file is None or not self._file.ours:
            if not lines or self.path is None:
                return
            self._file, self._begun = Descriptor(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)), False
        begun, amid = self._begun, self._amid  # which may change meanwhile
        self._begun = amid if lines else begun or amid
        if lines:
            self._file.write((lines + _BEGUN * amid)[len(_BEGUN) * begun :])
        elif amid and not begun:
            self._file.write(_BEGUN)

    def _close(self) -> None:
        if self._file is not None:
            if self._begun and self._file.ours:
                os.ftruncate(self._file.number, os.fstat(self._file.number).st_size - len(_BEGUN))
            self._file.close()
            self._file = None
        if self.path is not None and self.entries and not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            again = Descriptor(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            again.write(self._lines(self.entries))
            again.close()

    def _lines(self, entries: Sequence[Entry]) -> bytes:
        run = {"run": self.run} if self.run else {}
        return "".join(json.dumps({**entry.to_json(), **run}) + "\n" for entry in entries).encode()


def read(path: Path) -> list[Entry]:
    """Return the entries of a history file; a last line that a killed process left half-written is skipped. Raises OSError."""
    with reading(path) as file:
        return list(_entries(_lines_of(file)))


def _lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file, without those that are longer than any of ours."""
    whole = True
    while line := file.readline(TAIL_BYTES):
        if whole and (line.endswith(b"\n") or len(line) < TAIL_BYTES):
            yield line
        whole = line.endswith(b"\n")


def _entries(lines: Iterable[bytes]) -> Iterator[Entry]:
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
            yield Entry.from_json(loaded(line.decode()))


TAIL_BYTES = 1 << 16  # in which the last line of a history surely stands


def last_entries(path: Path, size: int = TAIL_BYTES) -> Iterator[Entry]:
    """Yield the entries in the last bytes of a history file, the last one first, without reading the rest; nothing if it cannot be read."""
    try:
        with reading(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            lines = file.read().splitlines()
    except OSError:
        return
    yield from _entries(reversed(lines))


def last_entry(path: Path) -> Entry | None:
    """Return the last entry of a history file without reading the rest of it, None if there is none."""
    return next(last_entries(path), None)


@dataclass(frozen=True, slots=True)
class Outline:
    """A history in short. steps, bad: how many. first_bad, last: of them. amid: the last step had not come to its end."""

    steps: int = 0
    bad: int = 0
    first_bad: Entry | None = None
    last: Entry | None = None
    amid: bool = False


BLOCK = 1 << 20  # bytes of a history that are held at a time

BAD = re.compile(rb'"nonfinite": true|"ruined": "')  # of a line; within a text of it a quote is no bare one


def outline(path: Path) -> Outline:
    """Return a history in short, read in blocks however long it is; an empty one if it cannot be read."""
    steps = bad = 0
    first_bad, rest = None, b""
    try:
        with reading(path) as file:
            for block in iter(lambda: file.read(BLOCK), b""):
                lines, _, rest = (rest + block).rpartition(b"\n")
                steps += lines.count(b'{"step": ')
                found = [match.start() for match in BAD.finditer(lines)]
                if found and first_bad is None:
                    at = found[0]
                    first_bad = next(_entries([lines[lines.rfind(b"\n", 0, at) + 1 : (lines + b"\n").find(b"\n", at)]]), None)
                bad += len(found)
                rest = rest[-TAIL_BYTES:]  # no line of ours is longer
    except OSError:
        return Outline()
    return Outline(steps, bad, first_bad, last_entry(path), bool(rest))


def history(run_dir: str | os.PathLike[str], called: str = "") -> pandas.DataFrame:
    """Return the history of a run, or of the latest in a folder of runs, as a frame. called: by a person, where that is something else.

    Raises NanscopeError with the slug "no-run" if there is none in the folder.
    """
    files = histories(latest(Path(run_dir)) or Path(run_dir)).values()
    if not files:
        where = called or str(run_dir)
        raise NanscopeError(f"there is no history.rank*.jsonl in {where!r}: a run directory is what a watched run wrote", slug="no-run")
    return frame(sorted((entry for file in files for entry in read(file)), key=lambda entry: (entry.step, entry.rank)))


def frame(entries: Iterable[Entry]) -> pandas.DataFrame:
    """Return the entries as a pandas frame, one row per step, indexed by step."""
    return frame_of(Entry, entries)
