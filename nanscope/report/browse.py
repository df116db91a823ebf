"""The page of a run, in a browser where there is one: is it there, is it newer than the run, and how does it get to one's own machine?"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path

from nanscope.snapshot.runs import wrote

PAGE = "report.html"


def is_stale(run_dir: Path) -> bool:
    """Is there no page in a run directory, or has the run written anything since it was drawn?"""
    page = run_dir / PAGE
    if not page.is_file():
        return True
    return any(path.stat().st_mtime_ns > page.stat().st_mtime_ns for path in run_dir.iterdir() if wrote(path.name))


def far(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> str:
    """Return why no browser of this machine is before the person who asks, "" if one is."""
    if environment.get("BROWSER"):  # which an editor that works over ssh sets, too
        return ""
    if any(environment.get(name) for name in ("SSH_CONNECTION", "SSH_TTY")):
        return "you are here over ssh"
    if platform.startswith("linux") and not any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        return "this machine has no display"
    return ""


def how_to_fetch(page: Path) -> str:
    """Return the command that a person can give on the own machine."""
    return f"scp {socket.gethostname()}:{shlex.quote(shlex.quote(str(page.absolute()))) if _is_odd(page) else page.absolute()} ."


def _is_odd(page: Path) -> bool:
    """Does a shell read the path as something else, here and once more over there?"""
    return shlex.quote(str(page.absolute())) != str(page.absolute())


def opened(page: Path) -> bool:
    """Open a page in a browser; False if there is none that does."""
    try:
        return webbrowser.open(page.absolute().as_uri())
    except webbrowser.Error:
        return False
