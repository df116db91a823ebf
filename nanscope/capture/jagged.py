"""Jagged tensors on their way through the loss: rows of several lengths, packed one behind the other.

    rows = torch.nested.nested_tensor_from_jagged(log_probs, offsets)        what was packed is `log_probs`
    padded = torch.nested.to_padded_tensor(rows, 0.0, output_size=(8, 512))  an index_put of it, into numbers that are data

No program holds a jagged tensor. What is packed in it is an ordinary value, offsets are data, and what people do with one on the way is
noted as what it does to the packed values: taken out, padded, added up, or calculated with element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.entries import PLAIN, Operator, Value, tensors_of
from nanscope.capture.layout import first_row
from nanscope.capture.log import Log
from nanscope.capture.values import Values
from nanscope.program.calls import Arg, Leaf, Ref
from nanscope.program.local import is_plain, refuses, unwrapped
from nanscope.program.ops import MEANS, SUMS, TOPS, Flow, flow_of
from nanscope.torch_inside import offsets_of

SLICE, PUT = "aten.slice.Tensor", "aten.index_put.default"


class Jagged:
    """Notes what is done to jagged tensors. find, leaf: of the tape."""

    def __init__(self, log: Log, known: Values, find: Callable[[Tensor], Value | None], leaf: Callable[[Tensor], Value]) -> None:
        self._log, self._known, self._find, self._leaf = log, known, find, leaf

    def after(self, operator: Operator, args: tuple[Any, ...], keywords: bool, result: Any) -> bool:
        """Note a call on a jagged tensor; False for anything else. keywords: it had some."""
        nested = bool(args) and isinstance(args[0], Tensor) and not refuses(args[0]) and args[0].is_nested
        packed = unwrapped(args[0]) if nested else None
        if packed is None:
            return False
        if isinstance(result, Tensor) and result.is_nested:
            if operator.name == "detach":
                return True  # the same values, and whether they have a gradient the tensor itself tells
            return not keywords and self._pointwise(operator, args, result)
        if not is_plain(packed):
            return False
        value = self._find(packed) or (None if args[0].requires_grad else self._packed(packed, False))
        if value is None:
            return False
        self._log.read[:] = [value.id]
        diff = torch.is_grad_enabled() and args[0].requires_grad
        if operator.name == "to_padded_tensor":
            return not keywords and self._padded(value, args, result, diff)
        if operator.name in _ADDED_UP and len(args) == 1 and not keywords and isinstance(result, Tensor) and not result.dim():
            self._log.append(operator.overload, ((Ref(value.id),), ()), [result], diff, False)
            return True
        return self._taken_out(value, packed, args[0], tensors_of(result), diff)

    def _taken_out(self, value: Value, packed: Tensor, wrapper: Tensor, results: Sequence[Tensor], diff: bool) -> bool:
        """What `values()` and `unbind()` return is a slice of what was packed."""
        starts = [first_row(packed, item) for item in results]
        if None in starts or not results:
            return False
        for start, item in zip(starts, results, strict=True):
            call = ((Ref(value.id), 0, start, (start or 0) + len(item)), ())
            if value.history != PLAIN or not diff:
                self._log.append(SLICE, call, [item], diff, True)
            else:  # made on the way: its history is that of the wrapper, of which this will be a view
                self._known.rehistory(self._log.append(SLICE, call, [item], diff, False), id(wrapper))
        return True

    def _padded(self, value: Value, args: tuple[Any, ...], result: Tensor, diff: bool) -> bool:
        """Rows of one length are the packed ones, put into numbers that are the padding."""
        rows = args[0]
        offsets = offsets_of(rows)
        if offsets is None or len(args) < 2 or not isinstance(args[1], (int, float)) or not is_plain(result):
            return False
        total = value.shape[0]
        number = torch.arange(total, device=result.device)
        row = torch.bucketize(number, offsets[1:].to(number.dtype), right=True)  # waits for no device
        column = number - offsets.to(number.dtype)[row.clamp_max(len(offsets) - 2)]
        width, fits = result.shape[1], result.is_cpu and (not total or int(column.max()) < result.shape[1])
        shape = (result.shape[0], width + (not fits), *result.shape[2:])
        base, places = result.new_full(shape, args[1]), [self._data(one) for one in (row, column.clamp_max(width))]
        self._log.append(PUT, ((Ref(self._data(base)), tuple(map(Ref, places)), Ref(value.id)), ()), [result], diff, False)
        if not fits:  # or nobody has looked: a column more takes what is too long
            self._cut(self._known.add(shape, result.dtype, diff), width)
        return True

    def _cut(self, wider: Value, width: int) -> None:
        """Let the result of the last call be a part of what was made in it."""
        index, made_by = self._log.count - 1, self._known.made_by
        last = self._log.entries[index]
        self._log.entries[index] = replace(last, outs=(wider.id,))
        made_by[wider.id] = index
        made_by.update({out: index + 1 for out in last.outs if out is not None})
        self._log.number(replace(last, op=SLICE, args=(Ref(wider.id), 1, 0, width), outs=last.outs), not wider.diff)

    def _data(self, tensor: Tensor) -> int:
        value = self._known.leaf(tensor)
        value.leaf = Leaf(value.id, None, "data", False)
        self._log.read.append(value.id)
        return value.id

    def _pointwise(self, operator: Operator, args: tuple[Any, ...], result: Tensor) -> bool:
        made, noted = unwrapped(result), list[Arg]()
        if made is None or not is_plain(made) or operator.mutable or flow_of(operator.overload) is not Flow.POINTWISE:
            return False
        self._log.read.clear()
        for arg in args:
            inner = unwrapped(arg) if isinstance(arg, Tensor) else None
            if inner is None:
                if not (arg is None or isinstance(arg, (bool, int, float))):
                    return False
                noted.append(arg)
            elif is_plain(inner) and (inner.shape == made.shape if arg.is_nested else not inner.dim()):
                value = self._find(inner) or (self._packed(inner, arg.requires_grad) if arg.is_nested else self._leaf(inner))
                self._log.read.append(value.id)
                noted.append(Ref(value.id))
            else:
                return False
        diff = not operator.ends and self._log.flows(self._log.read)
        for out in self._log.append(operator.overload, (tuple(noted), ()), [made], False, operator.view):
            if out is not None:
                self._known.by_id[out].diff = diff  # its history is the wrapper's
        return True

    def _packed(self, inner: Tensor, diff: bool) -> Value:
        """What was packed, as a leaf: some call on jagged tensors has made it, or it came with the batch."""
        value = self._known.leaf(inner)
        value.diff = torch.is_grad_enabled() and diff
        value.leaf = Leaf(value.id, None, "opaque" if diff else "data", value.diff, "NestedTensor" if diff else "")
        return value


_ADDED_UP = SUMS | MEANS | TOPS
