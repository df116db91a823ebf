"""Calls as they came: what was called, what it was given and has made. Nothing of it is understood before somebody asks.

Most of what a trainer computes outside of its models are numbers for its log, which nobody holds any more a moment later. To note such a
call costs a fraction of what it costs to understand it, that is to number its values and to find them again; and what nobody holds by the
time that somebody asks is never understood at all.

What tells a tensor from others at the time of the call is noted with it: how often it was written to, where it lay, whether it wanted a
gradient. Whoever writes to memory asks first, and so only what writes unseen can change anything between a call and its understanding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanscope.capture.entries import Operator, tensors_of
from nanscope.capture.sites import Callers, Place
from nanscope.torch_inside import base_of, storage_uses, uses, writes_counted

LIGHT = 1 << 21  # bytes of a tensor that waits; a larger one is held for no longer than anybody needs it
WHOLE = 1 << 22  # and of the memory that a view which waits is a part of
WEIGHT = 1 << 24  # bytes of all that waits, read or made, and at most a sixteenth of what may be held
CALL = WEIGHT >> 10  # and what a call weighs by itself
GRAPH = WEIGHT >> 6  # and one for each argument with a gradient, which may keep the activations of a model
ALIASED = 2  # holders of a piece of memory: a tensor, and who counts them
FRAMES = 3  # of ours between a call and its noting
OURS = 3  # references to a result that nobody else holds: its note's, and two while they are counted

ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout})

Seen = tuple[int, int, torch.Size, bool]  # of an argument: how often it was written to, address, shape, whether it wanted a gradient
Made = tuple[int, int]  # of a result: how often it was written to, and its address


class RawCall(NamedTuple):
    """A call that was made. seen: of each tensor among the arguments, in order. made: of each result. place: in the trainer's code. grad:
    was autograd on? module: the part of the model that it was made in."""

    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]
    seen: list[Seen]
    made: list[Made]
    place: Place
    grad: bool
    module: str


class Notes:
    """The calls that wait to be understood. module: the part of the model that they are made in. budget: bytes that may be held."""

    def __init__(self, callers: Callers, budget: int) -> None:
        self.pending: list[tuple[Any, ...]] = []  # what makes a `RawCall`: making it takes as long as all else
        self.module = ""
        self._callers = callers
        self._light: set[int] = set()  # identities of what waiting calls read and made: nothing else can have these as long as they wait
        self._weight, self._most = 0, min(WEIGHT, budget >> 4)

    @property
    def are_many(self) -> bool:
        """Is it time to understand what waits?"""
        return self._weight > self._most

    def add(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Note a call that was made and has written to nothing; False if it has to be understood at once."""
        results = (result,) if type(result) is Tensor else result if type(result) in (tuple, list) else ()
        if not results or (kwargs and not ATOMS.issuperset(map(type, kwargs.values()))):
            return False
        seen: list[Seen] = []
        made: list[Made] = []
        weight = CALL
        try:
            read = self._read(args, seen)
            if read < 0 or not seen:  # what a factory makes torch hands out as a copy if somebody else holds it
                return False
            for item in results:
                size = _weight_of(item) if type(item) is Tensor else -1
                if size < 0:
                    return False
                weight += 0 if operator.view else size  # what it is a part of has been weighed
                made.append((writes_counted(item), item.data_ptr()))
        except RuntimeError:  # no memory of its own, or in inference mode
            return False
        self._weight += weight + read
        self._light.update(map(id, args))
        self._light.update(map(id, results))
        place = self._callers.caller(FRAMES)
        self.pending.append((operator, args, kwargs, results, seen, made, place, torch.is_grad_enabled(), self.module))
        return True

    def _read(self, args: Sequence[Any], seen: list[Seen]) -> int:
        """Note what tensors among arguments are at this moment, and return the bytes that are held for them alone; −1 if one of them, or
        another argument, cannot wait."""
        weight = 0
        for arg in args:
            kind = type(arg)
            if kind is Tensor:
                wanted = arg.requires_grad
                if id(arg) not in self._light:
                    size = _weight_of(arg)
                    if size < 0:
                        return -1
                    weight += size
                if wanted:
                    weight += GRAPH
                seen.append((writes_counted(arg), arg.data_ptr(), arg.shape, wanted))
            elif kind not in ATOMS:
                inner = self._read(arg, seen) if kind in (list, tuple) else -1
                if inner < 0:
                    return -1
                weight += inner
        return weight

    def take(self) -> list[RawCall]:
        """Return what waits, the last first, but for what has come to nothing: nobody holds what it has made, nor what was made of that.

        Another thread may add a call meanwhile: that waits for the next time.
        """
        pending = self.pending[:]
        del self.pending[: len(pending)]
        self._light, self._weight = set(), 0
        left: list[RawCall] = []
        read: set[int] = set()  # tensors that what is left reads
        while pending:
            operator, args, _, results, *_ = noted = pending.pop()  # with which go its references to its arguments, unless it is left
            for item in results:
                if id(item) in read or sys.getrefcount(item) > OURS or uses(item) > 1:
                    break
                if not operator.view and storage_uses(item) > ALIASED:
                    break  # by another tensor that torch made without a call, as `x.data`
            else:
                continue
            left.append(RawCall._make(noted))
            read.update(map(id, tensors_of(args)))
        return left


def _weight_of(tensor: Tensor) -> int:
    """Return the bytes that are held with a tensor, −1 if it cannot wait."""
    size = tensor.nbytes
    if size > LIGHT or tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype.is_complex:
        return -1
    if base_of(tensor) is None:
        return size
    whole = tensor.untyped_storage().nbytes()
    return whole if whole <= WHOLE else -1
