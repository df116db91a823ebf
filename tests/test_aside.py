"""Writes that training does not wait for, into a folder that may not answer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import nanscope
from nanscope.snapshot import aside
from nanscope.snapshot.aside import Aside, is_near
from nanscope.snapshot.history import Entry, History, read
from tests.loops import grpo_steps, policy


def entry(step: int) -> Entry:
    return Entry(step=step, rank=0, time=0.0, loss=1.0)


def test_on_a_disk_of_this_machine_a_write_is_made_at_once() -> None:
    """And no thread is there for it."""
    made: list[int] = []
    near = Aside()
    near.do(lambda: made.append(threading.get_ident()))
    near.end(0.0)
    assert made == [threading.get_ident()]


def test_who_writes_waits_as_long_as_the_folder_answers() -> None:
    """A process that is killed has written what it did."""
    made: list[int] = []
    far = Aside(near=False)
    for number in range(20):
        far.do(lambda number=number: made.append(number))
        assert made[-1] == number
    far.end(0.0)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a pipe with a name, which nobody reads at first")
def test_a_file_that_does_not_answer_stalls_nobody(tmp_path: Path) -> None:
    """Every line comes later, in its order, and the sign of a step that has begun stands at the end."""
    path = tmp_path / "history.rank0.jsonl"
    os.mkfifo(path)
    far = Aside(near=False)
    history = History(path, "id", far)
    for step in range(1, 300):
        history.begin()
        history.append(entry(step))
    history.begin()
    with pytest.raises(OSError, match="does not answer"):
        far.end(0.0)
    with path.open("rb") as reader:
        far.end(10.0)
        written = os.read(reader.fileno(), 1 << 20)
    lines = written.splitlines()
    assert lines[-1] == b"{" and len(lines) == 300
    (tmp_path / "copy.jsonl").write_bytes(written)
    assert [one.step for one in read(tmp_path / "copy.jsonl")] == list(range(1, 300))


def test_what_is_still_to_be_written_is_written_once() -> None:
    """A record that changes a thousand times while the folder sleeps is one write."""
    awake, made = threading.Event(), []
    far = Aside(near=False)

    def sleep() -> None:
        awake.wait(10.0)

    def put() -> None:
        made.append(1)

    far.do(sleep, wait=False)
    for _ in range(1000):
        far.do(put, wait=False)
    awake.set()
    far.end(10.0)
    assert len(made) <= 2


def test_who_writes_next_is_told_of_a_failure() -> None:
    """Nothing fails in silence."""
    far = Aside(near=False)

    def fail() -> None:
        raise OSError(28, "no room")

    with pytest.raises(OSError, match="no room"):
        far.do(fail)
        far.end(10.0)
    far.end(0.0)


MOUNTS = """\
21 1 254:1 / / rw,relatime - ext4 /dev/root rw
30 21 0:25 / /mnt/shared rw - nfs4 server:/export rw
31 30 0:26 / /mnt/shared/fast\\040one rw - tmpfs tmpfs rw
32 21 0:27 / /weka rw - wekafs default rw
33 21 0:28 / /scratch rw - nfs server:/scratch rw
34 21 0:29 / /scratch rw - xfs /dev/nvme0n1 rw
"""


@pytest.mark.parametrize(
    ("folder", "near"),
    [
        ("/home/me/runs", True),
        ("/mnt/shared/runs", False),
        ("/mnt/shared/fast one/runs", True),
        ("/mnt/sharedruns", True),
        ("/weka", False),
        ("/scratch/runs", True),
    ],
)
def test_where_a_folder_lies_is_known_from_the_table_of_mounts(tmp_path: Path, folder: str, near: bool) -> None:
    """The longest mount point decides, of two at one place the later; a kind that is not known is no disk."""
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert is_near(Path(folder), tmp_path / "mountinfo") is near
    assert is_near(Path(folder), tmp_path / "none")


def test_a_run_in_a_far_folder_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step, the record and the files of a bad one."""
    names = []
    for near in (aside.NEAR, frozenset[str]()):
        monkeypatch.setattr(aside, "NEAR", near)
        with nanscope.watch(out=tmp_path / str(len(names))) as scope:
            grpo_steps(policy(), 3)
        names.append(sorted(path.name for path in scope.out.iterdir()))
        assert [one.step for one in read(scope.out / "history.rank0.jsonl")] == [1, 2, 3]
        assert scope.verdict.healthy
    assert names[0] == names[1]


def test_a_killed_process_has_written_what_it_did_in_a_far_folder(tmp_path: Path) -> None:
    """The line of each step that was over."""
    script = """
import os, signal, torch, nanscope
from nanscope.snapshot import aside
aside.NEAR = frozenset()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with nanscope.watch(model, out="runs"):
    for _ in range(5):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False, timeout=120)
    (history,) = tmp_path.glob("runs/2*/history.rank0.jsonl")
    assert [one.step for one in read(history)] == [1, 2, 3, 4, 5]
