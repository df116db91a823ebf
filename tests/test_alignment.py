"""Ranks whose trainers drop steps alone number what follows differently: it is lined up, and told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanscope.program.program import Program
from nanscope.report.terminal import render_text
from nanscope.snapshot.alignment import called_by, dropped_alone
from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.file import save
from nanscope.snapshot.observation import Kind, Observation
from nanscope.snapshot.record import Aftermath, RunRecord
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.run import verdict_of
from nanscope.verdict.standing import Standing

DROPPED = st.lists(st.integers(1, 12), unique=True, max_size=5).map(sorted)


@given(st.integers(1, 20), DROPPED, DROPPED)
def test_the_same_update_has_one_name_on_each_rank(update: int, own: list[int], other: list[int]) -> None:
    """The n-th step that was not dropped here is the n-th that was not dropped there."""

    def nth(dropped: list[int]) -> int:
        return [step for step in range(1, 40) if step not in dropped][update - 1]

    assert called_by(nth(own), own, other) == nth(other)
    assert called_by(nth(own), own, own) == nth(own)


def test_steps_that_all_drop_are_the_same_ones() -> None:
    """Rank 1 drops step 3 alone, then both drop the two after the next: those line up, and only the first is told."""
    mine, theirs = [3, 6, 7], [5, 6]
    assert [called_by(step, mine, theirs) for step in range(1, 9)] == [1, 2, 3, 3, 4, 5, 6, 7]
    assert dropped_alone({0: theirs, 1: mine}, {0: 4, 1: 4}) == {1: (3,)}
    assert dropped_alone({0: theirs, 1: mine}, {0: 2, 1: 4}) == {}
    assert dropped_alone({0: [4], 1: [4]}, {0: 9, 1: 9}) == {}


def test_a_step_of_two_ranks_that_number_it_differently_is_one(tmp_path: Path) -> None:
    """Rank 1 has dropped step 3 alone; what rank 0 makes in its step 4 comes to rank 1 in the same step, which that calls step 5."""
    for rank, dropped, seen in ((0, (), Observation()), (1, (3,), Observation(Kind.ARRIVED))):
        reached = Reached(None, 1, 1, 1, 1, "taken")
        poison = Snapshot(4 + rank, rank, Program((), (), -1), {}, None, {}, reached, observation=seen, found=seen)
        save(poison, tmp_path)
        record = RunRecord(run="run", rank=rank, world=2, steps=8 + rank, status="non-finite", dropped=dropped)
        replace(record, first=BadStep.of_snapshot(poison), aftermath=(Aftermath(4 + rank, 5 + rank, 8 + rank, 4),)).write(tmp_path)
    found = verdict_of(tmp_path)
    assert found.ranks is not None
    assert [(group.standing, group.ranks, group.steps) for group in found.ranks.groups] == [
        (Standing.FIRST, (0,), (4, 4)),
        (Standing.SAME_STEP, (1,), (4, 4)),
    ]
    assert found.aftermath == (Aftermath(4, 5, 8, 4),)
    assert "dropped step 3 alone" in render_text(found)


@pytest.mark.parametrize("counts", [((), (3,)), ((3,), (3,))])
def test_a_rank_that_drops_a_step_alone_is_told(counts: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    """In a healthy run, too; where all have dropped it their numbers are the same, and there is nothing to tell."""
    for rank, dropped in enumerate(counts):
        RunRecord(run="run", rank=rank, world=2, steps=8 + len(dropped), status="healthy", dropped=dropped).write(tmp_path)
    notes = [(note.slug, note.text, note.step) for note in verdict_of(tmp_path).notes]
    text = "rank 1 of 2 dropped step 3 alone: from there on its numbers are 1 ahead of those of the others; the ranks are told by those of rank 0"
    assert notes == ([("numbered_apart", text, 3)] if counts[0] != counts[1] else [])


def test_a_rank_that_dies_before_its_step_is_over_is_told_as_who_made_it(tmp_path: Path) -> None:
    """All ranks drop step 3; rank 1, which made it, is killed before it could say so."""
    for rank, seen in ((0, Observation(Kind.ARRIVED)), (1, Observation())):
        bad = Snapshot(3, rank, Program((), (), -1), {}, None, {}, Reached(None, 1, 1, 0, 1, "dropped"), observation=seen, found=seen)
        save(bad, tmp_path)
        record = RunRecord(run="run", rank=rank, world=2, first=BadStep.of_snapshot(bad))
        record = replace(record, steps=2) if rank else replace(record, steps=5, status="non-finite", dropped=(3,))
        record.write(tmp_path)
    found = verdict_of(tmp_path)
    assert found.ranks is not None
    assert [(group.standing, group.ranks, group.steps) for group in found.ranks.groups] == [
        (Standing.FIRST, (1,), (3, 3)),
        (Standing.SAME_STEP, (0,), (3, 3)),
    ]
