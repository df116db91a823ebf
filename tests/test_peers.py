"""What ranks tell each other through files: who made a NaN, and whose step went on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from seen import NAN
from test_logbook import bad

from nanscope.snapshot.file import save
from nanscope.snapshot.history import Entry, History
from nanscope.snapshot.record import RunRecord
from nanscope.watching import peers
from nanscope.watching.afterwards import arrived
from nanscope.watching.peers import ALL, TRIES, Peers, near, of_other_ranks


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


def test_what_another_rank_calls_otherwise_is_the_same_step(tmp_path: Path) -> None:
    """We have dropped step 3 alone, and rank 1 step 2: what it made in its step 5 came to us in ours, and what it made in step 4 before."""
    came = arrived("w", torch.tensor([NAN]))
    RunRecord(run="run", rank=1, world=3, steps=9, dropped=(2,)).write(tmp_path)
    own = [bad(5, observation=came)]
    other = save(bad(4, rank=1), tmp_path)
    assert of_other_ranks(tmp_path, own, wait=False, dropped=[3]) == {}
    save(bad(4, rank=2), tmp_path)  # has no record so far, and has dropped nothing
    assert [(one.step, one.rank) for one in of_other_ranks(tmp_path, own, wait=False, dropped=[3]).values()] == [(5, 2)]
    same = save(bad(5, rank=1), tmp_path)
    assert {path: (one.step, one.rank) for path, one in of_other_ranks(tmp_path, own, wait=False, dropped=[3]).items()} == {
        str(same): (5, 1)
    }
    assert other.exists()


def write(folder: Path, rank: int, **steps: bool) -> None:
    """Write the history of a rank. steps: `s3=True` for a third step that was bad."""
    history = History(folder / f"history.rank{rank}.jsonl")
    for name, is_bad in steps.items():
        history.append(Entry(step=int(name[1:]), rank=rank, time=0.0, nonfinite=is_bad))
    history.close()


def test_a_step_is_told_when_all_the_others_have_written_it_and_only_once(tmp_path: Path) -> None:
    """Who has not come so far says nothing, and our own line is none of theirs."""
    asked = Peers(tmp_path, 0, 3)
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
    asked, began = Peers(tmp_path, 0, 2), time.monotonic()
    assert all(asked.lines({3}, 0.0) == {} for _ in range(TRIES))
    write(tmp_path, 1, s3=False)
    assert asked.lines({3}, 60.0) == {} and time.monotonic() - began < 30


def test_a_folder_that_lists_late_is_not_taken_for_ranks_that_say_nothing(tmp_path: Path) -> None:
    """Of three ranks one has written that it is fine: as long as nothing is there of the other, nothing is said of the step."""
    asked = Peers(tmp_path, 0, 3)
    write(tmp_path, 1, s3=False)
    assert asked.lines({3}, 0.0) == {}
    (tmp_path / "late").mkdir()
    write(tmp_path / "late", 2, s3=True)
    moving = later(0.3, lambda: (tmp_path / "late" / "history.rank2.jsonl").rename(tmp_path / "history.rank2.jsonl"))
    found = asked.lines({3}, 60.0)
    moving.join()
    assert [(entry.rank, entry.nonfinite) for entry in found[3]] == [(1, False), (2, True)]


def later(seconds: float, do: Callable[[], object]) -> threading.Timer:
    """Do something a little later."""
    timer = threading.Timer(seconds, do)
    timer.start()
    return timer


@pytest.mark.parametrize("world", [*range(1, 40), 1023, 1024, 10_000])
def test_a_rank_asks_a_few_whatever_the_mesh(world: int) -> None:
    """All others of a few; of many so few that a thousand ranks make thousands of reads, and one in each group of any mesh of powers of two."""
    for rank in {0, world // 3, world // 2, world - 1}:
        asked = near(rank, world)
        assert rank not in asked and all(0 <= other < world for other in asked) and len(asked) <= ALL
        assert len(asked) == world - 1 or world > ALL
    if world == 1024:
        for inner, size in ((1, 8), (8, 16), (128, 8)):  # tensor-parallel, data-parallel, pipeline
            assert any(other // (inner * size) == 777 // (inner * size) and other % inner == 777 % inner for other in near(777, world))


def test_the_end_of_a_run_waits_for_ranks_whose_records_come_late(tmp_path: Path) -> None:
    """And no longer than for the last of them."""
    (tmp_path / "late").mkdir()
    for rank in (1, 2):
        RunRecord(rank=rank).write(tmp_path)
        RunRecord(rank=rank, status="healthy").write(tmp_path / "late")

    def move() -> None:
        for path in (tmp_path / "late").iterdir():
            path.replace(tmp_path / path.name)

    began, moving = time.monotonic(), later(0.3, move)
    assert Peers(tmp_path, 0, 3).unheard(60.0) == "" and time.monotonic() - began < 30
    moving.join()
    assert Peers(tmp_path, 1, 3).unheard(60.0) == "", "one of them asks for all"


def test_ranks_that_have_not_ended_are_named(tmp_path: Path) -> None:
    """After the patience that was allowed; a record that cannot be read is as good as none."""
    write(tmp_path, 2, s11=False, s12=False)
    RunRecord(rank=1, status="healthy").write(tmp_path)
    RunRecord(rank=2).write(tmp_path)
    assert Peers(tmp_path, 0, 3).unheard(0.05) == "rank 2 of 3 has not reported: its last line is step 12"
    (tmp_path / "run.rank2.json").write_text("half of i")
    assert Peers(tmp_path, 0, 4).unheard(0.0) == "ranks 2–3 of 4 have not reported"
    RunRecord(rank=2, status="healthy").write(tmp_path)
    assert Peers(tmp_path, 0, 4).unheard(0.0) == "rank 3 of 4 has not reported: there is no line of it"
