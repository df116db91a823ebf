"""Writes to rows of a buffer: a rollout is gathered step by step, and learnt from when it is whole.

    obs[step] = x                waits, with a copy of the row that it has destroyed
    values[:, step].copy_(v)     so does this

A loop makes them by the hundred before a loss reads any of it, and its losses are recognised all the same: a buffer is where they begin.
Memory that a model or a gradient lies in is no buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from nanscope.capture import raw
from nanscope.capture.entries import Handle, Operator, tensors_of
from nanscope.capture.log import RING
from nanscope.capture.notes import Notes
from nanscope.capture.raw import Raw
from nanscope.capture.sieve import beginning, is_part
from nanscope.capture.sites import Place
from nanscope.capture.values import Values
from nanscope.capture.weighing import LIGHT
from nanscope.capture.writes import Writes
from nanscope.program.local import is_plain, memory_of
from nanscope.torch_inside import base_of


class Rows:
    """Decides for the writes of one thread. of_models: weights, buffers and gradients of the models that were called."""

    def __init__(self, notes: Notes, known: Values, writes: Writes) -> None:
        self.of_models: Callable[[], Iterable[Tensor]] = tuple
        self._notes, self._known, self._writes = notes, known, writes
        self._buffers: dict[int, tuple[Handle, bool]] = {}  # by where its memory begins: is it one?
        self._left: dict[int, int] = {}  # by the same: how many values were known when they were last left behind
        self._last: dict[int, Place] = {}  # and where the last write to it was made

    def destroyed(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return a copy of the row that a call is about to write to, None if that may not wait."""
        target = args[0] if args else None
        if operator.gives or operator.turns or type(target) is not Tensor or not is_plain(target) or target.nbytes > LIGHT:
            return None
        base = base_of(target)
        if base is None or base.requires_grad or target.is_inference() or target.is_complex() or target.is_neg():
            return None
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors_of(args)):
            return None
        start = beginning(target)
        if not (start and is_part(target) and self._is_buffer(start, base) and self._notes.can_wait(args, kwargs, operator.lasting)):
            return None
        if start in self._known.by_storage and self._left.get(start) != self._known.length:
            self._writes.leave_behind(start)
            self._left[start] = self._known.length
        return target.detach().clone()

    def wrote(self, call: Raw) -> None:
        """That call has done so, and waits."""
        start = beginning(call[raw.RESULTS][0])
        if start in self._buffers:
            self._last[start] = call[raw.CODE], call[raw.LASTI]

    def last(self, start: int) -> Place | None:
        """Return where the last write was made to the buffer that begins there, None if none does."""
        made = self._last.get(start)
        return None if made is None or self._buffers[start][0].expired() else made

    def _is_buffer(self, start: int, base: Tensor) -> bool:
        found = self._buffers.get(start)
        if found is None or found[0].expired():
            if len(self._buffers) > RING:
                gone = [start for start, (buffer, _) in self._buffers.items() if buffer.expired()]
                for one in gone:
                    self._let_go(one)
            self._let_go(start)
            found = self._buffers[start] = Handle(base), all(memory_of(one) != start for one in self.of_models() if is_plain(one))
        return found[1]

    def _let_go(self, start: int) -> None:
        for known in (self._buffers, self._left, self._last):
            known.pop(start, None)
