"""trackio: the numbers of each step in the run that is live, and an alert at a bad step that says where its page is.

with nanscope.watch(trainer, trackers=[nanscope.integrations.Trackio()]): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio
from trackio import context_vars

from nanscope.errors import NanscopeError


def running() -> Any:
    """Return the run of this context, None if there is none."""
    return context_vars.current_run.get()


class Trackio:
    """A tracker of `nanscope.watch`. run: of trackio; without it the one that was live when the first step was told."""

    def __init__(self, run: Any = None) -> None:
        self._run, self._step = run or running(), 0

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log a step."""
        self._step = step
        self._live().log(dict(scalars), step=step)

    def alert(self, title: str, text: str) -> None:
        """Alert."""
        self._live().alert(title, text, level=trackio.AlertLevel.ERROR, step=self._step)

    def artifact(self, path: Path) -> None:
        """Keep the page with the run."""
        self._live().log_artifact(path, name=f"nanscope-{path.stem}", type="nanscope")

    def _live(self) -> Any:
        self._run = self._run or running()
        if self._run is None:
            raise NanscopeError("trackio has no run in this process: call trackio.init(…) first", slug="no-tracker-run")
        return self._run
