"""A descriptor of ours: a script may close all that there are, as a daemon does, and then its number is another file's."""

from __future__ import annotations

import errno
import os


class Descriptor:
    """A number, and what it was opened on. Everything is done only as long as the number stands for that.

    Notable: a Python file would close its number when it is forgotten, whosoever it is by then.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._opened = _identity(number)

    @property
    def ours(self) -> bool:
        """Does the number still stand for what was opened?"""
        return self._opened is not None and _identity(self.number) == self._opened

    def write(self, data: bytes) -> None:
        """Write all of it. Raises OSError."""
        while data:
            if not self.ours:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            data = data[os.write(self.number, data) :]

    def close(self) -> None:
        """Close it. Raises OSError."""
        if self.ours:
            self._opened = None
            os.close(self.number)


def _identity(number: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino
