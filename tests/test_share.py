"""What one rank of many may write, and what it leaves to the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from seen import NAN
from test_logbook import bad

from nanscope.snapshot.observation import Observation, Origin, Phase
from nanscope.snapshot.step import Snapshot
from nanscope.watching.afterwards import arrived
from nanscope.watching.disk import Disk
from nanscope.watching.share import FEW, Share

WORLD = 64
MADE = Observation(phase=Phase.FORWARD, origin=Origin("exp", file="loss.py", line=3), outside=True)
CAME = arrived("w", torch.tensor([NAN]))


def own(step: int, rank: int, line: int = 3) -> Snapshot:
    return bad(step, rank=rank, observation=replace(MADE, origin=replace(MADE.origin, line=line)))


def test_what_came_from_elsewhere_is_written_by_a_few_ranks(tmp_path: Path) -> None:
    """By all of them where they are few, or where the run is of one process; a step that was asked for by everybody."""
    for snapshot in (bad(3, observation=CAME), bad(4, observation=MADE, consequence_of=3)):
        left = [Share(tmp_path, rank, WORLD).leaves(replace(snapshot, rank=rank)) for rank in range(WORLD)]
        assert left == [rank >= FEW for rank in range(WORLD)]
        assert not any(Share(tmp_path, rank, world).leaves(snapshot) for world in (0, 1, FEW) for rank in range(world or 1))
    assert not Share(tmp_path, WORLD - 1, WORLD).leaves(bad(3, observation=CAME, asked=True))


def test_of_ranks_that_make_the_same_those_that_come_first_write_it(tmp_path: Path) -> None:
    """However they race; another line and another step are something else, and who writes goes on writing."""
    shares = [Share(tmp_path, rank, WORLD) for rank in range(WORLD)]
    with ThreadPoolExecutor(WORLD) as pool:
        left = list(pool.map(lambda share: share.leaves(own(3, 0)), shares))
    assert left.count(False) == FEW
    assert [share.leaves(own(3, 0)) for share in shares] == left, "asked again, the answer is the same"
    assert [share.leaves(own(3, 0, line=9)) for share in shares[::-1]].count(False) == FEW
    assert [share.leaves(own(4, 0)) for share in shares].count(False) == FEW


def test_one_rank_alone_writes_what_it_made(tmp_path: Path) -> None:
    """Whichever it is."""
    assert not Share(tmp_path, WORLD - 1, WORLD).leaves(own(3, WORLD - 1))


def test_a_rank_that_cannot_ask_for_a_place_tries_to_write(tmp_path: Path) -> None:
    """The disk says then what is wrong with the folder."""
    assert not Share(tmp_path / "gone", 40, WORLD).leaves(own(3, 40))


@pytest.mark.parametrize("world", [2, WORLD])
def test_the_bytes_of_a_run_are_counted_over_its_ranks(tmp_path: Path, world: int) -> None:
    """What came from elsewhere leaves half of them to what made it; nothing at all on the disk is room for whatever comes."""

    def write(snapshot: Snapshot) -> bool:
        share = Share(tmp_path, snapshot.rank, world)
        return Disk(tmp_path, 10_000, share).save(replace(snapshot, tensors={1: torch.zeros(750)})) is not None

    assert write(bad(3, rank=0, observation=CAME)) and not write(bad(3, rank=1, observation=CAME))
    assert write(own(3, 1)) and not write(own(4, 1)), "the disk is full"
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
