"""nanscope finds the first harmful NaN or Inf of an RL post-training run, saves the step, replays it, and proves the fix.

with nanscope.watch(trainer) as scope:
    trainer.train()
print(scope.verdict.sentence)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanscope.errors import NanscopeError, NonFiniteError, ProgramError, SnapshotError

if TYPE_CHECKING:
    from nanscope.alternatives import replay_under
    from nanscope.diagnose import Verdict
    from nanscope.frameworks.losses import framework_loss
    from nanscope.inputs import loss_inputs
    from nanscope.objective import LossInputs, LossSettings
    from nanscope.replay import Replay
    from nanscope.scope import Scope, watch
    from nanscope.snapshot import Snapshot, load

__version__ = "0.1.0"

__all__ = [
    "LossInputs", "LossSettings", "NanscopeError", "NonFiniteError", "ProgramError", "Replay", "Scope", "Snapshot", "SnapshotError",
    "Verdict", "framework_loss", "load", "loss_inputs", "replay_under", "watch",
]  # fmt: skip

# Looked up when used: the command line and `inspect` do not need torch.
_WHERE = {
    "Scope": "nanscope.scope",
    "watch": "nanscope.scope",
    "Verdict": "nanscope.diagnose",
    "Snapshot": "nanscope.snapshot",
    "load": "nanscope.snapshot",
    "Replay": "nanscope.replay",
    "LossInputs": "nanscope.objective",
    "LossSettings": "nanscope.objective",
    "framework_loss": "nanscope.frameworks.losses",
    "loss_inputs": "nanscope.inputs",
    "replay_under": "nanscope.alternatives",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'nanscope' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
