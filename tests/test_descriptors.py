"""A descriptor of ours, which somebody else may close: what is opened under its number then is not touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nanscope.snapshot.descriptors import Descriptor
from nanscope.snapshot.history import Entry, History, read


def test_a_number_that_is_anothers_by_now_is_left_alone(tmp_path: Path) -> None:
    """It is neither written to nor closed, and that it could not be written is said."""
    ours = Descriptor(os.open(tmp_path / "ours", os.O_WRONLY | os.O_CREAT))
    ours.write(b"one")
    os.close(ours.number)
    theirs = os.open(tmp_path / "theirs", os.O_WRONLY | os.O_CREAT)
    assert theirs == ours.number and not ours.ours
    with pytest.raises(OSError, match="Bad file descriptor"):
        ours.write(b"two")
    ours.close()
    os.write(theirs, b"three")
    os.close(theirs)
    assert ((tmp_path / "ours").read_bytes(), (tmp_path / "theirs").read_bytes()) == (b"one", b"three")


def test_a_history_whose_file_was_closed_goes_on(tmp_path: Path) -> None:
    """Whatever stands under its number now, every step is in it."""
    history = History(tmp_path / "history.rank0.jsonl")
    history.append(Entry(1, 0, 0.0))
    number = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    os.dup2(number, number - 1)  # the history's, which was opened just before
    history.append(Entry(2, 0, 0.0))
    history.close()
    assert [entry.step for entry in read(tmp_path / "history.rank0.jsonl")] == [1, 2]
    assert os.fstat(number - 1).st_size == 0
    os.close(number - 1)
    os.close(number)
