"""What the trainer's code asks about its gradients before it drops them: were they finite?

    if not all(p.grad.isfinite().all() for p in model.parameters()):
        optimizer.zero_grad()
        continue

Nothing else tells of such a step: its loss may be finite, and what it was differentiated to is gone when the next one begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from nanscope.capture.entries import Value, tensors_of
from nanscope.capture.log import Log
from nanscope.capture.raw import RawCall
from nanscope.capture.values import Values
from nanscope.program.local import is_plain
from nanscope.program.numbers import is_finite

STEPS = 32  # tensors that are gone through on the way back from an answer
ANSWERS = 64  # that are remembered

Maker = Callable[[Tensor], RawCall | None]  # returns the call that waits and has made a tensor


class Questions:
    """What was asked since the last backward pass. finite: of numbers that were made of gradients, and of gradients, what was asked about
    that is not finite, or may not be: whether it is, still on its device."""

    def __init__(self, known: Values, log: Log) -> None:
        self.finite: deque[Tensor] = deque(maxlen=ANSWERS)
        self._known, self._log = known, log

    def answered(self, tensor: Tensor, maker: Maker) -> None:
        """A truth, or a number that is not finite, has gone to the host. Waits for no device."""
        for one in self._about(tensor, maker):
            finite = is_finite(one)
            if not (one.is_cpu and bool(finite)) and self._is_of_gradients(one, maker):
                self.finite.append(finite)

    def forget(self) -> None:
        """Another backward pass is over, or the step."""
        self.finite.clear()

    def _about(self, tensor: Tensor, maker: Maker) -> list[Tensor]:
        """Return the numbers without a gradient that a truth is about: the last ones on the way to it."""
        found: list[Tensor] = []
        way: list[Tensor | Value] = [tensor]
        for _ in range(STEPS):
            if not way:
                break
            one = way.pop()
            known = one if isinstance(one, Value) else None
            tensor_there = known.tensor if known is not None else one if isinstance(one, Tensor) and is_plain(one) else None
            if tensor_there is not None and tensor_there.is_floating_point():
                if not tensor_there.requires_grad:
                    found.append(tensor_there)
            elif known is not None:
                way += self._read(known)
            elif tensor_there is not None and tensor_there.dtype is torch.bool:
                way += self._made_of(tensor_there, maker)
        return found

    def _is_of_gradients(self, tensor: Tensor, maker: Maker) -> bool:
        places = {grad.data_ptr() for grad in self._known.gradients() if is_plain(grad)}
        way: list[Tensor | Value] = [tensor]
        for _ in range(STEPS if places else 0):
            if not way:
                break
            one = way.pop()
            if (one.key[0] if isinstance(one, Value) else one.data_ptr() if is_plain(one) else 0) in places:
                return True
            way += self._read(one) if isinstance(one, Value) else self._made_of(one, maker)
        return False

    def _made_of(self, tensor: Tensor, maker: Maker) -> list[Tensor | Value]:
        """Return what a tensor was made of, as far as that is known: tensors where the call waits, else values."""
        made = maker(tensor)
        if made is not None:
            return [*tensors_of(made.args)]
        value = self._known.find(tensor) if is_plain(tensor) else None
        return [] if value is None else self._read(value)

    def _read(self, value: Value) -> list[Tensor | Value]:
        made = self._log.entries.get(self._known.made_by.get(value.id, -1))
        return [] if made is None else [one for number in made.reads() if (one := self._known.by_id.get(number)) is not None]
