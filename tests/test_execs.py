"""A process that becomes another program by `os.exec…` is watched on, and its run is told to the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from test_member import told

from nanscope.snapshot.record import records

pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are those of Unix")

# The script becomes a shell, which becomes the script with other arguments, whose child trains and becomes one that goes bad.
BECOMES = """
import os, subprocess, sys
from one import train
if len(sys.argv) == 1:
    train(steps=4)
    try:
        os.execv("/no/such/program", ["program"])
    except FileNotFoundError:
        train(steps=1)
    os.execlp("sh", "sh", "-c", f"exec {sys.executable} becomes.py again")
if sys.argv[1] == "again":
    status = subprocess.run([sys.executable, "becomes.py", "child"], env={**os.environ, "NANSCOPE_ROLE": "child"}).returncode
    sys.exit(7 if status == 0 else 1)
train()
os.execve(sys.executable, [sys.executable, "one.py", "bad"], {**os.environ, "NANSCOPE_ROLE": "grown"})
"""


def test_what_a_process_becomes_is_watched_and_told_once(tmp_path: Path) -> None:
    """The book of the program before is closed, that of the next one is its own, and the status is that of the last one."""
    (tmp_path / "becomes.py").write_text(BECOMES)
    found = told(tmp_path, "becomes.py")
    assert found.status == 7 and found.verdict["status"] == "non-finite" and found.verdict["gaps"] == [], found.err
    assert [(one["step"], one["worker"]) for one in found.verdict["incidents"] if one["consequence_of"] is None] == [(2, "grown")]
    assert found.err.count("● step 2 · grown") == 1
    assert {record.worker: record.steps for record in records(found.run)} == {"": 5, "child": 3, "grown": 3}


def test_a_program_that_the_script_becomes_gives_the_run_its_verdict(tmp_path: Path) -> None:
    """Also where the script has not trained before; the status is that of the verdict, and a program that fails keeps its own."""
    again = f"import os, sys; os.execv({sys.executable!r}, [{sys.executable!r}, 'one.py', *sys.argv[1:]])"
    (tmp_path / "again.py").write_text(again)
    found = told(tmp_path, "again.py", "bad")
    assert (found.status, found.verdict["status"]) == (3, "non-finite"), found.err
    found = told(tmp_path, "again.py", "die")
    assert found.status == 128 + 9
    assert [gap["slug"] for gap in found.verdict["gaps"]] == ["unfinished"]
