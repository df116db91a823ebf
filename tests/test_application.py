"""The command line as a whole: help on one screen and in groups, verbs that are varieties of others, near misses, completion by a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import call

from nanscope.__main__ import app
from nanscope.causes import Cause
from nanscope.commands.application import ASK, LEARN, WATCH


def helped(*words: str, columns: int = 80) -> list[str]:
    """Lines of help, in a process of its own: the width is read when it begins."""
    command = [sys.executable, "-m", "nanscope", *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": str(columns)})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


SHOWN = {(known.name or known.callback.__name__): known for known in app.registered_commands if not known.hidden}
HIDDEN = {(known.name or known.callback.__name__): known for known in app.registered_commands if known.hidden}


def test_all_verbs_are_on_one_screen_in_groups() -> None:
    """24 lines of 80 characters, a prompt included; each verb a line of at most 60."""
    lines = helped()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    groups = [line.rstrip(":") for line in lines if line.endswith(":")]
    assert groups == [WATCH, ASK, LEARN]
    told = dict(line.strip().split(None, 1) for line in lines[6:] if line.startswith("  "))
    assert set(told) == set(SHOWN) and max(map(len, told.values())) <= 60


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("verb", sorted({*SHOWN, *HIDDEN}))
def test_the_help_of_a_verb_fits(verb: str, columns: int) -> None:
    """No line is wider than the terminal, and every option is there."""
    lines = helped(verb, columns=columns)
    assert max(map(len, lines)) <= columns
    for name in ("--help", *(["--json"] if verb in ("replay", "check", "audit", "inspect") else [])):
        assert any(name in line for line in lines)


def test_a_verb_that_varies_another_is_an_option_of_it(tmp_path: Path) -> None:
    """And its old spelling still works."""
    assert set(HIDDEN) == {"variants", "precision"}
    assert call("variants", "trl.grpo").stdout == call("replay", "--list", "trl.grpo").stdout != ""
    for words in (["precision", "gone"], ["check", "--precision", "gone"]):
        assert call(*words, cwd=tmp_path).stderr == "nanscope: there is no file or run 'gone'\n"


NEAR = {
    "verb": (["replya"], 2, "there is no verb 'replya'; did you mean replay?"),
    "option": (["replay", "--swep", "clamp"], 2, "there is no option --swep; did you mean --sweep?"),
    "option of run": (["run", "--ot", "runs", "train.py"], 2, "there is no option --ot; did you mean --out?"),
    "cause": (["explain", "where_trap"], 1, "nanscope: no cause is called 'where_trap'; did you mean where_grad_trap?"),
    "loss": (["replay", "--list", "verl.vanila"], 1, "nanscope: no loss begins with 'verl.vanila'; did you mean verl.vanilla?"),
    "loss of the atlas": (["atlas", "tinkr.ppo"], 1, "did you mean 'tinker.ppo'?"),
    "script": (["run", "trian.py"], 1, "nanscope: there is no script and no command 'trian.py'; did you mean train.py?"),
    "nothing like it": (["explain", "zzz"], 1, "nanscope: no cause is called 'zzz'; `nanscope explain` lists them"),
}


@pytest.mark.parametrize("what", NEAR)
def test_a_near_miss_is_recognised(what: str, tmp_path: Path) -> None:
    """One line says what there is not, and what was perhaps meant."""
    (tmp_path / "train.py").write_text("")
    words, status, line = NEAR[what]
    done = call(*words, cwd=tmp_path)
    assert done.returncode == status and line in done.stderr.splitlines()[-1]


def completed(line: str, cwd: Path, shell: str = "bash") -> list[str]:
    """What a shell is offered for a line of which the last word is not finished."""
    words = line.split(" ")
    given = {"_NANSCOPE_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_TYPER_COMPLETE_ARGS": line}
    done = subprocess.run([sys.executable, "-m", "nanscope"], capture_output=True, text=True, cwd=cwd, timeout=60, env=os.environ | given)
    return done.stdout.split()


def test_a_shell_completes_verbs_causes_and_snapshots(tmp_path: Path) -> None:
    """Without torch; what is hidden is not offered."""
    (tmp_path / "nanscope-runs" / "2026-11-21T20-15-03-train").mkdir(parents=True)
    saved = "nanscope-runs/2026-11-21T20-15-03-train/step-000004.rank0.safetensors"
    (tmp_path / saved).write_bytes(b"")
    assert completed("nanscope re", tmp_path) == [name for name in SHOWN if name.startswith("re")]
    assert not set(completed("nanscope ", tmp_path)) & set(HIDDEN)
    assert completed("nanscope explain where_", tmp_path) == [cause for cause in Cause if cause.startswith("where_")] != []
    assert completed("nanscope replay nanscope-runs/", tmp_path) == [saved]
    assert completed("nanscope replay --sw", tmp_path) == ["--sweep"]


def test_a_shell_is_told_how_to_complete() -> None:
    """The script that `eval` reads."""
    command = [sys.executable, "-m", "nanscope", "--show-completion", "bash"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    )
    assert done.returncode == 0 and "complete -o default -F _nanscope_completion nanscope" in done.stdout
