"""Optimizers that step inside a backward pass, each as soon as its gradients are there: together, and once, they are a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nanscope.program.numbers import is_finite, norms

REFUSED = "the step was not skipped but taken as it was: its optimizers step inside the backward pass, before all gradients are there"


class Inside:
    """Those of one backward pass. optimizers: in order. What is seen of their gradients stays on the device until the pass has ended."""

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._norms: list[Tensor] = []
        self._fine: list[Tensor] = []

    def add(self, optimizer: torch.optim.Optimizer, grads: Sequence[Tensor]) -> None:
        """One is about to step. grads: that it steps on."""
        self.optimizers.append(optimizer)
        if grads:
            self._norms.append(norms(grads))
            self._fine += [is_finite(grad) for grad in grads]

    def seen(self) -> tuple[float, int, int]:
        """Return the norm of all gradients, how many there were, and how many of them were not finite."""
        if not self._fine:
            return 0.0, 0, 0
        device = self._norms[0].device
        squares = torch.cat([norm.to(device) for norm in self._norms]).double().square().sum()
        fine = torch.stack([flag.to(device) for flag in self._fine]).sum()
        square, good = torch.stack([squares, fine.double()]).tolist()  # in one transfer
        return math.sqrt(square) if square >= 0 else square, len(self._fine), len(self._fine) - int(good)
