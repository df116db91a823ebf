"""One step as it is saved: the program of its loss, the tensors that go in, and what was seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nanscope.program.program import Program
from nanscope.snapshot.history import Entry
from nanscope.snapshot.observation import UNSEEN, Observation


@dataclass(frozen=True, slots=True)
class Reached:
    """How far the harm got.

    loss: the value that was differentiated. bad_gradients of gradients, bad_weights of weights: tensors; None where not looked at.
    stepped: "taken", "skipped" (by nanscope), "stopped" (by nanscope), "none" (no optimizer step followed).
    scaled: the loss had been multiplied by a GradScaler.
    """

    loss: float | None = None
    gradients: int | None = None
    bad_gradients: int | None = None
    weights: int | None = None
    bad_weights: int | None = None
    stepped: str = "none"
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One step: the program of its loss, the tensors that go in, and what was seen.

    tensors: leaf id → tensor. loss: as recorded, shape []. grads: leaf id → recorded gradient, where it was small enough to keep.
    observation: what was seen in the process and cannot be recomputed from the file. objective: the framework's loss as `framework_loss`
    knows it: key, settings that were found live, site; {} if the loss is nobody's that is known.
    part: which backward pass of the step, from 1. asked: saved on request; nothing was wrong. run: id of the run.
    consequence_of: the earlier step that had spoilt the weights, None for a step with a cause of its own.
    found: where the process located it, for the line on the log; in no file, since a reader finds it again.
    """

    step: int
    rank: int
    program: Program
    tensors: dict[int, Tensor]
    loss: Tensor | None
    grads: dict[int, Tensor]
    reached: Reached
    observation: Observation = UNSEEN
    settings: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    history: tuple[Entry, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    opaque: tuple[str, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    part: int = 1
    asked: bool = False
    run: str = ""
    consequence_of: int | None = None
    found: Observation = UNSEEN

    @property
    def file_name(self) -> str:
        """The name that the file of this step has: `step-…`, or `batch-…` if it was asked for."""
        part = f".part{self.part}" if self.part > 1 else ""
        return f"{'batch' if self.asked else 'step'}-{self.step:06d}.rank{self.rank}{part}.safetensors"
