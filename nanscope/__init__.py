"""nanscope finds the first harmful NaN or Inf of an RL post-training run, saves the step, replays it, and proves the fix.

with nanscope.watch(trainer) as scope:
    trainer.train()
print(scope.verdict.sentence)
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanscope.errors import NanscopeError, ProgramError, SnapshotError
from nanscope.version import __version__

if TYPE_CHECKING:
    from nanscope import integrations
    from nanscope.foresight.hazard import Check
    from nanscope.frameworks.losses import framework_loss
    from nanscope.integrations.ray import ray
    from nanscope.objective import advantages
    from nanscope.objective.settings import LossInputs, LossSettings
    from nanscope.program.glance import show
    from nanscope.program.summary import summarise
    from nanscope.replay.anywhere import replay
    from nanscope.replay.batch import loss_inputs
    from nanscope.replay.tries import Replay
    from nanscope.replay.under import replay_under
    from nanscope.reproduce.reproducer import Reproducer, reproducer
    from nanscope.snapshot.anywhere import history, load
    from nanscope.snapshot.step import Snapshot
    from nanscope.verdict.anywhere import diagnose
    from nanscope.verdict.forecast import Forecast
    from nanscope.verdict.incident import Incident, NonFiniteError, Verdict
    from nanscope.watching.checking import check
    from nanscope.watching.scope import Scope, watch

__all__ = [
    "Check", "Forecast", "Incident", "LossInputs", "LossSettings", "NanscopeError", "NonFiniteError", "ProgramError", "Replay",
    "Reproducer", "Scope", "Snapshot", "SnapshotError", "Verdict", "__version__", "advantages", "check", "diagnose", "framework_loss",
    "history", "integrations", "load", "loss_inputs", "ray", "replay", "replay_under", "reproducer", "show", "summarise", "watch",
]  # fmt: skip

# Looked up when used: the command line and `inspect` do not need torch.
_WHERE = {
    "Scope": "nanscope.watching.scope",
    "watch": "nanscope.watching.scope",
    "Verdict": "nanscope.verdict.incident",
    "Incident": "nanscope.verdict.incident",
    "Forecast": "nanscope.verdict.forecast",
    "NonFiniteError": "nanscope.verdict.incident",
    "Snapshot": "nanscope.snapshot.step",
    "load": "nanscope.snapshot.anywhere",
    "history": "nanscope.snapshot.anywhere",
    "Replay": "nanscope.replay.tries",
    "Check": "nanscope.foresight.hazard",
    "check": "nanscope.watching.checking",
    "diagnose": "nanscope.verdict.anywhere",
    "advantages": "nanscope.objective",
    "LossInputs": "nanscope.objective.settings",
    "LossSettings": "nanscope.objective.settings",
    "framework_loss": "nanscope.frameworks.losses",
    "loss_inputs": "nanscope.replay.batch",
    "ray": "nanscope.integrations.ray",
    "replay_under": "nanscope.replay.under",
    "Reproducer": "nanscope.reproduce.reproducer",
    "reproducer": "nanscope.reproduce.reproducer",
    "show": "nanscope.program.glance",
    "summarise": "nanscope.program.summary",
}

# What `shown` asks for: a result is made on a floor that knows of no renderer, and this is the one place from which all floors are seen.
_DRAWS = {"cell": "nanscope.report.results", "write": "nanscope.report.results"}


def __getattr__(name: str) -> Any:
    if name in ("replay", "integrations"):  # rooms: the first can be called, the second holds the doors
        return import_module(f"nanscope.{name}")
    where = _WHERE.get(name) or _DRAWS.get(name)
    if where is None:
        raise AttributeError(f"module 'nanscope' has no attribute {name!r}")
    return getattr(import_module(where), name)


if "NANSCOPE_MEMBER" in os.environ:  # a process of a watched run begins to watch at the end of `import torch`: not amid an import of ours
    with suppress(ImportError):
        import_module("torch")
