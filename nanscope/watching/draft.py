"""The page of a bad step, made while training goes on, in a process of its own: to diagnose a step is to run it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from nanscope.errors import words_of

log = logging.getLogger("nanscope")

PATIENCE = 300.0  # seconds for a page

SCRIPT = """
from nanscope.watching.marked import mark
held = mark()  # of ours: a run that looks for processes which nobody watches need not mind it
import sys
from pathlib import Path
from nanscope.report.render import render
from nanscope.snapshot.anywhere import load
from nanscope.verdict.diagnose import verdict
render(verdict([load(sys.argv[1])], [sys.argv[1]]), Path(sys.argv[2]))
"""


class Draft:
    """The page of a saved step, beside it, while a process makes it."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path, self._process, self._began = path, process, time.monotonic()

    @staticmethod
    def begin(file: Path) -> Draft | None:
        """Begin to make the page of a step; None if that cannot be."""
        path = file.with_suffix(".html")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NANSCOPE_")}  # it takes part in no run
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-c", SCRIPT, str(file), str(path)]
        nothing = subprocess.DEVNULL
        try:
            return Draft(path, subprocess.Popen(command, env=environment, stdin=nothing, stdout=nothing, stderr=nothing))
        except OSError as error:
            log.info("nanscope: no page of %s: %s", file, words_of(error))
            return None

    @property
    def is_over(self) -> bool:
        """Has it come to an end, or taken too long for it?"""
        if self._process.poll() is None and time.monotonic() - self._began > PATIENCE:
            self._process.kill()
            self._process.wait()
        return self._process.returncode is not None

    @property
    def is_there(self) -> bool:
        """Was it written?"""
        return self._process.returncode == 0 and self.path.exists()
