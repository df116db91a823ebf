"""A folder of runs: which directories are runs, and which of them is the latest."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanscope.errors import NanscopeError
from nanscope.snapshot.runs import Folder, bad_step_files, find_run, histories, history_path, is_run, latest, point, runs_in


def made(folder: Path, name: str, file: str = "history.rank0.jsonl") -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / file).touch()
    return path


@pytest.mark.parametrize("file", ["run.json", "run.rank3.json", "history.rank12.jsonl", "step-000412.rank0.part2.safetensors"])
def test_what_a_run_is(tmp_path: Path, file: str) -> None:
    """Whatever of it is left."""
    assert is_run(made(tmp_path, "a", file)) and not is_run(tmp_path) and not is_run(tmp_path / "gone")
    assert not is_run(made(tmp_path, "b", "runner.json"))


def test_runs_are_listed_in_their_order(tmp_path: Path) -> None:
    """By time, and of one second by their number; what is no run is not listed, nor is `latest` twice."""
    names = ["2026-11-21T20-15-03-train", "2026-11-21T20-15-03-train-2", "2026-11-21T20-15-03-train-10", "2026-11-22T01-00-00-a"]
    for name in reversed(names):
        made(tmp_path, name)
    (tmp_path / "notes").mkdir()
    point(tmp_path, tmp_path / names[0])
    assert [path.name for path in runs_in(tmp_path)] == names and runs_in(tmp_path / "gone") == []


def test_the_latest_is_the_one_that_began_last(tmp_path: Path) -> None:
    """As it was noted; where it was not, or that run is gone, the last by name."""
    first, second = made(tmp_path, "2026-11-21T20-15-03-b"), made(tmp_path, "2026-11-22T20-15-03-a")
    assert latest(tmp_path) == second
    point(tmp_path, first)
    assert latest(tmp_path) == first
    point(tmp_path, tmp_path / "deleted")
    assert latest(tmp_path) == second and latest(tmp_path / "gone") is None


@pytest.mark.parametrize("text", [b"", b"..", b"../../etc", b"/", b"\xff\xfe", b"x" * 5000, b"\x00", b"outside"])
def test_a_pointer_leads_nowhere_else(tmp_path: Path, text: bytes) -> None:
    """A folder may come from a stranger: `latest` names a run in it, or is passed over."""
    made(tmp_path, "outside")
    only = made(tmp_path, "runs/2026-11-21T20-15-03-b")
    (tmp_path / "runs" / "latest").write_bytes(text)
    assert latest(tmp_path / "runs") == only
    (tmp_path / "runs" / "latest").unlink()
    (tmp_path / "runs" / "latest").symlink_to(tmp_path / "outside")
    assert latest(tmp_path / "runs") == only


def test_somebody_elses_latest_is_left_alone(tmp_path: Path) -> None:
    """A directory of that name is not replaced."""
    run = made(tmp_path, "2026-11-21T20-15-03-b")
    (made(tmp_path, "latest") / "mine").write_text("mine")
    with pytest.raises(OSError):
        point(tmp_path, run)
    assert (tmp_path / "latest" / "mine").read_text() == "mine" and latest(tmp_path) == run
    assert not list(tmp_path.glob(".nanscope-*"))


def test_a_path_means_a_run(tmp_path: Path) -> None:
    """A run itself, or the latest of a folder; anything else is one clear error."""
    first, second = made(tmp_path, "runs/2026-11-21T20-15-03-b"), made(tmp_path, "runs/2026-11-22T20-15-03-a")
    assert find_run(first) == (first, []) and find_run(tmp_path / "runs") == (second, [first, second])
    for path in (tmp_path, tmp_path / "gone", first / "history.rank0.jsonl"):
        with pytest.raises(NanscopeError) as caught:
            find_run(path)
        assert caught.value.slug == "no-run"


def test_the_files_of_a_run_are_found_by_rank_and_by_step(tmp_path: Path) -> None:
    """In the order of ranks, and nothing that is only called alike."""
    made(tmp_path, "a", "history.rank10.jsonl")
    for name in ("history.rank2.jsonl", "history.rankx.jsonl", "step-000412.rank0.safetensors", "step-000413.rank0.part2.safetensors"):
        (tmp_path / "a" / name).touch()
    (tmp_path / "a" / "batch-000412.rank0.safetensors").touch()
    (tmp_path / "a" / "history.rank2.actor.jsonl").touch()
    found = {who: history_path(tmp_path / "a", *who) for who in ((2, ""), (2, "actor"), (10, ""))}
    assert histories(tmp_path / "a") == found and list(histories(tmp_path / "a")) == list(found)
    assert len(list(bad_step_files(tmp_path / "a"))) == 2
    assert [path.name for path in bad_step_files(tmp_path / "a", 412)] == ["step-000412.rank0.safetensors"]


def test_a_home_is_meant_as_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script says `out="~/runs"`, and no folder called `~` comes of it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    found = Folder.of("~/runs")
    assert found.path == tmp_path / "runs" and found.given == str(tmp_path / "runs")
