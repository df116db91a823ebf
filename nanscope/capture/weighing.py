"""What calls that wait weigh: bytes that are held for them alone, and what stands for what cannot be counted in bytes."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor
from torch.nn import Parameter

from nanscope.torch_inside import base_of

WEIGHT = 4  # of what may be held all that waits, read or made, may weigh a sixteenth, as a power of 2
CALL = 1 << 10  # bytes that a call weighs by itself
LIGHT = 1 << 21  # bytes of a tensor that waits; a larger one is held for no longer than it takes to understand the call
WHOLE = 1 << 22  # and of the memory that a view which waits is a part of
ANYWAY = 8  # times as much may wait of what lasts for a step anyway
GRAPH = 1 << 20  # bytes that stand for the graph of an argument that no waiting call has made: it may keep the activations of a model
SMALL_GRAPH = 1 << 16  # and of a small one: a step of its makes as many calls beside it


def graph_of(parameters: int) -> int:
    """Return what stands for the graph of models that hold so many bytes of parameters."""
    return min(max(parameters, SMALL_GRAPH), GRAPH)


def held_for(tensor: Tensor, lasting: bool, others: Container[int], graph: int = GRAPH) -> int:
    """Return the bytes that are held for an argument which no other waiting call holds, −1 if it cannot wait. lasting: see `Operator`.
    others: tensors that other calls hold, by identity. graph: see `graph_of`."""
    wanted = tensor.requires_grad
    if type(tensor) is Parameter or (lasting and not wanted):  # which the model holds, too; but not for ever, where no step comes
        if tensor.layout is not torch.strided or tensor.is_nested:
            return -1
        return 0 if type(tensor) is Parameter else tensor.nbytes // ANYWAY
    size = size_of(tensor)
    base = base_of(tensor) if size >= 0 else None
    if base is not None:
        whole = 0 if id(base) in others else tensor.untyped_storage().nbytes()
        size = whole if whole <= WHOLE else -1
    return size + graph if size >= 0 and wanted and not tensor.is_leaf else size


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor, −1 if it cannot wait."""
    size = tensor.nbytes
    if size > LIGHT or tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype.is_complex:
        return -1
    return size
