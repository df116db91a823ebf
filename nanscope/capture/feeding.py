"""What stands behind the tensors that a program reads, in autograd's graph: others of them, and parameters that the program does not read.

`hard = criterion(logits, labels)` runs inside a module, and the loss reads both `hard` and `logits`: what autograd gives for `logits` is
then more than the program alone can make, and is no measure of a replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from nanscope.program.program import Program


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


NEAR = 64  # calls that are gone through


def parameters_behind(program: Program, tensors: Mapping[int, Tensor]) -> dict[int, nn.Parameter]:
    """Return the parameters close behind what calls made that nobody recorded, by identity: no module, and maybe no optimizer, has them."""
    hidden = [tensors[leaf.id] for leaf in program.leaves if leaf.diff and leaf.origin in ("opaque", "cut")]
    waiting: list[Any] = [tensor.grad_fn for tensor in hidden if tensor.grad_fn is not None]
    seen: set[Any] = set()
    found: dict[int, nn.Parameter] = {}
    while waiting and len(seen) < NEAR:
        node = waiting.pop(0)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            found[id(variable)] = variable
        if node not in seen:
            seen.add(node)
            waiting += [nearer for nearer, _ in node.next_functions if nearer is not None]
    return found
