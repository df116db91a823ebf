"""Records a small loss as `watch` would, and runs it: what most tests of the replay wing begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.locate.location import locate
from nanscope.locate.origin import Location
from nanscope.locate.trace import Trace
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.replay.tries import Replay, replay
from nanscope.snapshot.history import Entry
from nanscope.snapshot.step import Reached, Snapshot


@dataclass(frozen=True)
class Recorded:
    """A loss that was computed under the tape. grads: of the leaves, by id, as autograd gave them live."""

    program: Program
    tensors: dict[int, Tensor]
    loss: Tensor

    @cached_property
    def trace(self) -> Trace:
        return Trace.of(self.program, self.tensors)

    @property
    def run(self) -> Run:
        return self.trace.run

    @property
    def location(self) -> Location | None:
        return locate(self.trace)

    def snapshot(self, **changes: object) -> Snapshot:
        fields: dict[str, object] = {
            "step": 7,
            "rank": 0,
            "program": self.program,
            "tensors": self.tensors,
            "loss": self.loss,
            "grads": {},
            "reached": Reached(loss=float(self.loss), gradients=1, bad_gradients=1, stepped="taken"),
            "history": (Entry(step=6, rank=0, time=0.0, loss=0.5),),
        }
        return Snapshot(**{**fields, **changes})  # type: ignore[arg-type]

    def replay(self) -> Replay:
        return replay(self.snapshot())


def record(function: Callable[..., Tensor], *args: Tensor) -> Recorded:
    """Call `function(*args)` under a tape and return what was recorded of its result."""
    tape = Tape()
    with TapeMode(tape):
        loss = function(*args)
    assert not tape.broken, tape.broken
    program, tensors = tape.program(tape.value_of(loss))
    return Recorded(program, tensors, loss.detach().clone())


def leaf(*shape: int, low: float = -3.0, high: float = -0.1) -> Tensor:
    """A tensor of log-probabilities that wants a gradient."""
    return torch.empty(*shape).uniform_(low, high).requires_grad_()
