"""Where a run writes: a directory of its own in the folder of runs, the same one for all ranks of a job.

    nanscope-runs/2026-11-21T20-15-03-train/      local time, then the script's name, or the trainer's

The ranks of a job find each other through a claim: a small file in the folder, made by whoever comes first, under a name that all of
them work out from what their launcher gave them. No collective, and no clock but that of the disk. A claim that an earlier job left
under the same name is told by the rank that it already has, by its launcher, which is gone, and by its age.

    s3://bucket/runs/job-5f0c2b1e-train/

A store cannot let one of two be the first. There the directory itself has the name that all of them work out.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanscope.plain import checked
from nanscope.snapshot.files import PREFIX, SUFFIX, sweep
from nanscope.snapshot.processes import age, lives, mark, writes_as
from nanscope.snapshot.record import RunRecord, now
from nanscope.snapshot.remote import Remote
from nanscope.snapshot.runs import LATEST, Folder, point
from nanscope.watching.job import OURS, Job

log = logging.getLogger("nanscope")

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
ELASTIC = "TORCHELASTIC_RUN_ID"
ANEW = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")  # what an elastic launcher may give the ranks otherwise when it starts them again

# What the ranks of one job have in common, and no two jobs at a time.
SHARED = (
    OURS,
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    ELASTIC,
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
)  # fmt: skip
UNNAMED = "none"  # what torchrun calls a job that nobody has given a name
TELLING = frozenset(SHARED) - {"WORLD_SIZE"}

CLAIMS = ".claims"
BEGAN = ".began"  # in a run at an address
LATE = 600.0  # seconds by which a rank may begin after the one that made the claim
APART = 60.0  # seconds by which launchers of one job, on several machines, may begin one after another
OLD = 7 * 86400.0  # seconds after which a claim is thrown away

SWEPT = 20  # runs, the last ones, in which what killed processes left half-written is looked for

NAMELESS = {"", "-", "-c", "-m", "ipykernel_launcher", "colab_kernel_launcher"}  # not what anybody would call their script


@dataclass(frozen=True, slots=True)
class Place:
    """The directory of a run. run: its id. rank: of this process in it. shared: further processes write there, too. worker: what the
    process is called where that is not a rank alone. folder: of runs, as a person gave it, where this process was not given it itself.
    named: rank and worker are this process's; where not, it gets its own when it needs one. led: the process that began the run is on this
    machine, and is another one. node: of several on each of which the run was begun.
    """

    path: Path
    run: str
    rank: int
    shared: bool = False
    worker: str = ""
    folder: Folder | None = None
    named: bool = True
    led: bool = False
    node: str = ""

    @property
    def record_name(self) -> str:
        """What the record of this process is called."""
        return RunRecord(rank=self.rank, worker=self.worker).file_name


@dataclass(frozen=True, slots=True)
class Claim:
    """What stands in a claim. directory, run: of the run. launcher: mark of the process that started the one that claimed it.

    at: when, in seconds since 1970, where no disk tells.
    """

    directory: str = ""
    run: str = ""
    launcher: str = ""
    at: float = 0.0


def settle(runs: Folder, name: str, *, lead: bool = False, job: Job | None = None) -> Place:
    """Return the directory of this process's run in a folder of runs, made for it or by another process of its job.

    lead: of a run in which the processes that this one starts take part; its own name in it, if it needs one, is that of `enrol`.
    job: of several nodes, on each of which one process leads. Raises OSError if nothing can be written there.
    """
    runs.make()
    rank, world = rank_and_world()
    if rank == 0:  # a thousand ranks that list a thousand files each are a million
        for earlier in (*sorted(path for path in runs.path.iterdir() if path.is_dir())[-SWEPT:], runs.path):
            sweep(earlier)

    def places(path: Path, run: str) -> Iterator[Place]:
        if job is None:
            yield Place(path, run, rank, shared=world > 1, worker=attempt())
        else:
            yield from (Place(path, run, 0, shared=True, worker=node, named=False, node=node) for node in job.names())

    key = job.key if job is not None else shared_key(os.environ, world)
    if key is None:
        place = replace(_new(runs.path, name, rank, take=not lead), named=not lead)
        with contextlib.suppress(OSError):
            point(runs.path, place.path)
    elif runs.remote:
        place = _meet(runs, f"{(job and job.called) or f'job-{key[:8]}'}-{name}", key, places)
    else:
        place = _join(runs.path, name, key, places)
    if runs.remote and (lead or place.rank == 0):
        Remote(runs.given).put(LATEST, f"{place.path.name}\n".encode())  # that nothing can be written there is known at once
    return place


def enrol(path: Path, run: str, names: Sequence[str], folder: Folder) -> Place:
    """Return a place in a run that has begun, under the first of these names that no other process of it has, or the last with a number.

    Raises OSError if nothing can be written there.
    """
    folder.make()
    path.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
    rank = rank_and_world()[0]
    numbered = (f"{names[-1] or 'process'}-{number}" for number in itertools.count(2))
    return next(place for worker in itertools.chain(names, numbered) if _take(place := Place(path, run, rank, True, worker, folder)))


def is_ranked() -> bool:
    """Has a launcher given this process a rank? One that `multiprocessing` has started may have inherited that of its parent."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    return "RANK" in os.environ and multiprocessing.parent_process() is None


def settle_somewhere(runs: Folder, name: str) -> Place | None:
    """As `settle`; where nothing can be written in the folder of temporary files, and said; None if not there either."""
    try:
        return settle(runs, name)
    except OSError as error:
        why = f"{runs.given} cannot be written ({error.strerror or error})"
    try:
        place = settle(Folder.of(tempfile.mkdtemp(prefix="nanscope-runs-")), name)
    except OSError:
        log.warning("nanscope [out-unwritable]: %s, and no temporary folder either: what is found is kept in memory only", why)
        return None
    log.warning("nanscope [out-unwritable]: %s: this run is written to %s", why, place.path)
    return place


def rank_and_world() -> tuple[int, int]:
    """Return which of how many processes this one is, as its launcher or torch.distributed says."""
    rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if "RANK" not in os.environ and torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return rank, world


def restarts() -> int:
    """Return how often an elastic launcher had started the ranks before."""
    return _number(RESTARTS, 0)


def attempt() -> str:
    """Return which attempt of an elastic launcher this process belongs to, "" for the first: "attempt-2"."""
    return f"attempt-{restarts() + 1}" if restarts() else ""


def _number(name: str, otherwise: int) -> int:
    found = os.environ.get(name, "")
    return int(found) if found.isdecimal() else otherwise


def shared_key(environ: Mapping[str, str], world: int) -> str | None:
    """Return a name that all ranks of this job work out alike, None for a process that trains alone."""
    if world < 2 and OURS not in environ:
        return None
    known = [name for name in SHARED if not (name in ANEW and environ.get(ELASTIC, UNNAMED) not in ("", UNNAMED))]
    parts = [f"{name}={environ[name]}" for name in known if environ.get(name)]
    if not TELLING & {part.partition("=")[0] for part in parts}:
        parts.append(f"{mark(os.getppid())} {world}")  # started by one process of this machine, which told them nothing
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def name_of(argv: Sequence[str], targets: Sequence[Any]) -> str:
    """Return what a run is called: as its script, or as its trainer where there is none."""
    script = Path(argv[0] if argv else "")
    stem = script.parent.name if script.stem == "__main__" else script.stem
    if stem in NAMELESS:
        stem = next((type(target).__name__ for target in targets if hasattr(target, "args") and hasattr(target, "state")), "run")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", stem).strip("._-")[:40] or "run"


def _new(folder: Path, name: str, rank: int, *, take: bool = True) -> Place:
    """Make a directory that nobody else has."""
    began, number = time.strftime("%Y-%m-%dT%H-%M-%S"), 1
    while True:
        path = folder / f"{began}-{name}{f'-{number}' if number > 1 else ''}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        place = Place(path, f"{path.name}-{secrets.token_hex(4)}", rank)
        if take and not _take(place):
            raise FileExistsError(f"{path} was taken")
        return place


def _take(place: Place) -> bool:
    """Take a rank of a run, or a node, False if another process has it."""
    try:
        if not place.named:  # it may write no line ever
            record = RunRecord(run=place.run, worker=place.worker, node=place.node, process=mark(), started=now())
            with (place.path / place.record_name).open("x", encoding="utf-8") as file:
                json.dump(record.to_json(), file)
            return True
        with (place.path / f"history.{writes_as(place.rank, place.worker)}.jsonl").open("x"):
            return True
    except FileExistsError:
        return False


def _sit(places: Iterable[Place], read: Callable[[str], bytes | None]) -> Place | None:
    """Take the first of these places that is free, None if this process, or one like it in an earlier run, has had its own.

    read: a record of the run, None if there is none of this name.
    """
    for place in places:
        found = read(place.record_name)
        if found is None and _take(place):
            return place
        if not _is_of_another(found or read(place.record_name)):
            return None
    return None


def _is_of_another(found: bytes | None) -> bool:
    """Was a record written by another node that is on this machine, too, and still runs?"""
    try:
        record = RunRecord.from_json(json.loads(found or b""))
    except (ValueError, TypeError, RecursionError):
        return False
    return bool(record.node) and record.process != mark() and record.alive is True


def _meet(runs: Folder, name: str, key: str, places: Callable[[Path, str], Iterable[Place]]) -> Place:
    """Come to the run of a job at an address.

    Numbered, like claims, for a job that opens one scope after another, or whose name an earlier job had.
    """
    for number in itertools.count(1):
        called = f"{name}-{number}" if number > 1 else name
        there, path = Remote(runs.given) / called, runs.path / called
        if _is_of_this_job(*_begun(there)):
            path.mkdir(exist_ok=True)

            def read(file: str, there: Remote = there, path: Path = path) -> bytes | None:
                here = path / file
                return here.read_bytes() if here.exists() else there.read(file) if there.has(file) else None

            place = _sit(places(path, f"{called}-{key[:8]}"), read)
            if place is not None:
                if place.node:  # at once: another node may be on this machine
                    there.put(place.record_name, path / place.record_name)
                return place
    raise AssertionError


def _begun(there: Remote) -> tuple[Claim, float]:
    """Return what the first process of a run at an address says of itself, and for how many seconds it has; it may be this one."""
    try:
        claim = Claim(**checked(Claim, json.loads(there.read(BEGAN))))
    except (ValueError, TypeError, RecursionError):
        claim = Claim()
    except FileNotFoundError:
        claim = Claim(launcher=mark(os.getppid()), at=time.time())
        there.put(BEGAN, json.dumps(asdict(claim)).encode())
    return claim, time.time() - claim.at


def _join(folder: Path, name: str, key: str, places: Callable[[Path, str], Iterable[Place]]) -> Place:
    """Come to the run that another process has claimed, or claim one.

    Claims of a key are numbered. A process takes the first that is of its job and has not its rank yet: a rank that opens one scope after
    another goes from claim to claim, and one that is late finds the same ones.
    """
    claims = folder / CLAIMS
    claims.mkdir(exist_ok=True)
    while True:
        clock = _now(claims)
        known = {int(path.suffix[1:]): path for path in claims.glob(f"{key}.*") if path.suffix[1:].isdecimal()}
        for _, path in sorted(known.items()):
            claim, made = _read(path)
            if claim.directory and _is_of_this_job(claim, clock - made):
                path = folder / claim.directory
                place = _sit(places(path, claim.run), lambda name, path=path: _content(path / name)) if path.is_dir() else None  # type: ignore[misc]
                if place is not None:
                    return place
        number = 1 + max(known, default=0)
        new = _new(folder, name, 0, take=False)
        place = next(iter(places(new.path, new.run)))
        _take(place)
        if _claim(claims / f"{key}.{number}", Claim(place.path.name, place.run, mark(os.getppid()))):
            with contextlib.suppress(OSError):
                point(folder, place.path)
                _throw_away(claims, clock)
            return place
        for taken in place.path.iterdir():  # another process was faster
            taken.unlink()
        place.path.rmdir()


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _is_of_this_job(claim: Claim, waited: float) -> bool:
    """Was a claim made by a rank of this job? waited: seconds since it was made."""
    own, launcher = age(os.getpid()), age(os.getppid())
    if own is not None and waited > own + LATE and not restarts():
        return False
    if claim.launcher == mark(os.getppid()):
        return True
    alive = lives(claim.launcher)
    if alive is None:  # on another machine: its launcher began when ours did
        return launcher is None or waited <= launcher + APART
    return alive


def _claim(path: Path, claim: Claim) -> bool:
    """Make a claim, whole and at once, False if there is one."""
    handle, name = tempfile.mkstemp(prefix=f"{PREFIX}{mark()}-", suffix=SUFFIX, dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(asdict(claim), file)
    temporary = Path(name)
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        return False
    except OSError:  # a disk without hard links
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(temporary.read_text(encoding="utf-8"))
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _read(path: Path) -> tuple[Claim, float]:
    """Return a claim and when it was made; an empty one for what is none."""
    try:
        claim, made = Claim(**checked(Claim, json.loads(path.read_bytes()))), path.stat().st_mtime
    except (OSError, ValueError, TypeError, RecursionError):
        return Claim(), 0.0
    return (claim if claim.directory == Path(claim.directory).name else Claim()), made


def _now(folder: Path) -> float:
    """What the clock of the disk shows."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime


def _throw_away(claims: Path, now: float) -> None:
    for path in claims.iterdir():
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > OLD:
                path.unlink()
