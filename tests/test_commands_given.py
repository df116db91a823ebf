"""What FILE means: a snapshot, a run, a folder of runs, several of them; and what is offered where nothing of that name is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_cli import call
from verdicts import ppo_step

from nanscope.commands.given import snapshots_near
from nanscope.snapshot.file import save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: one with two bad steps, one with nothing but a healthy step, one with nothing."""
    folder = tmp_path_factory.mktemp("given")
    runs = folder / "nanscope-runs"
    bad = runs / "2026-11-21T20-15-03-train"
    saved = save(ppo_step({}), bad)
    shutil.copy(saved, bad / "step-000009.rank0.safetensors")
    saved.rename(bad / "step-000004.rank0.safetensors")
    shutil.copy(bad / "step-000004.rank0.safetensors", bad / "batch-000001.rank0.safetensors")
    (folder / "fine").mkdir()
    shutil.copy(bad / "step-000004.rank0.safetensors", folder / "fine" / "batch-000002.rank0.safetensors")
    (folder / "empty").mkdir()
    (folder / "other").mkdir()
    for name in ("fine", "empty"):
        (folder / name / "run.json").write_text("{}")
    return folder


@pytest.mark.parametrize("verb", ["replay", "inspect", "check"])
def test_a_run_is_its_first_bad_step(verb: str, folder: Path) -> None:
    """One line says which it is and what else there is; nothing at all means the latest run here."""
    named = call(verb, "nanscope-runs/2026-11-21T20-15-03-train/step-000004.rank0.safetensors", cwd=folder)
    for words in (["nanscope-runs"], ["nanscope-runs/2026-11-21T20-15-03-train"], []):
        done = call(verb, *words, cwd=folder)
        assert (done.returncode, done.stdout) == (named.returncode, named.stdout)
        assert done.stderr == (
            "nanscope: step-000004.rank0.safetensors, the first of 2 bad steps saved in nanscope-runs/2026-11-21T20-15-03-train; "
            "also: step-000009.rank0\n"
        )


def test_a_healthy_run_is_its_last_saved_step_and_an_empty_one_is_said_so(folder: Path) -> None:
    """Never a guess without a word."""
    assert "batch-000002.rank0.safetensors, the one healthy step saved in fine" in call("inspect", "fine", cwd=folder).stderr
    done = call("inspect", "empty", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "") and "no step is saved in empty" in done.stderr


def test_several_are_asked_in_turn_and_the_worst_status_is_left_with(folder: Path, tmp_path: Path) -> None:
    """Each under its own heading; one that cannot be read keeps no other back."""
    good = "nanscope-runs/2026-11-21T20-15-03-train/step-000009.rank0.safetensors"
    both = call("replay", good, "fine", "--json", tmp_path / "both.json", cwd=folder)
    assert both.returncode == 3
    assert [line for line in both.stdout.splitlines() if line.startswith("== ")] == [f"== {good}", "== fine"]
    assert [told["file"] for told in json.loads((tmp_path / "both.json").read_text())["files"]] == [good, "fine"]
    worse = call("inspect", "gone", good, cwd=folder)
    assert worse.returncode == 1 and "there is no file or run 'gone'" in worse.stderr and "tensor" in worse.stdout
    assert call("check", good, good, "-o", tmp_path / "x.html", cwd=folder).returncode == 2


def test_a_name_that_is_nearly_right_is_recognised(folder: Path) -> None:
    """In the folder that was named, whatever else lies there."""
    for given, meant in (
        ("nanscope-run", "nanscope-runs"),
        ("fine/batch-00002.rank0.safetensors", "fine/batch-000002.rank0.safetensors"),
    ):
        done = call("inspect", given, cwd=folder)
        assert (done.returncode, done.stderr) == (1, f"nanscope: there is no file or run {given!r}; did you mean {meant}?\n")


def test_a_shell_is_offered_the_snapshots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a run or of a folder of runs; where there are none, the folders on the way."""
    monkeypatch.chdir(folder)
    run = "nanscope-runs/2026-11-21T20-15-03-train/"
    names = [f"{run}{name}.rank0.safetensors" for name in ("batch-000001", "step-000004", "step-000009")]
    assert snapshots_near(run) == snapshots_near("nanscope-runs/") == names
    assert snapshots_near(f"{run}st") == names[1:]
    assert snapshots_near("fi") == ["fine/batch-000002.rank0.safetensors"]
    assert snapshots_near("ot") == ["other/"] and snapshots_near("nowhere/x") == []
