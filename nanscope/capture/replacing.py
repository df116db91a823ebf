"""Gradients that the trainer's code looks at element by element, or replaces where they are not finite, before an optimizer sees them.

    for parameter in model.parameters():
        parameter.grad.nan_to_num_()

What the optimizer steps on is finite then, and so are its weights: nothing else tells that the step has learnt from what was left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nanscope.capture.modules import version_of
from nanscope.capture.unseen import is_captured
from nanscope.program.local import local
from nanscope.program.numbers import is_finite

KEPT = 1 << 16  # gradients that are remembered

Where = tuple[int, int]  # of a tensor: address and size; of one that came to a weight that one's identity, below 0


class Replacing:
    """What was asked so since the step began. gradients: returns those of the models that are trained."""

    def __init__(self, gradients: Callable[[], Iterable[Tensor]]) -> None:
        self._gradients = gradients
        self._finite: dict[Where, Tensor] = {}  # whether a gradient was, each time that somebody asked; still on its device
        self._asked: dict[Where, int] = {}  # how often it had been written to then, since the last backward pass
        self._places: set[int] | None = None  # where gradients lie since then; None until somebody asks

    def asked(self, tensor: Tensor) -> None:
        """Somebody asks of each element of a tensor, and has not written to it yet. Waits for no device."""
        part = None if tensor.requires_grad or is_captured() else local(tensor)
        if part is None or part.is_meta or not part.is_floating_point() or len(self._asked) >= KEPT:
            return
        where, writes = (part.data_ptr(), part.numel()), version_of(part)
        if self._asked.get(where) == writes:
            return
        self._asked[where] = writes
        finite = is_finite(part)
        if not (finite.is_cpu and bool(finite)) and self._is_gradient(part):
            self._note(where, finite)

    def came(self, weight: Tensor, grad: Tensor) -> None:
        """A gradient has come to a weight whose hooks may replace it. Waits for no device."""
        part = None if is_captured() else local(grad)
        if part is not None and not part.is_meta and part.is_floating_point():
            self._note((-id(weight), part.numel()), is_finite(part))

    def _note(self, where: Where, finite: Tensor) -> None:
        self._finite[where] = self._finite[where] & finite if where in self._finite else finite

    def _is_gradient(self, part: Tensor) -> bool:
        if self._places is None:
            found = (local(grad) for grad in self._gradients())
            self._places = {grad.data_ptr() for grad in found if grad is not None}
        return part.data_ptr() in self._places

    def has_passed(self) -> None:
        """Another backward pass is over: gradients are others, and may lie elsewhere."""
        self._asked.clear()
        self._places = None

    def take(self) -> int:
        """Return how many gradients were not finite when they were asked about, and forget them."""
        found, self._finite = self._finite, {}
        by_device: dict[torch.device, list[Tensor]] = {}
        for finite in found.values():
            by_device.setdefault(finite.device, []).append(finite)
        return len(found) - sum(int(torch.stack(flags).sum()) for flags in by_device.values())
