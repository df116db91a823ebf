"""Which of the tensors that a program reads were computed from others of them, by code that is not in the program.

`hard = criterion(logits, labels)` runs inside a module, and the loss reads both `hard` and `logits`: what autograd gives for `logits` is
then more than the program alone can make, and is no measure of a replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def feeding(tensors: Mapping[int, Tensor]) -> set[int]:
    """Return the ids of tensors from which another one was computed, as autograd's graph tells."""
    wanted = {(tensor.grad_fn, tensor.output_nr): name for name, tensor in tensors.items() if tensor.grad_fn is not None}
    leaves = {id(tensor): name for name, tensor in tensors.items() if tensor.requires_grad and tensor.grad_fn is None}
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors.values() if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for nearer, position in node.next_functions:
            if nearer is None:
                continue
            known = wanted.get((nearer, position))
            if known is None and hasattr(nearer, "variable"):
                known = leaves.get(id(nearer.variable))
            if known is not None:
                found.add(known)
            waiting.append(nearer)
    return found
