"""The loss of a part once more: in float64, or with noise on the advantages; its value, and the gradient that it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nanscope.locate.trace import Trace
from nanscope.objective.evaluate import objective
from nanscope.objective.settings import LossInputs, LossSettings, on_leaf
from nanscope.program.by_rows import execute_ends
from nanscope.replay.noise import noise_for, noisy


class Repeatable(Protocol):
    """A loss that can be run again."""

    def repeat(self, dtype: torch.dtype | None = None, variance: float = 0.0) -> tuple[float, Tensor]:
        """Return the loss and its gradient, [N], in float64.

        dtype: compute in this one instead. variance: of the noise that is added to the advantages, one number a row.
        """
        ...


@dataclass(frozen=True, slots=True)
class RecordedLoss:
    """The trainer's own, as a program. pushed_by: the values of the advantages."""

    trace: Trace
    pushed_by: tuple[int, ...]

    def repeat(self, dtype: torch.dtype | None = None, variance: float = 0.0) -> tuple[float, Tensor]:
        """As `Repeatable`: the gradient is that of the leaves."""
        program, tensors = self.trace.program, self.trace.tensors
        if variance:
            variant = noisy(self.trace, self.pushed_by, variance, "noise on the advantages")
            program, tensors = variant.program, variant.tensors
        run = execute_ends(program, tensors, dtype)
        grads = [run.grads[leaf.id].double().flatten() for leaf in program.leaves if leaf.diff and leaf.id in run.grads]
        return float(run.values[program.output].double().sum()), torch.cat(grads)


@dataclass(frozen=True, slots=True)
class RuledLoss:
    """An objective on a batch."""

    inputs: LossInputs
    how: LossSettings

    def repeat(self, dtype: torch.dtype | None = None, variance: float = 0.0) -> tuple[float, Tensor]:
        """As `Repeatable`: the gradient is that of the log-probs."""
        inputs = on_leaf(self.inputs, dtype)
        if variance:
            pushed = inputs.advantages
            inputs = replace(inputs, advantages=pushed + noise_for(pushed, variance).to(pushed))
        with torch.enable_grad():
            loss = objective(inputs, self.how).loss
        (grad,) = torch.autograd.grad(loss, inputs.log_probs)
        return float(loss.detach()), grad.double().flatten()
