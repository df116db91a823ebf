"""What the op of an origin computed, as arithmetic that holds: with numbers where one element is made of one, without where of many.

exp(200) = +inf
sum(…) = +inf
mm(…) = +inf, a sum of products of numbers up to 3e+38 and 0.89
"""

from __future__ import annotations

from nanscope.program.ops import BATCH_NORMS, FLOW, MEAN_LOSSES, SCALED, Flow
from nanscope.snapshot.observation import STOOD_IN, Origin
from nanscope.text import number

SHOWN = 4  # operands


def calculation(origin: Origin) -> str:
    """Return what the op made of its operands, "" where none are known."""
    flow, result = FLOW.get(origin.op), number(origin.value)
    if not origin.operands:
        return ""
    if flow is Flow.MATMUL and len(origin.operands) > 1:
        left, right = (number(abs(value)) for _, value in origin.operands[-2:])
        return f"{origin.op}(…) = {result}, a sum of products of numbers up to {left} and {right}"
    if origin.op in BATCH_NORMS:
        ((name, value),) = origin.operands
        return f"{origin.op}(…, {name} {number(value)}) = {result}"
    if flow is not Flow.POINTWISE or origin.op in MEAN_LOSSES or len(origin.operands) > SHOWN:
        return f"{origin.op}(…) = {result}"
    plain = SCALED.get(origin.op, SHOWN)
    args = [
        name if name == STOOD_IN else number(value) if at < plain else f"{name} {number(value)}"
        for at, (name, value) in enumerate(origin.operands)
    ]
    return f"{origin.op}({', '.join(args)}) = {result}"
