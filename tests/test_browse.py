"""The page of a run in the browser: drawn when it is missing or old, opened where somebody sees it, and else told how to fetch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from verdicts import ppo_step

from nanscope.report.browse import far, how_to_fetch, is_stale
from nanscope.snapshot.file import save

OVER_SSH, NO_DISPLAY = "you are here over ssh", "this machine has no display"

PLACES = {
    "a desk": ({"DISPLAY": ":0"}, "linux", ""),
    "wayland": ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", ""),
    "a Mac": ({}, "darwin", ""),
    "a server": ({}, "linux", NO_DISPLAY),
    "ssh": ({"SSH_CONNECTION": "1 2 3 4", "DISPLAY": ":10"}, "linux", OVER_SSH),
    "ssh to a Mac": ({"SSH_TTY": "/dev/ttys1"}, "darwin", OVER_SSH),
    "an editor over ssh": ({"SSH_CONNECTION": "1 2 3 4", "BROWSER": "/bin/helper"}, "linux", ""),
}


@pytest.mark.parametrize("place", PLACES)
def test_where_a_browser_is_before_the_person(place: str) -> None:
    """Not over ssh, not without a display; but wherever an editor has set one."""
    environment, platform, why = PLACES[place]
    assert far(environment, platform) == why


def test_how_to_fetch_it_survives_two_shells(tmp_path: Path) -> None:
    """The shell here, and the one over there."""
    assert how_to_fetch(Path("/runs/a/report.html")).endswith(":/runs/a/report.html .")
    odd = how_to_fetch(Path("/runs/a b/report.html"))
    assert subprocess.run(["sh", "-c", f"printf %s {odd.split(':', 1)[1].removesuffix(' .')}"], capture_output=True, text=True).stdout == (
        "'/runs/a b/report.html'"
    )


def browse(*words: str, cwd: Path, browser: str) -> subprocess.CompletedProcess[str]:
    """`nanscope open` with a browser of ours, which writes down what it was given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SSH_", "DISPLAY", "WAYLAND", "BROWSER"))}
    command = [sys.executable, "-m", "nanscope", "open", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, env=environment | {"BROWSER": browser})


def test_the_page_is_drawn_once_and_again_when_the_run_went_on(tmp_path: Path) -> None:
    """Its path is printed, the browser gets its address, and a second time nothing is drawn."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/seen\n')
    browser.chmod(0o755)
    run = tmp_path / "runs" / "2026-11-21T20-15-03-train"
    saved = save(ppo_step({}), run)
    assert is_stale(run)
    done = browse("runs", cwd=tmp_path, browser=f"{browser} %s")
    page = run / "report.html"
    assert (done.returncode, done.stdout) == (0, "runs/2026-11-21T20-15-03-train/report.html\n"), done.stderr
    assert (tmp_path / "seen").read_text() == f"{page.as_uri()}\n" and not is_stale(run)
    drawn = page.stat().st_mtime_ns
    assert browse(str(page), cwd=tmp_path, browser=f"{browser} %s").returncode == 0
    assert browse("runs", cwd=tmp_path, browser=f"{browser} %s").returncode == 0 and page.stat().st_mtime_ns == drawn
    shutil.copy(saved, run / "step-000009.rank0.safetensors")
    assert is_stale(run)


def test_without_a_browser_the_way_to_fetch_it_is_told(tmp_path: Path) -> None:
    """One line, and status 0: the page is there."""
    run = tmp_path / "runs" / "2026-11-21T20-15-03-train"
    save(ppo_step({}), run)
    environment = {name: value for name, value in os.environ.items() if name != "BROWSER"} | {"SSH_CONNECTION": "1 2 3 4"}
    command = [sys.executable, "-m", "nanscope", "open", "runs"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, env=environment)
    assert done.returncode == 0 and "you are here over ssh: on your own machine, scp " in done.stderr
    gone = subprocess.run([*command[:-1], "run"], capture_output=True, text=True, cwd=tmp_path, timeout=120, env=environment)
    assert (gone.returncode, gone.stderr) == (1, "nanscope: there is no file or run 'run'; did you mean runs?\n")
