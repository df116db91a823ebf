"""Weights & Biases: the numbers of each step in the run that is live, an alert and the page of a bad step.

with nanscope.watch(trainer, trackers=[nanscope.integrations.WandB()]): ...

Notable: W&B counts a step at each `run.log`, and drops what comes for one that is over. A trainer that gives its own steps would lose rows
if we made rows of ours: so ours go into the row that it writes next, and what happened between two of its rows comes as its extremes and
means. `rows=True` is for a loop that logs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from nanscope.errors import NanscopeError
from nanscope.snapshot.scalars import PREFIX, folded

STEP = f"{PREFIX}step"


def running() -> Any:
    """Return the run of this process, None if there is none."""
    return wandb.run


class WandB:
    """A tracker of `nanscope.watch`. run: of W&B; without it the one that is live when something is told.

    rows: each step is a row of its own.
    """

    def __init__(self, run: Any = None, *, rows: bool = False) -> None:
        self._run, self._rows = run, rows
        self._told: Any = None  # the run whose chart has been told what its x-axis is
        self._row, self._waiting = -1, list[Mapping[str, float]]()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Put a step into the chart."""
        run = self._live()
        if run is not self._told:
            run.define_metric(STEP, hidden=True)
            run.define_metric(f"{PREFIX}*", step_metric=STEP)
            self._told = run
        if self._row != run.step or self._rows:
            self._row = run.step
            self._waiting.clear()
        self._waiting.append(scalars)
        run.log({STEP: step, **folded(self._waiting)}, commit=self._rows)

    def alert(self, title: str, text: str) -> None:
        """Alert whoever has asked W&B for it."""
        self._live().alert(title=title, text=text, level=wandb.AlertLevel.ERROR)

    def artifact(self, path: Path) -> None:
        """Keep the page with the run."""
        kept = wandb.Artifact(f"nanscope-{path.stem}", type="nanscope")
        kept.add_file(str(path))
        self._live().log_artifact(kept)

    def _live(self) -> Any:
        run = self._run or running()
        if run is None:
            raise NanscopeError("W&B has no run in this process: call wandb.init(…) first", slug="no-tracker-run")
        return run
