"""One step as it is saved: the program of its loss, the tensors that go in, and what was seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor

from nanscope.errors import one_line
from nanscope.program.program import Program
from nanscope.shown import Shown
from nanscope.snapshot.history import Entry
from nanscope.snapshot.observation import UNSEEN, Came, Observation
from nanscope.snapshot.processes import called, writes_as
from nanscope.text import count, line_in, number


class Stepped(StrEnum):
    """What became of a step."""

    TAKEN = "taken"
    SKIPPED = "skipped"  # by nanscope
    STOPPED = "stopped"  # by nanscope
    REPAIRED = "repaired"  # taken, on gradients of which nanscope has mended some
    REPLACED = "replaced"  # taken, on gradients of which the loop has replaced those that were not finite
    BY_TRAINER = "skipped by the trainer"
    BY_SCALER = "skipped by the scaler"
    BY_HAND = "taken by hand"  # the loop writes to the weights itself
    NONE = "none"  # nobody was seen to take it


@dataclass(frozen=True, slots=True)
class Reached:
    """How far the harm got.

    loss: the value that was differentiated. bad_gradients of gradients, bad_weights of weights: tensors; None where not looked at.
    stepped: one of `Stepped`. scaled: the loss had been multiplied by a GradScaler. optimizer: which one of several took the step.
    micro_batches: how many the step had, None while it runs.
    """

    loss: float | None = None
    gradients: int | None = None
    bad_gradients: int | None = None
    weights: int | None = None
    bad_weights: int | None = None
    stepped: str = "none"
    scaled: bool = False
    optimizer: str | None = None
    micro_batches: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Snapshot(Shown):
    """One step: the program of its loss, the tensors that go in, and what was seen.

    tensors: leaf id → tensor. loss: as recorded, shape []. grads: leaf id → recorded gradient, where it was small enough to keep.
    observation: what was seen in the process and cannot be recomputed from the file. objective: the framework's loss as `framework_loss`
    knows it: key, settings that were found live, site; {} if the loss is nobody's that is known.
    step: the number that the loop gives it, else counted from 1. update: which one of the steps of this number, from 1. part: which
    backward pass of the step (micro-batch), from 1. backward: which one of the run, 0 if not known. asked: saved on request; nothing was
    wrong. run: id of the run. consequence_of: the earlier step that had spoilt the weights, None for a step with a cause of its own.
    worker: what its process is called where that is not a rank alone. texts: token id → what it stands for, only where that was asked for.
    found: where the process located it, for the line on the log; of that a file keeps `came` and `site`, since a reader finds it again.
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
    update: int = 1
    backward: int = 0
    worker: str = ""
    texts: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return one_line(self.sentence)

    @property
    def sentence(self) -> str:
        """Which step it is, how far the harm got, and what is held of it, in one line."""
        bad, total, loss = self.reached.bad_gradients, self.reached.gradients, self.reached.loss
        words = [
            f"{self.place}, {called(self.rank, self.worker)}",
            "" if loss is None else f"loss {number(loss)}",
            "" if bad is None or total is None else f"{bad} of {count(total, 'gradient')} bad",
            f"{count(len(self.program.calls), 'call')} from {count(len(self.tensors), 'tensor')}",
        ]
        return ": ".join(filter(None, (words[0], ", ".join(filter(None, words[1:])))))

    @property
    def file_name(self) -> str:
        """The name that the file of this step has: `step-…`, or `batch-…` if it was asked for."""
        update = f".update{self.update}" if self.update > 1 else ""
        part = f".part{self.part}" if self.part > 1 else ""
        return f"{'batch' if self.asked else 'step'}-{self.step:06d}.{writes_as(self.rank, self.worker)}{update}{part}.safetensors"

    @property
    def came(self) -> Came:
        """How it came to this rank."""
        through_weights = self.consequence_of is not None and self.carried_on is None
        return Came.WEIGHTS if through_weights else self._told.came

    @property
    def carried_on(self) -> str | None:
        """What has kept, since an earlier step, the element at which this one went wrong, in words; None where that is new."""
        return next((text for slug, text in self.notes if slug == "carried_on"), None)

    @property
    def site(self) -> str:
        """Where it was made, in short, and alike on ranks that met the same; "" if that is not known, or was on another rank."""
        seen = self._told
        if seen.phase is None or self.came.arrived:
            return ""
        where = line_in(seen.origin.file, seen.origin.line) if seen.origin.file else seen.origin.variable or ""
        return f"{where} {seen.origin.op}".strip()

    @property
    def _told(self) -> Observation:
        return self.observation if self.observation.outside or self.found.phase is None else self.found

    @property
    def place(self) -> str:
        """Which step this is, in words: no two snapshots of a rank have the same."""
        return place(self.step, self.update, self.part, self.reached.micro_batches)


def place(step: int, update: int = 1, part: int = 1, parts: int | None = None) -> str:
    """Return which backward pass of which step, in words: `step 412, update 2, micro-batch 3 of 4`."""
    several = part > 1 or (parts or 1) > 1
    words = [f"step {step}", f"update {update}" if update > 1 else "", f"micro-batch {part}" if several else ""]
    return ", ".join(word for word in words if word) + (f" of {parts}" if several and parts else "")
