"""How a run was started, as it may be shown to others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nanscope.watching.invoked import MOST, command, commit

CASES = [
    (["train.py", "--lr", "1e-6"], "train.py --lr 1e-6"),
    (["/lab/project/src/train.py", "--out=/store/someone/run"], "src/train.py --out=…/run"),
    (["train.py", "--api-key", "abc", "--steps", "3"], "train.py --api-key … --steps 3"),
    (["train.py", "--hub_token=abc", "wandb.api_key=12"], "train.py --hub_token=… wandb.api_key=…"),
    (["train.py", "--max_tokens", "512", "trainer.tokens=9"], "train.py --max_tokens 512 trainer.tokens=9"),
    (["train.py", "hf_abcdefghijklmn"], "train.py …"),
    (["train.py", "--store", "s3://me:secret@host/x"], "train.py --store …"),
    (["train.py", "--gemini-api-key", "S1", "--admin-password=S2"], "train.py --gemini-api-key … --admin-password=…"),
    (["train.py", "postgresql://u:S3@h/db?sslmode=x"], "train.py …"),
    (["train.py", "--env=WANDB_API_KEY=S4", "--url=https://h/d?token=S5"], "train.py --env=WANDB_API_KEY=… --url=https://h/d?token=…"),
    (["train.py", "wandb={api_key:S6,name:x}"], "train.py wandb={api_key:…,name:x}"),
    (["train.py", "sk-proj-abcdefghijkl", "-p", "S7", "--token", "S8", "S9"], "train.py … -p … --token … …"),
    (["train.py", "data.files=['/home/alice/x.parquet','/home/alice/y']"], "train.py data.files=['…/x.parquet','…/y']"),
    (
        ["train.py", "--pad-token-id", "3", "--num_tokens=4", "--tokenizer", "q", "actor.lr=1e-6"],
        "train.py --pad-token-id 3 --num_tokens=4 --tokenizer q actor.lr=1e-6",
    ),
    (["train.py", "two words"], 'train.py "two words"'),
    (["train.py", "a\x1b[31m\nb"], 'train.py "a [31m b"'),
    ([], ""),
]


@pytest.mark.parametrize(("argv", "shown"), CASES)
def test_a_command_line_tells_no_secret_and_no_machine(argv: list[str], shown: str) -> None:
    """A report is handed to strangers."""
    assert command(argv, Path("/lab/project")) == shown


def test_a_long_command_line_is_cut() -> None:
    """Some launchers hand over a whole configuration."""
    assert len(command(["train.py", *["x"] * 10_000])) == MOST


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(("git", *who, *words), cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("state", ["branch", "packed", "detached", "beside"])
def test_the_commit_is_the_one_that_git_says(state: str, tmp_path: Path) -> None:
    """On a branch, after `git gc`, without a branch, and in a work tree beside the first one."""
    tree = tmp_path / "project"
    tree.mkdir()
    git(tree, "init", "-q")
    (tree / "train.py").touch()
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "first")
    if state == "packed":
        git(tree, "pack-refs", "--all")
    if state == "detached":
        git(tree, "checkout", "-q", "--detach")
    if state == "beside":
        git(tree, "worktree", "add", "-q", "../beside")
        tree = tmp_path / "beside"
    assert commit(str(tree / "train.py")) == git(tree, "rev-parse", "HEAD")[:12]


def test_no_git_is_no_commit(tmp_path: Path) -> None:
    """And a `.git` that holds anything else is none, either."""
    assert commit(str(tmp_path / "train.py")) is None
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / ".git").write_text("gitdir: /nowhere")
    assert commit(str(tmp_path / "broken" / "train.py")) is None
    (tmp_path / "odd" / ".git").mkdir(parents=True)
    (tmp_path / "odd" / ".git" / "HEAD").write_text("ref: ../../../etc/passwd")
    assert commit(str(tmp_path / "odd" / "train.py")) is None
