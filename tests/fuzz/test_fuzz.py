"""The searches of this folder, a little of each for every change and all of it at night; what they find is printed with how to run it again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def searched(*arguments: str, seconds: float) -> None:
    """Run one of the searches in a process of its own."""
    root = str(FOLDER.parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))), "OMP_NUM_THREADS": "1"}
    script, *rest = arguments
    done = subprocess.run(
        [sys.executable, FOLDER / script, *rest], capture_output=True, text=True, timeout=seconds, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


SEARCHES = (
    ("operators.py", 1_200, 200_000),  # three calls of each operator; 500
    ("snapshots.py read", 250, 100_000),
    ("snapshots.py replay", 40, 10_000),
)  # what is searched, cases for every change, cases at night


@pytest.mark.parametrize(("search", "few", "many"), SEARCHES, ids=[search for search, _, _ in SEARCHES])
def test_nothing_that_a_file_says_does_harm(search: str, few: int, many: int) -> None:
    """No operator and no damaged or hostile snapshot gives a traceback, a signal, a hang, or takes more than a file of its size may."""
    searched(*search.split(), "--cases", str(few), seconds=600)


@pytest.mark.nightly
@pytest.mark.parametrize(("search", "few", "many"), SEARCHES, ids=[search for search, _, _ in SEARCHES])
def test_nothing_does_harm_in_a_long_search(search: str, few: int, many: int) -> None:
    """The same, on as many as there is time for at night, and on others than for every change."""
    searched(*search.split(), "--first", "1000000", "--cases", str(many), "--jobs", str(os.cpu_count() or 1), seconds=6 * 3600)


def test_a_step_is_saved_as_it_was_whatever_its_memory_is_called() -> None:
    """Random loops that write to tensors, exchange them and keep them: each saved step makes its loss again, and each run is the bare one."""
    searched("aliases.py", "--cases", "40", seconds=600)


@pytest.mark.nightly
def test_a_step_is_saved_as_it_was_in_a_long_search() -> None:
    """The same, on as many as there is time for."""
    searched("aliases.py", "--first", "1000000", "--cases", "20000", "--jobs", str(os.cpu_count() or 1), seconds=6 * 3600)


@pytest.mark.nightly
def test_no_ranks_hang_or_part() -> None:
    """Two and four ranks × parallelism × fault × mode: every run ends, is the bare one, and is skipped by all ranks or by none."""
    searched("ranks.py", "--runs", "400", seconds=3 * 3600)


def test_the_search_sees_what_it_looks_for() -> None:
    """A signal, a hang, a greedy case and a traceback are findings, and the cases behind them are run."""
    code = f"""
import os, sys, time
sys.path.insert(0, {str(FOLDER)!r})
from children import Limits, Tally, hunt

def run(case):
    if case == 1: os.abort()
    if case == 2: time.sleep(60)
    if case == 3: return str(len(b"x" * (200 << 20)))
    if case == 4: raise KeyError("nothing")
    return "fine"

tally = Tally()
found = {{finding.case: finding.what for finding in hunt(run, range(8), Limits(2, 64 << 20), tally)}}
assert sorted(found) == [1, 2, 3, 4], found
assert "SIGABRT" in found[1] and "still running" in found[2] and "took 2" in found[3] and "KeyError: 'nothing'" in found[4], found
assert tally.cases == 8 and tally.said["fine"] == 4, tally
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
