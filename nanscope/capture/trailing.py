"""Writes to the weights of models that nobody trains: a target network that follows another one, an average of weights.

    t.data.mul_(1 - tau)                                      waits, with a copy of what it has destroyed
    torch.add(t.data, p.data, alpha=tau, out=t.data)          so does this; and both are forgotten when the next step was well

A loop makes them by the hundred between two steps. Nobody but their model reads such memory, and calls within models are not noted: so they
need not be understood before anybody asks, nor any call before them. A write to what others know, too, is understood at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nanscope.capture.entries import Operator, tensors_of
from nanscope.capture.notes import LIGHT, Notes
from nanscope.capture.writes import Writes
from nanscope.program.local import memory_of

Place = tuple[int, torch.Size]  # address, shape


def besides_out(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without the one that says where to write to."""
    return {name: arg for name, arg in kwargs.items() if name != "out"}


class Trailing:
    """Decides for the writes of one thread. weights: of the models that nobody trains, buffers as well."""

    def __init__(self, notes: Notes, writes: Writes) -> None:
        self.weights: Callable[[], Iterable[Tensor]] = tuple
        self._notes, self._writes = notes, writes
        self._ends: dict[int, int] | None = None  # of the memory of these weights, by where it begins; None until it is asked for
        self._starts: list[int] = []  # in order
        self._read: dict[int, Place | None] = {}  # see `_known`
        self._seen = 0, 0  # as far as these are looked at

    def forget(self) -> None:
        """Another backward pass is over: there may be other models."""
        self._ends = None

    def destroyed(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return a copy of what a call is about to destroy that may wait for that, None if it may not."""
        target = kwargs.get("out") if operator.gives else args[0] if args else None
        if (type(target) is not Tensor and type(target) is not Parameter) or target.layout is not torch.strided or target.is_nested:
            return None
        if target.is_inference() or target.nbytes > LIGHT or not target.is_contiguous():
            return None
        if torch.is_grad_enabled() and any(one.requires_grad for one in (target, *tensors_of(args))):
            return None
        start = memory_of(target)
        if not start or start not in self._memory() or not self._notes.can_wait(args, besides_out(kwargs), operator.lasting):
            return None
        if self._known().get(start, (target.data_ptr(), target.shape)) != (target.data_ptr(), target.shape):
            return None
        self._writes.leave_behind(start)
        return target.detach().clone()

    def _memory(self) -> Mapping[int, int]:
        if self._ends is None:
            plain = [one for one in self.weights() if (type(one) is Parameter or type(one) is Tensor) and one.layout is torch.strided]
            self._ends = {start: start + one.untyped_storage().nbytes() for one in plain if (start := memory_of(one))}
            self._starts, self._read, self._seen = sorted(self._ends), {}, (0, 0)
        return self._ends

    def _known(self) -> Mapping[int, Place | None]:
        """Of the memory of which a call that waits knows, by where it begins: what has been read there, if always the same since something
        was last to be done among these calls. What a write destroys is what they have read."""
        taken, upto = self._seen
        if taken != self._notes.taken:
            self._read, upto = {}, 0
        pending, ends = self._notes.pending, self._memory()
        for one in pending[upto:]:
            if type(one) is not tuple:
                self._read = dict.fromkeys(self._read)
                continue
            own = None if one[9] is None else memory_of(one[3][0])
            for _, address, shape, _ in (*one[4], *(one[5] if own is None else ())):
                below = bisect_right(self._starts, address)
                start = self._starts[below - 1] if below else 0
                if start != own and address < ends.get(start, 0):
                    self._read[start] = (address, shape) if self._read.get(start, (address, shape)) == (address, shape) else None
        self._seen = self._notes.taken, len(pending)
        return self._read
