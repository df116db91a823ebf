"""What around an origin is worth knowing when its cause is named."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nanscope.program.numbers import smallest
from nanscope.program.ops import base_name
from nanscope.program.program import Program


def vanishing_eps(program: Program, values: Mapping[int, Tensor], index: int) -> dict[tuple[int, int], float]:
    """Return the numbers of the code, on the way into a call, that the dtype they meet cannot hold.

    An epsilon that rounds to 0, or a bound next to 1 that rounds to 1: (call, argument) → what to write there instead.
    """
    producers = program.producers()
    found: dict[tuple[int, int], float] = {}
    stack, seen = [(index, 0)], set[int]()
    while stack:
        current, depth = stack.pop()
        if current in seen or depth > 6:
            continue
        seen.add(current)
        call = program.calls[current]
        dtype = next((values[v].dtype for v in call.inputs() if values[v].is_floating_point()), None)
        if dtype is not None and base_name(call.op) in ("add", "sub", "rsub", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"):
            for position, arg in enumerate(call.args):
                if isinstance(arg, float) and math.isfinite(arg):
                    held = float(torch.tensor(arg, dtype=dtype))
                    if arg != 0 and held == 0:
                        found[(current, position)] = math.copysign(smallest(dtype), arg)
                    elif abs(arg) != 1 and abs(held) == 1:
                        found[(current, position)] = math.copysign(1 - torch.finfo(dtype).eps, arg)
        stack += [(producers[v], depth + 1) for v in call.inputs() if v in producers]
    return found
