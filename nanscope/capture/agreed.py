"""What ranks have put together since the last backward pass, as far as the tape saw it: memory, and norms of which each holds the same."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.entries import Operator, tensors_of
from nanscope.program.local import is_plain, memory_of
from nanscope.program.ops import base_name

KEPT = 4096  # of each


# What hands numbers from rank to rank, as c10d names it, and as the function is called. What is received without that is a stage's.
EXCHANGES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "gather_": "gather",
    "scatter_": "scatter",
}


def exchange(operator: Operator) -> str | None:
    """Return the name of such a call, which writes to its first argument; None if it is none."""
    return EXCHANGES.get(base_name(operator.overload)) if operator.overload.startswith("c10d.") else None


IN_PLACE = frozenset({"allreduce_", "allreduce_coalesced_", "reduce_", "broadcast_"})


def given(operator: Operator, args: tuple[Any, ...]) -> list[Tensor]:
    """Return what this rank gives to such a call: what it writes to, of a broadcast only if it is this rank's, or else what follows."""
    name = base_name(operator.overload)
    if name not in IN_PLACE:
        return tensors_of(args[1:])
    return [] if name == "broadcast_" and _rank(args) not in (-1, args[2]) else tensors_of(args[:1])


class Agreed:
    """norms: scalars, taken of gradients, that all ranks of the run have reduced; they stay on their device until somebody asks."""

    def __init__(self) -> None:
        self.norms: deque[Tensor] = deque(maxlen=KEPT)
        self._written: deque[int] = deque(maxlen=KEPT)
        self._by_all: deque[int] = deque(maxlen=KEPT)
        self._sent: dict[int, weakref.ref[Tensor]] = {}  # memory → what another rank has written into; buffers live long

    def collective(self, operator: Operator, args: tuple[Any, ...], measured: bool) -> None:
        """A collective of the trainer's was issued. measured: after norms of gradients were taken."""
        given = [tensor for tensor in tensors_of(args) if is_plain(tensor)]
        memory = [memory_of(tensor) for tensor in given]
        self._written.extend(memory)
        if operator.overload.startswith("c10d.recv_"):
            if len(self._sent) > KEPT:
                self._sent = {place: known for place, known in self._sent.items() if known() is not None}
            self._sent.update(zip(memory, map(weakref.ref, given), strict=True))
        elif operator.overload.startswith("c10d.allreduce_") and _size(args) == _world():
            self._by_all.extend(memory)
            if measured:
                self.norms.extend(tensor for tensor in given if tensor.numel() == 1)

    def norm(self, norm: Any, part: Tensor) -> None:
        """The norm of a tensor that is spread over ranks was taken. part: of it, on this rank."""
        placements = getattr(norm, "placements", ())
        if placements and all(one.is_replicate() for one in placements) and norm.device_mesh.size() == _world():
            self.norms.append(part)

    def holds(self, memory: int, by_all: bool = False) -> bool:
        """Has a collective written to it? by_all: one that put all ranks of the run together."""
        return memory in (self._by_all if by_all else self._written)

    def was_sent(self, tensor: Tensor) -> bool:
        """Is it what another rank has sent to this one?"""
        known = self._sent.get(memory_of(tensor)) if is_plain(tensor) else None
        return known is not None and known() is not None

    def join(self, other: Agreed) -> None:
        """Take what was seen in another thread."""
        for mine, theirs in (self.norms, other.norms), (self._written, other._written), (self._by_all, other._by_all):
            mine.extend(theirs)  # type: ignore[arg-type]
        other.forget()

    def let_go(self) -> None:
        """Refer to no tensor any more, not even weakly: what was sent is not known from here on."""
        self.forget()
        self._sent = {}

    def forget(self) -> None:
        """Another backward pass is over."""
        for known in (self.norms, self._written, self._by_all):
            known.clear()


def _world() -> int:
    """How many ranks the run has, -1 where there is no such thing: a group can be made without."""
    return int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else -1


def _size(args: tuple[Any, ...]) -> int:
    """How many ranks take part, 0 where that cannot be told."""
    group = _group(args)
    return 0 if group is None else int(group.size())


def _rank(args: tuple[Any, ...]) -> int:
    """Which of them this one is, -1 where that cannot be told."""
    group = _group(args)
    return -1 if group is None else int(group.rank())


def _group(args: tuple[Any, ...]) -> Any:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, AttributeError):  # it is something else
                return torch.distributed.ProcessGroup.unbox(arg)
    return None
