"""Noise on a value of a recorded program: a leaf that is added to it, for everybody who reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Leaf, Ref, substitute
from nanscope.replay.patch import Variant

SEED = 0


def noise_for(tensor: Tensor, variance: float, seed: int = SEED) -> Tensor:
    """Return normal noise for a value of a batch: one number a row where there are rows, else one an element. In float64."""
    per_row = tensor.dim() > 1 and tensor.shape[0] > 1
    shape = (tensor.shape[0], *(1,) * (tensor.dim() - 1)) if per_row else tuple(tensor.shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * math.sqrt(variance)


def noisy(trace: Trace, values: Sequence[int], variance: float, label: str, seed: int = SEED) -> Variant:
    """Return the program with noise on some values, each number of it drawn with a seed, in the value's own dtype."""
    program, tensors = trace.program, trace.tensors
    for place, value in enumerate(values):
        content = trace.values[value]
        noise = noise_for(content, variance, seed + place).to(content.device, content.dtype)
        if value in tensors:
            tensors[value] = tensors[value] + noise
            continue
        leaf, total = program.new_id(), program.new_id() + 1
        at = program.producers[value] + 1
        calls, mapping = program.calls, {value: total}
        like = calls[at - 1]
        rest = (
            replace(
                call,
                args=tuple(substitute(arg, mapping) for arg in call.args),
                kwargs=tuple((name, substitute(arg, mapping)) for name, arg in call.kwargs),
            )
            for call in calls[at:]
        )
        added = Call("aten.add.Tensor", (Ref(value), Ref(leaf)), (), (total,), like.site, like.grad, like.module)
        leaves = (*program.leaves, Leaf(leaf, "noise", "data", False))
        program = replace(program, leaves=leaves, calls=(*calls[:at], added, *rest))
        tensors[leaf] = noise
    return Variant("advantage_noise", label, program, tensors)
