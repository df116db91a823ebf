"""Processes of a run that loaded torch and take no part are named; what loads no torch is never spoken of."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_member import told

from nanscope.watching.invitation import CHILDREN
from nanscope.watching.marked import mark
from nanscope.watching.strays import NOT_TOLD, REPLACED, SWITCHED_OFF, Strays, called, mark_is_seen, why_unwatched

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="strays are seen in /proc")

HEALTHY = """
import os, subprocess, sys
from one import train
train()
for _ in range(3):
    subprocess.run(["git", "--version"], check=True, env={"PATH": os.environ["PATH"]})
    subprocess.run([sys.executable, "-I", "-c", "import time; time.sleep(0.7)"], check=True)
watched = subprocess.Popen([sys.executable, "one.py"])
if os.fork() == 0:
    train()
    os._exit(0)
"""

STRAYS = """
train = "import sys; sys.path.insert(0, '.'); from one import train; train()"
children = [
    subprocess.Popen(["sh", "-c", f'{sys.executable} -I -c "$0" secret; true', train]),
    subprocess.Popen([sys.executable, "one.py"], env={"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}),
]
for child in children:
    child.wait()
"""


def test_a_child_that_trains_unwatched_beside_a_healthy_parent_is_named(tmp_path: Path) -> None:
    """By how it was started, and why it is not watched; without what may be a secret."""
    (tmp_path / "strays.py").write_text(HEALTHY + STRAYS + "watched.wait(); os.wait()")
    found = told(tmp_path, "strays.py")
    assert (found.status, found.verdict["status"]) == (4, "partly watched"), found.err
    name = Path(sys.executable).name
    assert {gap["text"] for gap in found.verdict["gaps"] if gap["slug"] == "child-processes"} == {
        f"what `{name} -I -c …` did, which has loaded torch: -I makes it ignore its environment",
        f"what `{name} one.py` did, which has loaded torch: {NOT_TOLD}",
    }


def test_what_loads_no_torch_or_is_watched_is_no_gap(tmp_path: Path) -> None:
    """git, a Python that ignores its environment and does not train, a child, and a fork."""
    (tmp_path / "fine.py").write_text(HEALTHY.replace("os._exit(0)", "sys.exit(0)") + "watched.wait(); os.wait()")
    found = told(tmp_path, "fine.py")
    assert (found.status, found.verdict["gaps"]) == (0, []), found.err


INVITED = ["NANSCOPE_MEMBER={}", f"PYTHONPATH=/mine{os.pathsep}{CHILDREN}"]
STARTED = {  # command and environment -> why it is not watched, and what it is called
    ("python train.py --key secret", *INVITED): ("", "python train.py"),
    ("/bin/python3.11 -I /a/train.py", *INVITED): ("-I makes it ignore its environment", "python3.11 -I train.py"),
    ("python -sE -m package.train x", *INVITED): ("-sE makes it ignore its environment", "python -sE -m package.train"),
    ("python -X importtime -W ignore::EImport -c secret -I", *INVITED): ("", "python -X importtime -W ignore::EImport -c …"),
    ("python -Ic secret", *INVITED): ("-Ic makes it ignore its environment", "python -Ic …"),
    ("python - -I", *INVITED): ("", "python -"),
    ("python train.py", "PATH=/bin"): (NOT_TOLD, "python train.py"),
    ("python train.py", INVITED[0], "PYTHONPATH=/mine"): (REPLACED, "python train.py"),
    ("python train.py", *INVITED, "TORCH_DEVICE_BACKEND_AUTOLOAD=0"): (SWITCHED_OFF, "python train.py"),
}


@pytest.mark.parametrize("started", STARTED, ids=lambda started: " ".join(started)[:60])
def test_why_a_process_is_not_watched_is_told_from_how_it_was_started(started: tuple[str, ...]) -> None:
    """Its own options and its environment; what comes after the script is none of ours."""
    command, environment = started[0].split(), list(started[1:])
    assert (why_unwatched(command, environment), called(command)) == STARTED[started]


@pytest.fixture
def waits() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has loaded torch, without the environment of a run, and marks itself when it is told to."""
    code = "import torch, sys; from nanscope.watching.marked import mark; print(flush=True); input(); held = mark(); print(flush=True); input()"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_mark_is_seen_from_outside(waits: subprocess.Popen[bytes]) -> None:
    """Whatever its environment says, a process that watches itself is no stray; each kind is said once."""
    assert mark_is_seen() is False
    held = mark()
    assert held is not None and mark_is_seen()
    said: list[str] = []
    assert waits.stdout is not None and waits.stdin is not None
    waits.stdout.readline()
    strays = Strays(said.append)
    strays.look()
    strays.look()
    assert len(said) == 1 and NOT_TOLD in said[0]
    waits.stdin.write(b"\n")
    waits.stdin.flush()
    waits.stdout.readline()
    said.clear()
    Strays(said.append).look()
    assert said == []
