"""Applies a fix as people do: with `patch`, and with `git apply`, to a copy of the file."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from nanscope.report.diff import unified
from nanscope.verdict.incident import Fix

RUN = """

def run():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 6)
    keep = torch.ones(3, 6)
    keep[1, 4:] = 0
    ref = torch.zeros(3, 6)
    ref[1, 5] = 100.0
    loss(model(torch.ones(3, 4)), ref, keep).backward()
"""  # a masked token overflows in `loss`, which stands above

TOOLS = {"patch": ["patch", "-p0", "--fuzz=0", "--no-backup-if-mismatch"], "git": ["git", "apply", "-p0"]}


def patched(script: Path, fix: Fix, folder: Path) -> Path:
    """A copy of the script with the fix in it. Fails if a tool does not take it whole, or if two tools make two files of it."""
    return patched_all(script.parent, [script.name], fix, folder) / script.name


def patched_all(root: Path, names: Sequence[str], fix: Fix, folder: Path) -> Path:
    """A copy of the files of a folder with the fix in them. names: of the files, from that folder."""
    made = {}
    for name, command in TOOLS.items():
        if shutil.which(name) is None:
            continue
        place = folder / name
        for file in names:
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / file, place / file)
        given = unified(fix)
        done = subprocess.run(command, input=given.encode(), capture_output=True, cwd=place)
        assert done.returncode == 0, (name, done.stdout, done.stderr, given)
        assert not any(word in done.stdout for word in (b"offset", b"fuzz", b"Stripping")), done.stdout
        made[name] = [(place / file).read_bytes() for file in names]
    if not made:
        pytest.skip("neither patch nor git is here")
    assert all(content == next(iter(made.values())) for content in made.values()), made
    return folder / next(iter(made))
