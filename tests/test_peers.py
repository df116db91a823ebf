"""What ranks tell each other through files: who made a NaN, and whose step went on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from seen import NAN
from test_logbook import bad

from nanscope.snapshot.file import save
from nanscope.snapshot.history import Entry, History
from nanscope.watching import peers
from nanscope.watching.look import arrived
from nanscope.watching.peers import TRIES, Peers, of_other_ranks


def test_other_ranks_are_asked_for_the_steps_at_which_something_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those steps only, of other ranks only, and only who made it; a file that cannot be read is passed over."""
    came = arrived("w", torch.tensor([NAN]))
    own = [bad(3, observation=came)]
    made, later = (save(bad(step, rank=1), tmp_path) for step in (3, 4))
    for snapshot in (own[0], bad(3, rank=2, observation=came)):
        save(snapshot, tmp_path)
    (tmp_path / "step-000003.rank9.safetensors").write_bytes(b"half a file")
    assert list(of_other_ranks(tmp_path, own, wait=False)) == [str(made)]
    assert of_other_ranks(tmp_path, [bad(3)], wait=False) == {}
    made.unlink()
    monkeypatch.setattr(peers, "PATIENCE", 0.05)
    assert of_other_ranks(tmp_path, own, wait=True) == {} and later.exists()


def write(folder: Path, rank: int, **steps: bool) -> None:
    """Write the history of a rank. steps: `s3=True` for a third step that was bad."""
    history = History(folder / f"history.rank{rank}.jsonl")
    for name, is_bad in steps.items():
        history.append(Entry(step=int(name[1:]), rank=rank, time=0.0, nonfinite=is_bad))
    history.close()


def test_a_step_is_told_when_all_the_others_have_written_it_and_only_once(tmp_path: Path) -> None:
    """Who has not come so far says nothing, and our own line is none of theirs."""
    asked = Peers(tmp_path, 0)
    assert asked.lines({3}, 0.0) == {}, "nobody has written"
    write(tmp_path, 0, s3=True, s4=True)
    write(tmp_path, 1, s3=False, s4=True)
    write(tmp_path, 2, s3=True)
    found = asked.lines({3, 4}, 0.0)
    assert {step: sorted((e.rank, e.nonfinite) for e in entries) for step, entries in found.items()} == {3: [(1, False), (2, True)]}
    write(tmp_path, 2, s4=False)
    assert list(asked.lines({3, 4}, 0.0)) == [4]


def test_ranks_whose_files_lie_elsewhere_are_not_asked_for_ever(tmp_path: Path) -> None:
    """A step that nobody writes about costs a few looks into the folder, and no more than the patience that was allowed."""
    asked, began = Peers(tmp_path, 0), time.monotonic()
    assert all(asked.lines({3}, 0.0) == {} for _ in range(TRIES))
    write(tmp_path, 1, s3=False)
    assert asked.lines({3}, 60.0) == {} and time.monotonic() - began < 30
