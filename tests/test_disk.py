"""What a run may write: a limit on all snapshots, for which consequences go first and causes never."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from seen import NAN

from nanscope.program.program import Program
from nanscope.snapshot.file import load
from nanscope.snapshot.record import RunRecord, records
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.watching.disk import Disk

MIB = 1 << 20


def step(number: int, of: int | None = None, size: int = MIB) -> Snapshot:
    """A bad step of so many bytes. of: the step whose consequence it is."""
    tensors = {0: torch.zeros(size // 4)}
    return Snapshot(number, 0, Program((), (), -1), tensors, None, {}, Reached(NAN, 1, 1), consequence_of=of)


LIMITED: list[tuple[list[Snapshot], list[int]]] = [  # what comes, in MiB of 3 -> the steps that are on disk in the end
    ([step(1), step(2)], [1, 2]),
    ([step(1), step(2), step(3), step(4)], [1, 2]),
    ([step(1), step(2, of=1), step(3)], [1, 3]),
    ([step(1, size=9 * MIB)], [1]),
    ([step(1, size=9 * MIB), step(2, size=64)], [1]),
    ([step(1), step(2, of=1, size=MIB // 2), step(3, of=1), step(9, size=MIB // 2)], [1, 3, 9]),
    ([step(1), step(2), step(3, of=2)], [1, 2]),
]


@pytest.mark.parametrize(("coming", "kept"), LIMITED, ids=range(len(LIMITED)))
def test_consequences_make_room_for_causes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, coming: list[Snapshot], kept: list[int]
) -> None:
    """The oldest first; a cause that was written stays, the first is written however large it is, and what is not written is said once."""
    disk = Disk(tmp_path, 3 * MIB - 1)
    with caplog.at_level(logging.WARNING, "nanscope"):
        paths = [disk.save(snapshot) for snapshot in coming]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [load(file).step for file in files] == kept
    assert [path for path in paths if path is not None and disk.holds(path)] == files
    assert sum("[unwritten]" in record.message for record in caplog.records) == (None in paths) == bool(disk.problem)


def test_a_snapshot_that_is_written_again_takes_its_room_once(tmp_path: Path) -> None:
    """What the step reached is added to the file."""
    disk = Disk(tmp_path, 2 * MIB + 100_000)
    for _ in range(5):
        assert disk.save(step(1)) is not None
    assert disk.save(step(2)) is not None and disk.save(step(3)) is None


def test_nothing_is_written_where_there_is_no_folder() -> None:
    """And nothing is said of it: it was, when the run began."""
    disk = Disk(None, MIB)
    disk.write(RunRecord())
    assert disk.save(step(1)) is None and disk.problem == ""


def test_a_full_disk_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of whatever is written first; a file that was there before is left as it was."""
    folder = tmp_path / "run"
    folder.mkdir()
    disk = Disk(folder, MIB)
    disk.write(RunRecord(steps=1))
    gone = folder.rename(tmp_path / "gone")
    folder.write_text("in the way")
    with caplog.at_level(logging.WARNING, "nanscope"):
        for number in (1, 2):
            disk.write(RunRecord(steps=2))
            assert disk.save(step(number, size=64)) is None
    assert len(caplog.records) == 1 and "run.json could not be written" in disk.problem
    assert records(gone)[0].steps == 1
