"""Files that are there whole or not at all: written under another name, then renamed. And no others are read."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from nanscope.snapshot.processes import lives, mark

PREFIX, SUFFIX = ".nanscope-", ".tmp"

FORGOTTEN = 86400.0  # seconds after which a temporary file of a process that cannot be asked after belongs to nobody


def reading(path: Path) -> IO[bytes]:
    """Open a file to read it; what a run left may come from a stranger, and a pipe or a device would never end. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(handle, "rb")
    os.close(handle)
    folder = stat.S_ISDIR(kind)
    raise OSError(errno.EISDIR if folder else errno.EINVAL, os.strerror(errno.EISDIR) if folder else "it is a pipe or a device", str(path))


def write_whole(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file so that no reader ever sees half of it. private, and errors: as in `whole`."""
    with whole(path, private=private) as temporary:
        temporary.write_bytes(data)


@contextmanager
def whole(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Give a name to write to; afterwards the file stands at `path`, complete, with the permissions of any other new file.

    private: with those of this user alone.

    Raises OSError if it cannot be written; what was there before is then still there.
    """
    handle, name = tempfile.mkstemp(prefix=f"{PREFIX}{mark()}-", suffix=SUFFIX, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        if not private:
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sweep(folder: Path) -> None:
    """Remove the temporary files that killed processes of ours left in a folder: those that surely have no owner, and no other file."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
            with contextlib.suppress(OSError):
                alive = lives(path.name.removeprefix(PREFIX).rpartition("-")[0])
                if alive is False or (alive is None and _now(folder) - path.stat().st_mtime > FORGOTTEN):
                    path.unlink()


def _now(folder: Path) -> float:
    """What the clock of a folder's disk shows: that of another machine may be another one."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime
