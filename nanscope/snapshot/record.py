"""What a run says of itself, as each of its processes wrote it: `run.json`, `run.rank3.json` of a further rank, `run.rank0.actor.json`.

Written when the run begins, whenever something is found, and when it ends; a process that was killed leaves "running" behind.
SCHEMA history: absent — before there was one directory a run. 1 — `run`, `rank`, `status`, counts, gaps, notes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nanscope.errors import NanscopeError
from nanscope.plain import checked, is_deep, loaded, show
from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.coverage import Gap, Status
from nanscope.snapshot.files import reading, write_whole
from nanscope.snapshot.history import last_entry, outline
from nanscope.snapshot.processes import Who, called, lives, writes_as
from nanscope.snapshot.runs import histories, is_bad_step, step_and_rank

SCHEMA = 1
LARGEST = 16 << 20  # bytes; what is longer was not written by us

LISTED = 1000  # notes, and steps that spoilt later ones, that are told of one process

DROPPED = 64  # steps that are named of those that a trainer has dropped

RUNNING, KILLED = "running", "killed"
WORST = (Status.NONFINITE, Status.SUSPECT, Status.UNWATCHED, Status.PARTLY, Status.HEALTHY)


@dataclass(frozen=True, slots=True)
class Remark:
    """What was noticed and is no incident. slug: its kind."""

    slug: str = ""
    text: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Aftermath:
    """Steps that were bad because an earlier one had spoilt the weights. of: that one. first, last: of them, `count` in all."""

    of: int = 0
    first: int = 0
    last: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One process of a run, as it says of itself.

    run: id of the run, the same in all of its files. script: what was run. started, ended: local time with its distance from UTC.
    process: see `processes`. status: "running", or what the verdict was. raised: class of the exception that ended the block.
    steps, skipped, bad_steps, backwards, repaired: counts, the last of backward passes. gaps: what was not watched. notes: as in the
    verdict. aftermath: consequences of bad steps. world: how many ranks the run has, 0 where that is not known. first: its first bad step.
    budget: bytes that might be held by reference. held_peak: most that were at a time. on_nonfinite, targets: as it was asked for.
    nanscope: the release. worker: what the process is called where that is not a rank alone. member: the run was begun by another one.
    reaped: whoever started the process ends it without a word, once nobody needs it any more. dropped: steps, as counted here, that the
    trainer dropped; the first `DROPPED` of them. node: of several on each of which the run was begun, the one that the process belongs to.
    restarts: how often the ranks had been started before, by an elastic launcher.
    """

    run: str = ""
    rank: int = 0
    script: str = ""
    started: str = ""
    ended: str = ""
    process: str = ""
    status: str = RUNNING
    raised: str = ""
    steps: int = 0
    skipped: int = 0
    bad_steps: int = 0
    backwards: int = 0
    gaps: tuple[Gap, ...] = ()
    notes: tuple[Remark, ...] = ()
    aftermath: tuple[Aftermath, ...] = ()
    budget: int | None = None
    held_peak: int | None = None
    on_nonfinite: str = "record"
    targets: tuple[str, ...] = ()
    nanscope: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    world: int = 0
    first: BadStep | None = None
    worker: str = ""
    member: bool = False
    reaped: bool = False
    dropped: tuple[int, ...] = ()
    node: str = ""
    repaired: int = 0
    restarts: int = 0

    @property
    def file_name(self) -> str:
        """run.json, or run.rank3.json."""
        return f"run.{writes_as(self.rank, self.worker)}.json" if self.rank or self.worker or self.member else "run.json"

    def owns(self, name: str) -> bool:
        """Is this what a file of this process is called? Who began the run writes the page, too."""
        if name in (self.file_name, "report.html", "report.png"):
            return name == self.file_name or (not self.member and (not self.rank or bool(self.worker)))
        who = re.escape(writes_as(self.rank, self.worker))
        bad_step = rf"(step|batch)-\d+\.{who}(\.update\d+)?(\.part\d+)?\.safetensors"
        return re.fullmatch(rf"{bad_step}|history\.{who}\.jsonl", name) is not None

    @property
    def who(self) -> Who:
        """Which process of the run it is."""
        return self.rank, self.worker

    @property
    def untaken(self) -> tuple[int, ...]:
        """Steps, as counted here, that no update is known to have come of: those that were dropped, and a bad one that was not over when
        this was written."""
        open_step = () if self.first is None or self.first.step <= self.steps else (self.first.step,)
        return tuple(dict.fromkeys((*self.dropped, *open_step)))

    @property
    def called(self) -> str:
        """What a person calls the process."""
        return called(self.rank, self.worker)

    @property
    def alive(self) -> bool | None:
        """Does its process still run? False once it has ended, None where nobody here can tell."""
        return lives(self.process) if self.status == RUNNING else False

    @property
    def ended_as(self) -> str:
        """Its status; of a process that was ended without a word, what it would have said."""
        if self.status != RUNNING or not self.reaped or self.alive:
            return self.status
        return str(Status.NONFINITE if self.bad_steps else Status.PARTLY if self.gaps else Status.HEALTHY)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON data."""
        data: dict[str, Any] = show({"schema": SCHEMA, **asdict(self)})
        return data

    @staticmethod
    def from_json(data: object) -> RunRecord:
        """Read what `to_json` wrote, in any release. Raises TypeError or ValueError for anything else."""
        if not isinstance(data, dict):
            raise TypeError(f"it is {type(data).__name__}")
        if type(schema := data.get("schema", 0)) is not int or not 0 <= schema <= SCHEMA:
            raise ValueError("its schema is none that this nanscope reads")
        found = {key: value for key, value in data.items() if key != "environment"}
        if not schema:
            found |= {"status": "", "process": ""}
        environment = data.get("environment", {})
        record = RunRecord(**checked(RunRecord, found), environment=environment if isinstance(environment, dict) else {})
        return replace(record, dropped=record.dropped[:DROPPED], notes=record.notes[:LISTED], aftermath=record.aftermath[:LISTED])

    def write(self, folder: Path) -> None:
        """Write the record, whole. Raises OSError."""
        content = (json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n").encode()
        try:
            write_whole(folder / self.file_name, content)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _written_over(folder / self.file_name, content):
                raise


def _written_over(path: Path, content: bytes) -> bool:
    """Write a record into the room that it has, as on a full disk, where it would go on to say that its process runs."""
    try:
        with path.open("rb+") as file:
            if len(content) > os.fstat(file.fileno()).st_blocks * 512:
                return False
            file.write(content)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def now() -> str:
    """Return the local time as records write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def records(run_dir: Path) -> list[RunRecord]:
    """Return what the processes of a run wrote of it, by rank; nothing for a folder without a record.

    Raises NanscopeError with the slug "run-damaged" for one that cannot be read.
    """
    found = [_read(path) for path in run_dir.glob("run*.json") if path.name == "run.json" or path.name.startswith("run.rank")]
    return sorted(found, key=lambda record: (record.member, record.rank, record.worker))


def record_of(run_dir: Path, rank: int, worker: str = "") -> RunRecord | None:
    """Return what one process of a run wrote of it, None if there is nothing; its name is asked for, since a folder may list it late.

    Raises NanscopeError as `records` does.
    """
    names = (RunRecord(rank=rank, worker=worker, member=True).file_name, RunRecord(rank=rank, worker=worker).file_name)
    return next((_read(run_dir / name) for name in names if (run_dir / name).exists()), None)


def _read(path: Path) -> RunRecord:
    try:
        with reading(path) as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError("it is too large")
        told = loaded(data.decode("utf-8-sig"))
        if is_deep(told):
            raise ValueError("it is nested too deeply")
        return RunRecord.from_json(told)
    except OSError as error:
        raise NanscopeError(f"{path} cannot be read ({error.strerror or error})", slug="run-damaged") from None
    except (ValueError, TypeError, RecursionError) as error:
        what = "not JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else str(error)[:200]
        message = f"{path} is damaged ({what}); the snapshots beside it can be reported one by one"
        raise NanscopeError(message, slug="run-damaged") from None


def nodes(run_dir: Path) -> dict[str, bool]:
    """Return the nodes on which a run was begun, and whether it has ended there; one whose record is not whole has not."""
    found = {}
    for path in run_dir.glob("run.rank0.*.json"):
        with suppress(NanscopeError):
            record = _read(path)
            if record.node and not record.member:
                found[record.node] = record.status != RUNNING and bool(record.ended)
    return found


def others(run_dir: Path) -> bool:
    """Have other processes than the first written into a run?"""
    return any(run_dir.glob("run.rank*.json"))


def unwatched(run_dir: Path) -> list[str]:
    """Return what processes left that could not be watched: which Python, and why."""
    found = []
    for path in sorted(run_dir.glob("unwatched.*")):
        why = "its note cannot be read"
        if not path.is_symlink():  # to what is no business of a report
            with suppress(OSError), reading(path) as file:
                why = file.read(400).decode(errors="replace")
        found.append(why)
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Listed:
    """One run, as `nanscope runs` lists it.

    path: its directory. status: as in its record; "running", "killed", or "unknown" where nobody here can tell; "damaged". last: time of
    its last step, in seconds since 1970. ranks: processes that trained. size: bytes on disk. snapshots: of bad steps.
    """

    path: str
    script: str
    started: str
    status: str
    steps: int
    bad_steps: int
    ranks: int
    size: int
    snapshots: int
    last: float | None


def listed(run_dir: Path, called: str, sizes: Mapping[str, int]) -> Listed:
    """Return what there is to say of a run in one line, without its snapshots. called: by a person. sizes: of its files, in bytes."""
    try:
        found, damaged = records(run_dir), False
    except NanscopeError:
        found, damaged = [], True
    written = histories(run_dir)
    last = [entry.time for path in written.values() if (entry := last_entry(path)) is not None]
    ended = {record.who for record in found if record.status != RUNNING}
    counted = [outline(path) for who, path in written.items() if who not in ended]
    saved = {place[0] for name in sizes if is_bad_step(name) and (place := step_and_rank(Path(name))) is not None}
    first = found[0] if found else RunRecord(status="")
    return Listed(
        path=called,
        script=first.script,
        started=first.started,
        status="damaged" if damaged else state(found),
        steps=max([*(record.steps for record in found), *(one.steps for one in counted)], default=0),
        bad_steps=max([len(saved), *(record.bad_steps for record in found), *(one.bad for one in counted)]),
        ranks=len(written) or len(found),
        size=sum(sizes.values()),
        snapshots=sum(is_bad_step(name) for name in sizes),
        last=max(last, default=None),
    )


def state(found: Sequence[RunRecord]) -> str:
    """Return how a run ended, the worst of its processes first; "running", "killed" or "unknown" if one has not."""
    open_ = [record.alive for record in found if record.ended_as == RUNNING]
    if open_:
        return KILLED if False in open_ else RUNNING if True in open_ else "unknown"
    said = [record.ended_as for record in found if record.status]
    return next((status for status in WORST if status in said), said[0] if said else "unknown")
