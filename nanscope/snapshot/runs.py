"""A folder of runs: one directory for each, and which of them began last.

nanscope-runs/
  2026-11-21T20-15-03-train/     one run: run.json, history.rank0.jsonl, step-000412.rank0.safetensors, report.html
  latest                         a link to the run that began last, or a line of text with its name
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanscope.errors import NanscopeError
from nanscope.snapshot.files import PREFIX, SUFFIX, reading, write_whole
from nanscope.snapshot.processes import Who, mark, writes_as
from nanscope.snapshot.remote import is_remote

LATEST = "latest"
MAX_BYTES = 1 << 30  # of all snapshots that one process of a run writes
DEEP_EVERY = 100  # steps, of which one is looked at deeply, beside the first ones

_OURS = re.compile(r"run(\.rank\d+.*)?\.json|history\.rank\d+.*\.jsonl|step-\d+\.rank\d+.*\.safetensors")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of runs. given: as a person wrote it, a path or an address. path: the same place whatever directory a script goes to later,
    or where files lie on their way to the address.
    """

    given: str
    path: Path

    @staticmethod
    def of(given: str | os.PathLike[str]) -> Folder:
        """The folder that is meant here and now; `~` is the home of this user, as in a shell."""
        given = os.path.expanduser(given)  # noqa: PTH111 - a home that nobody knows is no error
        if is_remote(given):
            url = given.rstrip("/")
            own = f"nanscope-{os.getuid() if hasattr(os, 'getuid') else ''}"
            return Folder(url, Path(tempfile.gettempdir()) / own / hashlib.sha256(url.encode()).hexdigest()[:16])
        try:
            return Folder(given, Path(given).absolute())
        except OSError:  # the current directory is gone
            return Folder(given, Path(given))

    @property
    def remote(self) -> bool:
        """Is it an address?"""
        return is_remote(self.given)

    def make(self) -> None:
        """Make it, if there is none. Raises OSError, also where it is an address and somebody else could write to what lies on its way."""
        if self.remote:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            about = self.path.parent.stat()
            if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path.parent))
        self.path.mkdir(parents=True, exist_ok=True)

    def shown(self, path: Path) -> str:
        """A path in it, as a person would write it."""
        if not path.is_relative_to(self.path):
            return str(path)
        within = path.relative_to(self.path)
        return "/".join((self.given, *within.parts)) if self.remote else str(Path(self.given) / within)


def wrote(name: str) -> bool:
    """Is this what a file of a run is called?"""
    return _OURS.fullmatch(name) is not None


def history_path(run_dir: Path, rank: int, worker: str = "") -> Path:
    """Return where a process writes a line for each of its steps."""
    return run_dir / f"history.{writes_as(rank, worker)}.jsonl"


def histories(run_dir: Path) -> dict[Who, Path]:
    """Return the histories of a run by process, the lowest rank first."""
    found = ((re.fullmatch(r"history\.rank(\d+)(?:\.(.+))?\.jsonl", path.name), path) for path in run_dir.glob("history.rank*.jsonl"))
    return dict(sorted(((int(match[1]), match[2] or ""), path) for match, path in found if match is not None))


def bad_step_files(run_dir: Path, step: int | None = None) -> Iterator[Path]:
    """Yield the snapshots of the bad steps of a run, or of one of them, in no order."""
    return run_dir.glob(f"step-{'*' if step is None else f'{step:06d}'}.rank*.safetensors")


def step_and_rank(path: Path) -> tuple[int, int] | None:
    """Return which step the snapshot of a bad step is of, and of which rank, as the name of the file has it; None if it has none."""
    match = re.match(r"step-(\d+)\.rank(\d+)", path.name)
    return None if match is None else (int(match[1]), int(match[2]))


def is_bad_step(name: str) -> bool:
    """Is this what the snapshot of a bad step is called?"""
    return name.startswith("step-") and wrote(name)


def is_run(folder: Path) -> bool:
    """Did a watched run write into this folder?"""
    try:
        return any(wrote(path.name) for path in folder.iterdir())
    except (OSError, ValueError):  # the latter for a name that no path can have
        return False


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories of a folder of runs, the earliest first; nothing if it is none."""
    try:
        found = [path for path in folder.iterdir() if path.name != LATEST and path.is_dir() and is_run(path)]
    except OSError:
        return []
    return sorted(found, key=lambda path: in_order(path.name))


def in_order(name: str) -> list[int | str]:
    """Return by what runs are sorted, so that the tenth of a second comes after the ninth."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def latest(folder: Path) -> Path | None:
    """Return the run that began last in a folder of runs, None if there is none."""
    name = pointed(folder)
    if name and is_run(folder / name):
        return folder / name
    return next(reversed(runs_in(folder)), None)


def pointed(folder: Path) -> str:
    """Return the name that `latest` says, "" if it says none: a link, or a line of text where there are no links.

    Only its name counts: it may come from a stranger.
    """
    pointer = folder / LATEST
    try:
        name = pointer.readlink().name if pointer.is_symlink() else _first_line(pointer)
    except (OSError, ValueError):
        return ""
    return "" if name == ".." else name


def _first_line(path: Path) -> str:
    with reading(path) as file:
        return Path(file.readline(1000).decode().strip()).name


def point(folder: Path, run_dir: Path) -> None:
    """Make `latest` say which run began last. Raises OSError."""
    temporary = folder / f"{PREFIX}{mark()}-{LATEST}{SUFFIX}"
    try:
        temporary.symlink_to(run_dir.name, target_is_directory=True)
    except (OSError, NotImplementedError):
        write_whole(folder / LATEST, f"{run_dir.name}\n".encode())
        return
    try:
        temporary.replace(folder / LATEST)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def find_run(path: Path) -> tuple[Path, list[Path]]:
    """Return the run directory that a path means, and, where it is a folder of runs, all of them: the latest is meant.

    Raises NanscopeError with the slug "no-run" if it is neither.
    """
    if not path.is_dir():
        raise NanscopeError(f"there is no run directory or snapshot {str(path)!r}", slug="no-run")
    newest = latest(path)
    if newest is not None:
        return newest, runs_in(path)
    if not is_run(path):
        raise NanscopeError(f"{path} is not a run directory: no run.json, history or snapshot in it, nor below it", slug="no-run")
    return path, []
