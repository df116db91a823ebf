"""Whatever tracker is running: W&B, MLflow and trackio are found when the run has something to tell.

with nanscope.watch(trainer, trackers=[nanscope.integrations.Live()]): ...

Notable: a trainer begins its trackers when it begins to train, which is later than `nanscope.watch`. Nothing is imported here that was not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from nanscope.watching.trackers import Tracker

TRACKERS = (("wandb", "WandB"), ("mlflow", "MLflow"), ("trackio", "Trackio"))  # package, ours


class Live:
    """All trackers of this process that have a run, and none where there is none."""

    def __init__(self) -> None:
        self._found: dict[str, Tracker] = {}

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Tell each of them a step."""
        for tracker in self._running():
            tracker.log(step, scalars)

    def alert(self, title: str, text: str) -> None:
        """Tell each of them what was found."""
        for tracker in self._running():
            tracker.alert(title, text)

    def artifact(self, path: Path) -> None:
        """Give each of them the page."""
        for tracker in self._running():
            tracker.artifact(path)

    def _running(self) -> list[Tracker]:
        for package, name in TRACKERS:
            if package in sys.modules and name not in self._found:
                ours = import_module(f"nanscope.integrations.{package}")
                if ours.running() is not None:
                    self._found[name] = getattr(ours, name)()
        return list(self._found.values())
