"""The mark of a process that watches itself, or is ours: a page of memory with a name. Nothing of torch is imported here."""

from __future__ import annotations

import contextlib
import mmap
import os

MARK = "nanscope-watches"


def mark() -> mmap.mmap | None:
    """Mark this process as one that watches itself, as long as what is returned is held."""
    with contextlib.suppress(OSError, AttributeError):  # the latter elsewhere than on Linux
        number = os.memfd_create(MARK)
        try:
            os.ftruncate(number, mmap.PAGESIZE)
            return mmap.mmap(number, mmap.PAGESIZE)
        finally:
            os.close(number)
    return None
