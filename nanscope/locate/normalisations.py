"""What normalisations divide by: the spread, or the size, of their own operand, and their eps. Where both are 0, they have no number.

layer_norm(x), group_norm(x)     of numbers that are all alike         rms_norm(x), weight_norm(v, g)     of numbers that are all 0
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nanscope.program.calls import Call
from nanscope.program.ops import WEIGHT_NORMS

_RECIPROCALS = {"_fused_rms_norm": 1, "native_group_norm": 2, "native_layer_norm": 2}  # the result that is 1 / what is divided by


def is_flat(call: Call, values: Mapping[int, Tensor]) -> bool:
    """Does a normalisation divide by 0?"""

    def is_somewhere(value: int | None, number: float) -> bool:
        return value is not None and value in values and bool((values[value] == number).any())

    if call.name in WEIGHT_NORMS:
        return is_somewhere(call.outs[1], 0)
    return call.name in _RECIPROCALS and is_somewhere(call.outs[_RECIPROCALS[call.name]], float("inf"))
