"""What memory held before calls have written to it that waited: put together from what it holds, and from what they have destroyed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanscope.capture import raw
from nanscope.capture.modules import version_of
from nanscope.capture.raw import Later, RawCall
from nanscope.capture.sieve import beginning
from nanscope.program.local import is_plain, memory_of


class Before:
    """Knows it for calls that are being understood. calls: these, the last first. most: bytes of memory that is looked back at."""

    def __init__(self, calls: Sequence[RawCall | Later] = (), most: int = 0) -> None:
        self._writes: dict[int, list[RawCall]] = {}  # by where the memory begins: those that are still to be understood, the last first
        self._most = most
        for call in calls:
            if not isinstance(call, Later) and call.destroyed is not None:
                self._writes.setdefault(beginning(call.results[0]), []).append(call)

    def understood(self, call: RawCall) -> None:
        """The next of them is written down."""
        self._writes[beginning(call.results[0])].pop()

    def writes_to(self, tensor: Tensor) -> bool:
        """Was a tensor something else before they have written to its memory?"""
        return bool(self._writes) and is_plain(tensor) and bool(self._writes.get(memory_of(tensor)))

    def content(self, tensor: Tensor, version: int | None) -> Tensor | None:
        """Return what it was, None if that cannot be told. version: how often it had been written to then."""
        memory = tensor.untyped_storage()
        if memory.nbytes() > self._most:
            return None
        whole, writes = memory.clone(), version_of(tensor)  # type: ignore[no-untyped-call]
        for call in self._writes[memory.data_ptr()]:
            target, made = call.results[0], call.made
            if target.data_ptr() != made[raw.ADDRESS]:
                return None  # it lies somewhere else by now
            if target.nbytes < memory.nbytes() and writes != made[raw.WRITES]:
                return None  # somebody else has written to it as well
            assert call.destroyed is not None
            _part(whole, target).copy_(call.destroyed)
            writes = made[raw.WRITES] - 1
        all_of_it = target.nbytes == memory.nbytes()
        return _part(whole, tensor) if all_of_it or version in (None, writes) else None


def _part(memory: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor that lies in other memory as one does in its own."""
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(memory, like.storage_offset(), like.shape, like.stride())
