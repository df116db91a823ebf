"""How the elements of a value lie in memory: in what order, with or without gaps, over each other, or in that of another value."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.entries import Value
from nanscope.program.local import is_plain


def memory_order(value: Value) -> tuple[int, ...]:
    """The dimensions of a value from the slowest to the fastest in memory."""
    _, shape, stride, _, _ = value.key
    return tuple(sorted(range(len(shape)), key=lambda n: (-stride[n], -shape[n], n)))


def is_turned(value: Value) -> bool:
    """Do the dimensions of a value lie in another order than they are counted in?"""
    return memory_order(value) != tuple(range(len(value.shape)))


def is_dense(value: Value) -> bool:
    """Does a value lie without gaps, in whatever order of dimensions?"""
    _, shape, stride, _, _ = value.key
    size = 1
    for n in reversed(memory_order(value)):
        if shape[n] != 1 and stride[n] != size:
            return False
        size *= shape[n]
    return True


def covers(value: Value, storage: Any) -> bool:
    """Does a value lie in all of its memory, without gaps?"""
    pointer, shape, _, dtype, _ = value.key
    return bool(pointer == storage.data_ptr() and math.prod(shape) * dtype.itemsize == storage.nbytes()) and is_dense(value)


def overlaps(value: Value) -> bool:
    """Are several elements of a value one memory, as those of an expanded row are? What is written into one of them stands in all."""
    _, shape, stride, _, _ = value.key
    reach = 0  # elements between the first and the last of the dimensions so far
    for n in reversed(memory_order(value)):
        if shape[n] > 1:
            if stride[n] <= reach:
                return True
            reach += (shape[n] - 1) * stride[n]
    return False


def meet(one: Value, other: Value) -> bool:
    """Do two values share any element of the memory that both are a part of?"""
    item = one.dtype.itemsize
    ends = [v.key[0] + item * (1 + sum((n - 1) * step for n, step in zip(v.shape, v.key[2], strict=True))) for v in (one, other)]
    if 0 in one.shape or 0 in other.shape or one.key[0] >= ends[1] or other.key[0] >= ends[0]:
        return False
    if other.dtype.itemsize != item or (one.key[0] - other.key[0]) % item:
        return True
    first = min(one.key[0], other.key[0])
    taken = torch.zeros((max(ends) - first) // item, dtype=torch.bool, device="cpu")
    parts = [taken.as_strided(v.shape, v.key[2], (v.key[0] - first) // item) for v in (one, other)]
    parts[0].fill_(True)
    return bool(parts[1].any())


def lie_apart(one: Value, other: Value) -> bool:
    """Do two values lie beside each other along one dimension, as the pieces of a split do? False does not say that they meet."""
    if one.key[2] != other.key[2] or one.dtype is not other.dtype:
        return False
    low, high = sorted((one, other), key=lambda value: value.key[0])
    apart, odd = divmod(high.key[0] - low.key[0], one.dtype.itemsize)
    return not odd and any(_are_pieces(low, high, apart, dim) for dim in range(len(one.shape)))


def _are_pieces(low: Value, high: Value, apart: int, dim: int) -> bool:
    """Does one begin in a dimension where the other has ended, and before the next row of it begins? apart: elements of memory."""
    stride = low.key[2]
    step = stride[dim]
    if not step or apart % step or apart // step < low.shape[dim]:
        return False
    within = 1 + sum((max(low.shape[n], high.shape[n]) - 1) * other for n, other in enumerate(stride) if n != dim and other < step)
    both = apart + high.shape[dim] * step
    return within <= step and all(other < step or other >= both for n, other in enumerate(stride) if n != dim)


def copy_of(value: Value, content: Tensor) -> Tensor:
    """Return a copy that lies as the original does, if that takes no more memory: the order in which a sum adds is that of memory."""
    _, shape, stride, _, _ = value.key
    if not overlaps(value):
        return content.detach().clone()
    reach = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return content.detach().as_strided((reach,), (1,)).clone().as_strided(shape, stride)


def first_row(whole: Tensor, part: Tensor) -> int | None:
    """Return the row of one tensor with which another one begins that is some rows of it in a sequence, None for any other."""
    if not is_plain(part) or (part.shape[1:], part.stride(), part.dtype) != (whole.shape[1:], whole.stride(), whole.dtype):
        return None
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() or not whole.stride(0):
        return None
    start, rest = divmod(int(part.storage_offset()) - int(whole.storage_offset()), whole.stride(0))
    return start if not rest and 0 <= start <= len(whole) - len(part) else None
