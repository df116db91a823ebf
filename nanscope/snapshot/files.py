"""Files that are there whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that no reader ever sees half of it; errors as in `whole`."""
    with whole(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a name to write to; afterwards the file stands at `path`, complete, with the permissions of any other new file.

    Raises OSError if it cannot be written; what was there before is then still there.
    """
    handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
