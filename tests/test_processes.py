"""Which process wrote something, and whether it still lives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from nanscope.snapshot.processes import age, lives, mark


def test_this_process_lives() -> None:
    """By its own mark, and with the number of another birth it does not."""
    machine, pid, birth = mark().split("-")
    assert pid == str(os.getpid()) and lives(mark()) is True
    assert lives(f"{machine}-{pid}-{int(birth) + 1}") is False


def test_a_process_that_has_ended_does_not() -> None:
    """Also while nobody has asked how it ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = mark(process.pid)
    assert lives(found) is True
    process.communicate()
    assert lives(found) is False


@pytest.mark.parametrize("text", ["", "x", "00000000-1-1", f"{mark().split('-')[0]}-x-1", f"{mark().split('-')[0]}-{'9' * 30}-1", "-1-0"])
def test_of_what_is_elsewhere_nobody_can_tell(text: str) -> None:
    """Another machine, and what is no mark at all."""
    assert lives(text) is None


def test_a_mark_gives_no_name_away() -> None:
    """It stands in files that are attached to issues."""
    assert socket.gethostname() not in mark() and len(mark().split("-")[0]) == 8


def test_the_age_of_a_process() -> None:
    """In seconds, None for one that there is not."""
    first = age(os.getpid())
    time.sleep(0.05)
    second = age(os.getpid())
    assert first is not None and second is not None and 0 <= first < second < 1e7
    assert age(2**22 + 1) is None
