"""How a matrix is kept from the points where its decomposition, or the gradient of that, has no number."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nanscope.program.calls import Leaf, Ref
from nanscope.program.ops import MATRIX_OF
from nanscope.replay.patch import Insert, Patch, Variant, before


def apart(patch: Patch) -> Variant | None:
    """Add small numbers, no two alike, to a diagonal: the same number for all would move all eigenvalues alike."""
    position = MATRIX_OF.get(patch.op, 0)
    value = patch.operand(position)
    if value is None or patch.values[value].dim() < 2:
        return None
    content, mark = patch.values[value], patch.program.new_id()
    size = torch.finfo(content.dtype).eps ** 0.5 * max(float(content.abs().max()), torch.finfo(content.dtype).eps)
    program = replace(patch.program, leaves=(*patch.program.leaves, Leaf(mark, "jitter", "data", False)))
    added: list[Insert] = [("aten.add.Tensor", (Ref(-1), Ref(mark)))]
    label = f"add numbers around {size:.1g}, no two alike, to the diagonal of {patch.called(value)} before {patch.acting.removeprefix('_')}"
    tensors = {**patch.tensors, mark: _jitter(content, size)}
    return Variant("avoid_singular_op", label, before(patch.edited(program), position, added), tensors)


def _jitter(content: Tensor, size: float) -> Tensor:
    rows, columns = content.shape[-2:]
    steps = torch.arange(1, min(rows, columns) + 1, dtype=torch.float64).sqrt()  # of no two pairs the sum is the same
    jitter = torch.zeros(rows, columns, dtype=torch.float64)
    jitter.diagonal().copy_(steps * size)
    return jitter.to(content.device, content.dtype)
