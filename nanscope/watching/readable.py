"""Gradients and weights as this process can read them; what it cannot is told, and never asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanscope.program.local import local, unreadable


def readable(tensors: Sequence[Tensor], what: str, gap: Callable[[str, str], None]) -> list[Tensor]:
    """Return the part of each tensor that this process holds, an empty one where it cannot be read; `gap` is told of it. what: plural."""
    parts = [local(tensor) for tensor in tensors]
    lost = sum(part is None for part in parts)
    if lost:
        kinds = ", ".join(unreadable(tensors))
        gap("unreadable-tensors", f"{lost} of {len(parts)} {what}, which cannot be read ({kinds})")
    return [torch.zeros(0) if part is None else part for part in parts]
