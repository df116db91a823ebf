"""MLflow: the numbers of each step as metrics of the active run, what was found as a tag, the page of a bad step as an artifact.

with nanscope.watch(trainer, trackers=[nanscope.integrations.MLflow()]): ...

Notable: what is called active is so in one thread only, and we write from another: the run is named by its id.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric
from mlflow.tracking import fluent

from nanscope.errors import NanscopeError

FOLDER = "nanscope"  # of the run's artifacts


def running() -> str | None:
    """Return the id of the run that is active in this thread, or the latest that is in any; None if none is."""
    of_all = getattr(fluent, "_get_latest_active_run", mlflow.active_run)
    found = mlflow.active_run() or of_all()
    return None if found is None else str(found.info.run_id)


class MLflow:
    """A tracker of `nanscope.watch`. run_id: of a run; without it the one that is active when something is told."""

    def __init__(self, run_id: str | None = None) -> None:
        self._client: Any = mlflow.MlflowClient()
        self._run_id = run_id or running()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log a step, in one write."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._run(), metrics=[Metric(_name(name), value, now, step) for name, value in scalars.items()])

    def alert(self, title: str, text: str) -> None:
        """Tag the run with what was found."""
        self._client.set_tag(self._run(), _name(title).replace(":", "."), text)

    def artifact(self, path: Path) -> None:
        """Keep the page with the run."""
        self._client.log_artifact(self._run(), str(path), FOLDER)

    def _run(self) -> str:
        self._run_id = self._run_id or running()
        if self._run_id is None:
            raise NanscopeError("MLflow has no active run in this process: call mlflow.start_run() first", slug="no-tracker-run")
        return self._run_id


def _name(text: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", text)  # the characters that MLflow takes
