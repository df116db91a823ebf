"""What the trainer's code asks about its gradients before it drops them: were they finite?

    if not all(p.grad.isfinite().all() for p in model.parameters()):
        optimizer.zero_grad()
        continue

Nothing else tells of such a step: its loss may be finite, and what it was differentiated to is gone when the next one begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

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

    def __init__(self, known: Values, log: Log, maker: Maker) -> None:
        self.finite: deque[Tensor] = deque(maxlen=ANSWERS)
        self._known, self._log, self._maker = known, log, maker

    def answered(self, tensor: Tensor) -> None:
        """A truth, or a number that is not finite, has gone to the host. Waits for no device."""
        for one in self._about(tensor):
            finite = is_finite(one)
            if not (one.is_cpu and bool(finite)) and self._is_of_gradients(one):
                self.finite.append(finite)

    def forget(self) -> None:
        """Another backward pass is over, or the step."""
        self.finite.clear()

    def _about(self, tensor: Tensor) -> list[Tensor]:
        """Return the numbers without a gradient that a truth is about: the last ones on the way to it."""
        contents = map(_content, self._back(tensor, _may_be_about_others))
        return [one for one in contents if one is not None and one.is_floating_point() and not one.requires_grad]

    def _is_of_gradients(self, tensor: Tensor) -> bool:
        places = self._known.of_gradients()
        return bool(places) and any(_place(one) in places for one in self._back(tensor))

    def _back(self, tensor: Tensor, goes_on: Callable[[Tensor | Value], bool] = lambda one: True) -> Iterator[Tensor | Value]:
        """Yield a tensor and what it was made of. goes_on: is asked of each whether what is behind it counts, too."""
        way: list[Tensor | Value] = [tensor]
        for _ in range(STEPS):
            if not way:
                return
            one = way.pop()
            yield one
            if goes_on(one):
                way += self._read(one) if isinstance(one, Value) else self._made_of(one)

    def _made_of(self, tensor: Tensor) -> list[Tensor | Value]:
        """Return what a tensor was made of, as far as that is known: tensors where the call waits, else values."""
        made = self._maker(tensor)
        if made is not None:
            return [*tensors_of(made.args)]
        value = self._known.find(tensor) if is_plain(tensor) else None
        return [] if value is None else self._read(value)

    def _read(self, value: Value) -> list[Tensor | Value]:
        made = self._log.entries.get(self._known.made_by.get(value.id, -1))
        return [] if made is None else [one for number in made.reads() if (one := self._known.by_id.get(number)) is not None]


def _content(one: Tensor | Value) -> Tensor | None:
    return one.tensor if isinstance(one, Value) else one if is_plain(one) else None


def _place(one: Tensor | Value) -> int:
    """Where it lies, 0 if that is not known."""
    return one.key[0] if isinstance(one, Value) else one.data_ptr() if is_plain(one) else 0


def _may_be_about_others(one: Tensor | Value) -> bool:
    """Is it no number itself, but a truth about others, or nobody knows what it holds?"""
    content = _content(one)
    if content is not None and content.is_floating_point():
        return False
    return isinstance(one, Value) or (content is not None and content.dtype is torch.bool)
