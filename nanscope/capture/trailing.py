"""Writes to the weights of models that nobody trains: a target network that follows another one, an average of weights.

    t.data.mul_(1 - tau)                                      waits, with a copy of what it has destroyed
    torch.add(t.data, p.data, alpha=tau, out=t.data)          so does this; and both are forgotten when the next step was well

A loop makes them by the hundred between two steps. Nobody but their model reads such memory, and calls within models are not noted: so they
need not be understood before anybody asks, nor any call before them. A write to what others know as well, under more than another name for
the same, is understood at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from nanscope.capture import raw
from nanscope.capture.entries import Operator, tensors_of
from nanscope.capture.notes import Notes
from nanscope.capture.sieve import OURS, is_held
from nanscope.capture.spans import Spans
from nanscope.capture.values import Values
from nanscope.capture.weighing import LIGHT
from nanscope.capture.writes import Writes
from nanscope.torch_inside import writes_counted

FRESH = 16  # backward passes, after which it is looked again where these weights lie; whose other memory that is meanwhile may wait as well


def besides_out(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without the one that says where to write to."""
    return {name: arg for name, arg in kwargs.items() if name != "out"}


@dataclass(slots=True)
class Touched:
    """Of such memory, by where it begins, and of the calls that wait and know it, besides such writes. computed: those that have read it;
    named: those that have made another name for all of it; read: what others know. upto: so many of them are looked at."""

    upto: int = 0
    read: set[int] = field(default_factory=set)
    computed: dict[int, list[int]] = field(default_factory=dict)
    named: dict[int, list[int]] = field(default_factory=dict)


class Trailing:
    """Decides for the writes of one thread. weights: of the models that nobody trains, buffers as well."""

    def __init__(self, notes: Notes, writes: Writes) -> None:
        self.weights: Callable[[], Iterable[Tensor]] = tuple
        self._notes, self._writes = notes, writes
        self._spans: Spans | None = None  # the memory of these weights; None until it is asked for
        self._passes = 0
        self._old, self._young = Touched(), Touched()  # of calls that stay where they are when a step is closed, and of those behind them
        self._taken = self._cleared = 0  # how often these became others

    def forget(self) -> None:
        """Another backward pass is over: there may be other models, or other memory in the place of a weight."""
        self._passes += 1
        if self._passes % FRESH == 0:
            self._spans = None

    def destroyed(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return a copy of what a call is about to destroy that may wait for that, None if it may not."""
        target = self._target(operator, args, kwargs)
        if target is None or target.data_ptr() not in self._memory() or not self._may_wait(operator, args, kwargs):
            return None
        if not self._is_apart(target):
            return None
        self._writes.leave_behind(target.data_ptr())
        return target.detach().clone()

    def copy_of(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the same of a call that is about to write to what nobody knows."""
        target = self._target(operator, args, kwargs)
        may_wait = target is not None and not operator.gives and self._may_wait(operator, args, kwargs)
        return target.detach().clone() if target is not None and may_wait else None

    def _target(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """What a call writes to, None if that is not all of some light memory, or a gradient goes through it."""
        target = kwargs.get("out") if operator.gives else args[0] if args else None
        if operator.turns or not _is_whole(target) or target.nbytes > LIGHT:
            return None
        read = tensors_of(args)
        through = torch.is_grad_enabled() and any(one.requires_grad for one in (target, *read))
        return target if read and not through else None

    def _may_wait(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return self._notes.can_wait(args, besides_out(kwargs), operator.lasting)

    def written(self, known: Values) -> list[int]:
        """Return what these weights are, where calls have written it to them which are understood."""
        there = (value for start in self._memory() for value in known.relatives(start))
        return [value.id for value in there if value.id in known.made_by and known.by_key.get(value.key) == value.id]

    def _memory(self) -> Spans:
        if self._spans is None:
            plain = [one for one in self.weights() if _is_whole(one)]
            self._spans = Spans({one.data_ptr(): one.data_ptr() + one.nbytes for one in plain})
            self._taken, self._cleared = -1, -1
        return self._spans

    def _is_apart(self, target: Tensor) -> bool:
        """Does no call that waits know the memory of a tensor, but for its names, and for what was computed with it in this step? And has
        nobody written to it since?"""
        self._look_further()
        start = target.data_ptr()
        if start in self._old.read or start in self._old.computed or start in self._young.read:
            return False
        lies = target.shape, target.stride(), target.dtype
        for number in (*self._old.named.get(start, ()), *self._young.named.get(start, ())):
            note = self._notes.pending[number]
            whole, (writes, _, shape, *_) = note[raw.ARGS][0], note[raw.SEEN]
            is_alike = (shape, whole.stride(), whole.dtype) == lies and writes_counted(whole) == writes
            if not is_alike and is_held(note[raw.RESULTS][0], OURS - 1):
                return False
        return all(self._is_as_read(number, start) for number in self._young.computed.get(start, ()))

    def _is_as_read(self, number: int, start: int) -> bool:
        """Is what a call has read in that memory still what it was? Of one that holds no arguments any more nobody knows."""
        note = self._notes.pending[number]
        read, seen = tensors_of(note[raw.ARGS]), list(raw.each(note[raw.SEEN]))
        known = zip(read, seen, strict=False)
        return len(read) == len(seen) and all(writes_counted(one) == writes for one, (writes, address, *_) in known if address == start)

    def _look_further(self) -> None:
        """Go through the calls that have come since this was asked."""
        outlasted, cleared = self._notes.outlasted
        if self._cleared != cleared:
            self._old, self._cleared = Touched(), cleared
        if self._taken != self._notes.taken:
            self._look(self._old, outlasted)
            self._young, self._taken = Touched(upto=outlasted), self._notes.taken
        self._look(self._young, len(self._notes.pending))

    def _look(self, known: Touched, upto: int) -> None:
        pending, start_of = self._notes.pending, self._memory().start_of
        for number in range(known.upto, upto):
            one = pending[number]
            if type(one) is not tuple:
                continue
            operator = one[raw.OPERATOR]
            names, shares = operator.name == "detach", operator.view or operator.mutable
            own = one[raw.MADE][raw.ADDRESS] if one[raw.DESTROYED] is not None else 0
            for address in (*one[raw.SEEN][raw.ADDRESS :: raw.EACH], *one[raw.MADE][raw.ADDRESS :: raw.EACH]):
                start = start_of(address)
                if names and start == address:
                    known.named.setdefault(start, []).append(number)
                elif start and start != own and shares:
                    known.read.add(start)
                elif start and start != own:
                    known.computed.setdefault(start, []).append(number)
        known.upto = upto


def _is_whole(tensor: Any) -> TypeGuard[Tensor]:
    """Is it a tensor of torch's own that fills its memory, without gaps, and counts its writes?"""
    if (type(tensor) is not Tensor and type(tensor) is not Parameter) or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    whole = not (tensor.is_inference() or tensor.is_complex() or tensor.is_conj() or tensor.is_neg()) and tensor.is_contiguous()
    return whole and bool(tensor.data_ptr()) and tensor.untyped_storage().nbytes() == tensor.nbytes
