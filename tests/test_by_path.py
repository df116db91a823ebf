"""`nanscope.replay`, `nanscope.diagnose` and `nanscope.history` take what a person has: a step, its file, its run, a folder of runs."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from verdicts import ppo_step

import nanscope
from nanscope.errors import NanscopeError, SnapshotError
from nanscope.replay import anywhere
from nanscope.snapshot.file import save


def train(out: Path, bad: bool) -> nanscope.Scope:
    with nanscope.watch(out=out, name="a run") as scope:
        weight = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            (weight(torch.ones(2)) * (float("nan") if bad and step == 2 else 1.0)).sum().backward()
            optimizer.step()
    return scope


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> nanscope.Scope:
    """Two runs in a folder, of which the later one went bad."""
    out = tmp_path_factory.mktemp("runs")
    train(out, bad=False)
    return train(out, bad=True)


def test_a_verdict_is_had_by_whatever_is_at_hand(ran: nanscope.Scope) -> None:
    """The folder of runs, the run, its snapshot by path, as text and loaded, and several of them, all tell of the same step."""
    (file,) = ran.paths
    assert file is not None
    whole = [nanscope.diagnose(what) for what in (ran.out, str(ran.out), ran.out.parent, ran.out.parent / "latest")]
    assert {str(verdict) for verdict in whole} == {str(ran.verdict)}
    assert whole[0].steps == 3 and whole[0].incidents[0].snapshot == str(file)
    of_step = [nanscope.diagnose(what) for what in (file, str(file), nanscope.load(file), [file], (nanscope.load(file),))]
    assert {str(verdict) for verdict in of_step} == {str(ran.verdict)}
    assert [verdict.incidents[0].snapshot for verdict in of_step] == [str(file), str(file), None, str(file), None]


def test_the_history_is_had_by_whatever_is_at_hand(ran: nanscope.Scope) -> None:
    """Also by a file of the run."""
    (file,) = ran.paths
    assert file is not None
    whats = (ran.out, str(ran.out), ran.out.parent, f"{ran.out.parent}/", file, ran.out / "history.rank0.jsonl", ran.out / "run.json")
    frames = [nanscope.history(what) for what in whats]
    assert all(frame.equals(frames[0]) for frame in frames) and list(frames[0].index) == [1, 2, 3]


def test_a_step_is_replayed_by_whatever_is_at_hand(tmp_path: Path) -> None:
    """With edits as on the command line, of which one may be given as it is."""
    step = ppo_step({})
    file = save(step, tmp_path)
    for what in (step, file, str(file)):
        found = nanscope.replay(what, ["clamp:20", "mask"])
        assert [row.id for row in found.rows if row.kind == "asked"] == ["clamp_exponent", "mask_before_op"]
        assert found.reproduces and isinstance(found, nanscope.Replay)
    assert len(nanscope.replay(file, "clamp:20").rows) == len(nanscope.replay(file).rows) + 1


def test_a_folder_is_no_step(ran: nanscope.Scope, tmp_path: Path) -> None:
    """Which of its snapshots is meant nobody knows; and an empty folder is no run."""
    with pytest.raises(SnapshotError, match="is a folder; name a snapshot in it"):
        nanscope.replay(ran.out)
    with pytest.raises(NanscopeError, match="is not a run directory"):
        nanscope.diagnose(tmp_path)


def test_the_room_of_the_replay_can_be_called_and_stays_a_room() -> None:
    """Before any file of it is imported and afterwards, with the signature of its function; it stays the package that it is."""
    code = (
        "import nanscope, inspect\n"
        "first = nanscope.replay\nassert callable(first) and 'edits' in inspect.signature(first).parameters\n"
        "import nanscope.replay.tries\nassert nanscope.replay is first and nanscope.replay.tries.Replay is nanscope.Replay\n"
        "from nanscope.replay import tries\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    one, other = inspect.signature(nanscope.replay), inspect.signature(anywhere.replay)
    assert one.parameters == other.parameters


def test_a_run_that_was_moved_is_read_where_it_is(ran: nanscope.Scope, tmp_path: Path) -> None:
    """Nothing is looked up where it once was."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(ran.out, moved)
    assert nanscope.diagnose(moved).incidents[0].snapshot == str(moved / Path(str(ran.paths[0])).name)
