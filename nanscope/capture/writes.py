"""Writes in place, in functional form: what a write made of the tensor, and of every other one that shares its memory.

What cannot be noted faithfully is not noted: whoever shares the memory is then a leaf when it is next read.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from nanscope.capture import raw
from nanscope.capture.entries import PLAIN, Noted, Operator, Value, ids, is_intact, next_version
from nanscope.capture.layout import copy_of, covers, is_dense, is_turned, lie_apart, meet, memory_order, overlaps
from nanscope.capture.log import REMEMBERED, Log
from nanscope.capture.modules import version_of
from nanscope.capture.values import Values
from nanscope.program.calls import Arg, Ref
from nanscope.program.ops import FLOW, Flow
from nanscope.torch_inside import base_of

Step = tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]  # operator, arguments after the first, keyword arguments


class Writes:
    """Notes writes in a log, in two parts: `before` a write what it will destroy, `after` it what it has made."""

    def __init__(self, log: Log, values: Values) -> None:
        self._log, self._values = log, values
        self._by_id = values.by_id
        self._written: tuple[int, int | None] = (PLAIN, None)  # history and version after the last write

    def before(self, target: Value, tensor: Tensor, turns: bool) -> None:
        """Save what a write is about to destroy: a leaf's content, by copy, while it is small enough to keep.

        turns: only how the tensor lies will change. Without gradient it is most often gradients that are clipped in place: large ones are
        not worth a copy in every step.
        """
        for value in self._values.relatives(target.storage):
            if value.tensor is None or value.copied or (turns and value.tensor is not tensor) or value.id not in self._by_id:
                continue
            content, intact = value.tensor, is_intact(value)
            if value.leaf is not None or value.id != target.id:
                self._values.release(value, guarded=True)
            if value.leaf is not None and intact and (value.bytes <= REMEMBERED or self._log.grad()):
                self._values.keep_copy(value, functools.partial(copy_of, value, content))

    def leave_behind(self, storage: int) -> None:
        """A call is about to write to memory, and waits: what is known to be there was there before."""
        for value in self._values.relatives(storage):
            if value.tensor is not None and not value.copied:
                content, intact = value.tensor, is_intact(value)
                self._values.release(value, guarded=True)
                if intact:
                    self._values.keep_copy(value, functools.partial(copy_of, value, content))

    def after(self, known: Operator, noted: Noted, target: Value, tensor: Tensor) -> bool:
        """Note a write; False if it has no faithful functional form.

        The order matters. First everybody in the memory is made unfindable, since nobody is what he was: whoever is not found again is a
        leaf. Then comes the functional form, whose arguments still are what they were when the call was made; then what makes its result
        alike to the bit (dtype, order in memory); and last those who share the memory, who are made from that result.
        """
        relatives = self._values.relatives(target.storage)
        by_key = self._values.by_key
        live = [v for v in relatives if by_key.get(v.key) == v.id and v.id != target.id and v.key != target.key]
        live = [v for v in live if v.guard is None or not v.guard.gone()]  # views that the trainer has let go of need no new content
        # Pieces of a tensor that torch calls no views of it count no write to each other; and none has been.
        self._values.supersede(target.storage, {v.id for v in live if lie_apart(v, target)})
        overload, noted = _without_write(known, noted, tensor)
        if overload is None or overlaps(target) or self._reads_what_it_writes(known, noted, target):
            return False
        # A constant that is written into a part of a tensor does not end the gradient of the rest.
        diff = self._log.flows(self._log.read) or (target.diff and self._log.grad())
        (written,) = self._log.append(overload, noted, [tensor], diff, None)
        assert written is not None  # the result is the tensor
        if tensor.dtype is not _promoted(noted, self._by_id):
            self._then(written, [("aten._to_copy.default", (), (("dtype", tensor.dtype),))])
        if is_dense(target) and self._lies_otherwise(known, noted, target):
            self._then(written, _lying_as(target))
        self._spread(self._by_id[written], target, live, tensor)
        return True

    def after_turn(self, known: Operator, noted: Noted, target: Value, tensor: Tensor) -> None:
        """Note that a tensor lies otherwise now. No element was written, but whoever shares the memory counts a write."""
        now, after = self._counted(tensor)
        for value in self._values.relatives(target.storage):
            if value.tensor is tensor:
                self._values.release(value)
            if value.version == now and not value.copied:
                value.version = after
        self._log.append(known.functional or "", noted, [tensor], self._log.flows(self._log.read), None)

    def _counted(self, tensor: Tensor) -> tuple[int, int]:
        """How many writes to a tensor are counted before the one that is being written down, and after it."""
        if self._log.noted is None:
            return version_of(tensor), next_version(tensor)
        after = self._log.noted.made[raw.WRITES]
        return after - 1, after

    def _lies_otherwise(self, known: Operator, noted: Noted, target: Value) -> bool:
        """May the functional form of a write give the same elements in another order of memory?"""
        if known.name != "copy_":
            return is_turned(target)
        source = self._by_id.get(noted[0][0].id) if isinstance(noted[0][0], Ref) else None
        return source is None or source.key[1:3] != target.key[1:3]

    def _reads_what_it_writes(self, known: Operator, noted: Noted, target: Value) -> bool:
        """Does a write read elements that it has written already? Which of them are new then, not even torch says."""
        pointwise = known.name == "copy_" or FLOW.get(known.name.rstrip("_")) is Flow.POINTWISE
        for arg in (*noted[0][known.name != "copy_" :], *(arg for _, arg in noted[1])):
            for value_id in ids(arg):
                other = self._by_id.get(value_id)
                if other is None or other.storage != target.storage or (pointwise and other.key[:4] == target.key[:4]):
                    continue
                if meet(other, target):
                    return True
        return False

    def _then(self, written: int, steps: list[Step]) -> None:
        """Let calls follow on the functional form of a write: the last of them gives what was written."""
        log, made_by, value = self._log, self._values.made_by, self._by_id[written]
        last = log.entries[log.count - 1]
        raw = self._values.add(value.shape, value.dtype, value.diff).id
        log.entries[log.count - 1] = replace(last, outs=(raw,))
        made_by[raw] = log.count - 1
        for n, (op, args, kwargs) in enumerate(steps):
            made = written if n == len(steps) - 1 else self._values.add(value.shape, value.dtype, value.diff).id
            made_by[made] = log.count
            log.number(replace(last, op=op, args=(Ref(raw), *args), kwargs=kwargs, outs=(made,)), not value.diff)
            raw = made

    def _spread(self, written: Value, target: Value, live: list[Value], tensor: Tensor) -> None:
        """Carry a write to the other tensors that share its memory, through the one that covers all of it.

        All go by way of the whole, in two steps, since of two views neither can be made from the other: the written part is put into the
        whole, and every view is taken out of that again. Where nobody covers the memory, they are leaves.
        """
        # What is written through an alias of another history changes a value behind autograd's back: that value is a leaf when it is next
        # read. So is what was written to unseen before, and an unseen `detach_` changes the history of all.
        before, after = self._counted(tensor)
        now, base = (None, before), base_of(tensor)
        base = tensor if base is None else base
        histories = (PLAIN, written.history if base.requires_grad else PLAIN)
        live = [v for v in live if v.id in self._by_id and v.version in now and v.history in histories]
        storage = tensor.untyped_storage() if live else None
        whole = [v for v in (target, *live) if v.dtype is tensor.dtype and covers(v, storage)] if live else []
        if not whole:
            return
        self._written = written.history, after
        # Of two that are the same memory, the one that has the gradient: a write without gradients leaves one that has none beside it.
        root = target if whole[0] is target else next((value for value in whole if value.diff), whole[0])
        fresh = written if root is target else self._scatter(root, written, target)
        others = [value for value in live if value is not root and value.dtype is root.dtype]
        plain = self._in_memory_order(fresh, root) if others else -1
        for value in others:
            offset = (value.key[0] - root.key[0]) // root.dtype.itemsize
            self._become("aten.as_strided.default", (Ref(plain), value.key[1], value.key[2], offset), value)

    def _scatter(self, root: Value, written: Value, target: Value) -> Value:
        """Put a written view back into the tensor that covers its memory.

        What lies in one piece, as a row does, by where that begins and ends, all else by explicit positions: torch 2.13's
        as_strided_scatter does this in one call and returns a wrong gradient.
        """
        _, shape, stride, _, _ = target.key
        offset = (target.key[0] - root.key[0]) // root.dtype.itemsize
        size, count = math.prod(root.shape), (math.prod(shape),)
        if is_dense(target) and not (is_turned(target) or is_turned(root)):
            piece = self._hidden("aten.reshape.default", (Ref(written.id), (-1,)), count, root.dtype)
            all_of_it = self._hidden("aten.reshape.default", (Ref(root.id), (-1,)), (size,), root.dtype)
            args = (Ref(all_of_it), Ref(piece), 0, offset, offset + count[0])
            joined = self._hidden("aten.slice_scatter.default", args, (size,), root.dtype)
            return self._become("aten.reshape.default", (Ref(joined), root.shape), root)
        every = self._hidden("aten.arange.default", (size,), (size,), torch.int64)
        viewed = self._hidden("aten.as_strided.default", (Ref(every), shape, stride, offset), shape, torch.int64)
        places = self._hidden("aten.reshape.default", (Ref(viewed), (-1,)), count, torch.int64)
        content = self._hidden("aten.reshape.default", (Ref(written.id), (-1,)), count, root.dtype)
        flat = self._in_memory_order(root, root)
        whole = self._hidden("aten.scatter.src", (Ref(flat), 0, Ref(places), Ref(content)), (size,), root.dtype)
        if not is_turned(root):
            return self._become("aten.reshape.default", (Ref(whole), root.shape), root)
        order = memory_order(root)
        lying = tuple(root.shape[n] for n in order)
        laid = self._hidden("aten.reshape.default", (Ref(whole), lying), lying, root.dtype)
        return self._become("aten.permute.default", (Ref(laid), _back(order)), root)

    def _in_memory_order(self, value: Value, like: Value) -> int:
        """A value as a flat tensor, in the order in which `like` lies in memory; how a replay lays it out may differ."""
        order, known, size = memory_order(like), value.id, (math.prod(like.shape),)
        if is_turned(like):
            known = self._hidden("aten.permute.default", (Ref(known), order), tuple(like.shape[n] for n in order), like.dtype)
        flat = self._hidden("aten.reshape.default", (Ref(known), (-1,)), size, like.dtype)
        return self._hidden("aten.clone.default", (Ref(flat),), size, like.dtype)

    def _hidden(self, op: str, args: tuple[Arg, ...], shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Add a call that the trainer did not make, and whose result no tensor of his stands for."""
        value = self._values.add(shape, dtype, self._log.flows(i for arg in args for i in ids(arg)))
        self._add(op, args, value)
        return value.id

    def _become(self, op: str, args: tuple[Arg, ...], like: Value) -> Value:
        """Add a call that the trainer did not make: the functional form of what a write to shared memory did to `like`."""
        history, version = self._written
        value = self._values.add_like(like, history if self._log.flows(i for arg in args for i in ids(arg)) else PLAIN, version)
        self._add(op, args, value)
        return value

    def _add(self, op: str, args: tuple[Arg, ...], value: Value) -> None:
        last = self._log.entries[self._log.count - 1]
        self._values.made_by[value.id] = self._log.count
        entry = replace(last, op=op, args=args, kwargs=(), outs=(value.id,), grad=self._log.grad())
        self._log.number(entry, not value.diff)


def _without_write(known: Operator, noted: Noted, tensor: Tensor) -> tuple[str | None, Noted]:
    """Return the functional form of an in-place call and its arguments, None if it has none that can be replayed."""
    args, kwargs = noted
    if known.name == "copy_":
        return "aten.expand.default", ((args[1], tuple(tensor.shape)), ())  # aten.copy has no derivative
    if known.name == "zero_":
        return "aten.fill.Scalar", ((args[0], 0.0 if tensor.is_floating_point() else 0), ())
    if known.functional is None or not known.name.endswith("_") or known.name.rstrip("_") not in FLOW:
        return None, noted
    return known.functional, (args, kwargs)


def _promoted(noted: Noted, values: dict[int, Value]) -> torch.dtype | None:
    """The dtype that the functional form of a write would give: the target's own unless a wider tensor takes part."""
    first = noted[0][0] if noted[0] else None
    if not isinstance(first, Ref):
        return None
    dtype = values[first.id].dtype
    for arg in noted[0][1:]:
        if isinstance(arg, Ref):
            other = values[arg.id]
            if other.shape or not dtype.is_floating_point:
                dtype = torch.promote_types(dtype, other.dtype)
        elif isinstance(arg, float) and not dtype.is_floating_point and not dtype.is_complex:
            dtype = torch.get_default_dtype()
    return dtype


def _lying_as(target: Value) -> list[Step]:
    """The order in which a sum adds is that of memory: a functional form has to lie as what was written does."""
    clone: Step = ("aten.clone.default", (), (("memory_format", torch.contiguous_format),))
    if not is_turned(target):
        return [clone]
    order = memory_order(target)
    return [("aten.permute.default", (order,), ()), clone, ("aten.permute.default", (_back(order),), ())]


def _back(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order that undoes another one."""
    return tuple(order.index(n) for n in range(len(order)))
