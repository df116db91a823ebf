"""Fewer rows, tokens, classes: a program on some indices of one of its dimensions, with the sizes that stand in its calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanscope.program.calls import Arg, Call
from nanscope.program.ops import CUTTINGS, ROW_NORMS, SIZED, Flow, flow_of
from nanscope.reproduce.alike import Case
from nanscope.reproduce.dimensions import Dimensions, Label

Kept = dict[int, Sequence[int]]  # by dimension, the indices that stay


def cut(case: Case, values: Mapping[int, Tensor], dimensions: Dimensions, atom: int, keep: Sequence[int], *, renumber: bool) -> Case:
    """Return the program on some indices of a dimension, and on those that are sliced from it.

    values: of a run. renumber: whole numbers that come in are places in that dimension, and are counted anew; those that are gone are 0.
    """
    kept = _with_slices(case, dimensions, {atom: keep})
    places = {old: new for new, old in enumerate(keep)}
    tensors = {}
    for leaf in case.program.leaves:
        tensor = _taken(case.tensors[leaf.id], dimensions, dimensions.of(leaf.id), kept)
        if renumber and _are_places(tensor, dimensions.size(atom)):
            tensor = torch.tensor([places.get(int(n), 0) for n in tensor.flatten()], dtype=tensor.dtype).reshape(tensor.shape)
        tensors[leaf.id] = tensor
    calls = tuple(_resized(call, values, dimensions, kept) for call in case.program.calls)
    return Case(replace(case.program, calls=calls), tensors)


def _are_places(tensor: Tensor, size: int) -> bool:
    """May whole numbers be places in a dimension so long?"""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool or not tensor.numel():
        return False
    return int(tensor.min()) >= 0 and int(tensor.max()) < size


def _with_slices(case: Case, dimensions: Dimensions, kept: Kept) -> Kept:
    """What is cut from a dimension that is cut is cut, too: `logits[:, :-1]` beside `labels[:, 1:]`."""
    for _ in range(3):
        for call in case.program.calls:
            found = _slice_of(call, dimensions)
            if found is None:
                continue
            whole, part, start, stop = found
            if whole in kept and part not in kept:
                kept[part] = [n - start for n in kept[whole] if start <= n < stop]
            elif part in kept and whole not in kept:
                kept[whole] = [n + start for n in kept[part]]
    return kept


def _slice_of(call: Call, dimensions: Dimensions) -> tuple[int, int, int, int] | None:
    """The dimension that a call takes a stretch of, the one that this is, and where it begins and ends; None if it does not."""
    if call.name != "slice" or call.outs[0] is None or len(call.args) > 4:
        return None
    value = next(call.inputs(), -1)
    dim, start, stop = (*(arg if isinstance(arg, int) else None for arg in call.args[1:]), None, None, None)[:3]
    old, new = dimensions.of(value), dimensions.of(call.outs[0])
    place = (dim or 0) % max(len(old), 1)
    if len(old) != len(new) or not old or len(old[place]) != 1 or len(new[place]) != 1 or old[place] == new[place]:
        return None
    size = dimensions.size(old[place][0])
    first, last, _ = slice(start, stop).indices(size)
    return old[place][0], new[place][0], first, last


def _taken(tensor: Tensor, dimensions: Dimensions, labels: Sequence[Label], kept: Kept) -> Tensor:
    for place, label in enumerate(labels):
        if not any(atom in kept for atom in label):
            continue
        sizes = [dimensions.size(atom) for atom in label]
        inner = tensor.reshape(*tensor.shape[:place], *sizes, *tensor.shape[place + 1 :])
        for offset, atom in enumerate(label):
            if atom in kept:
                inner = inner.index_select(place + offset, torch.tensor(list(kept[atom]), dtype=torch.int64, device=tensor.device))
        many = math.prod(inner.shape[place : place + len(label)])
        tensor = inner.reshape(*inner.shape[:place], many, *inner.shape[place + len(label) :])
    return tensor


def _length(dimensions: Dimensions, label: Label, kept: Kept) -> int:
    return math.prod(len(kept[atom]) if atom in kept else dimensions.size(atom) for atom in label)


def _resized(call: Call, values: Mapping[int, Tensor], dimensions: Dimensions, kept: Kept) -> Call:
    out = call.outs[0] if call.outs else None
    if out is None or out not in values:
        return call
    if call.name == "_reshape_alias":  # it says strides, which are others now
        call = replace(call, op="aten.reshape.default", args=call.args[:2])
    if call.name in CUTTINGS:
        return _moved(call, dimensions, kept)
    labels, shape = dimensions.of(out), tuple(values[out].shape)
    if not any(atom in kept for label in labels for atom in label):
        return call
    if call.name == "arange":
        ends = [place for place, arg in enumerate(call.args[:2]) if type(arg) is int]
        size = _length(dimensions, labels[0], kept)
        return replace(call, args=tuple(size if [place] == ends[-1:] else arg for place, arg in enumerate(call.args)))
    if call.name in ROW_NORMS and isinstance(call.args[1], tuple) and len(labels) >= len(call.args[1]):
        last = len(labels) - len(call.args[1])
        normalised = tuple(_length(dimensions, label, kept) if label else 1 for label in labels[last:])
        return replace(call, args=(call.args[0], normalised, *call.args[2:]))
    if call.name in SIZED or flow_of(call.op) is Flow.CREATE:
        sizes = [_length(dimensions, label, kept) if label else 1 for label in labels]
        return replace(call, args=tuple(_sized(arg, shape, sizes) for arg in call.args))
    return call


def _sized(arg: Arg, shape: tuple[int, ...], sizes: Sequence[int]) -> Arg:
    if not isinstance(arg, tuple) or len(arg) != len(shape) or any(n not in (-1, m) for n, m in zip(arg, shape, strict=True)):
        return arg
    return tuple(n if n == -1 else size for n, size in zip(arg, sizes, strict=True))


def _moved(call: Call, dimensions: Dimensions, kept: Kept) -> Call:
    """The index or the stretch of a call, where some before it are gone."""
    labels = dimensions.of(next(call.inputs(), -1))
    numbers = [arg if isinstance(arg, int) else None for arg in call.args[1:]]
    if not labels or not numbers or numbers[0] is None:
        return call
    label = labels[numbers[0] % len(labels)]
    if len(label) != 1 or label[0] not in kept:
        return call
    keep, size = kept[label[0]], dimensions.size(label[0])
    if call.name == "select" and len(numbers) > 1 and numbers[1] is not None:
        index = numbers[1] % size
        return replace(call, args=(*call.args[:2], keep.index(index) if index in keep else len(keep)))  # out of range: it does not run
    if call.name == "slice" and len(call.args) < 5:
        first, last, _ = slice(*(*numbers[1:], None, None)[:2]).indices(size)
        if (first, last) != (0, size):
            return replace(call, args=(*call.args[:2], sum(n < first for n in keep), sum(n < last for n in keep)))
    return call
