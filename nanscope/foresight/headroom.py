"""Where the exponents of a loss were going when its step was saved, as the step's own history tells.

81.3 nats left at masked tokens, 1.6 fewer each step: none in about 51 steps
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nanscope.foresight.aims import is_masked
from nanscope.locate.trace import Trace
from nanscope.program.calls import Call
from nanscope.program.numbers import exponent_limit
from nanscope.program.ops import EXPONENTIALS
from nanscope.snapshot.history import Entry
from nanscope.snapshot.trend import WINDOWS, Trend, approach
from nanscope.text import count, number

FEW = 32  # of the largest elements of an exponent, in search of one of a kind


def headroom_of(trace: Trace, history: Sequence[Entry], call: int | None, masked: bool) -> str:
    """Return how much headroom the steps before left to a call that raises e to something, and where that was going; "" where nobody knows.

    trace: of the healthy step. call: in which the harm is to come. masked: at tokens that the loss does not count. The history has the
    largest exponent of all that a loss has, in nats, so it tells only of the call that has that in this step.
    """
    own = None if call is None else _largest(trace, trace.program.calls[call], masked)
    others = (_largest(trace, other, masked) for other in trace.program.calls)
    if own is None or own[0] < max(other[0] for other in others if other is not None):
        return ""
    largest: dict[float, float] = {}  # of several updates in a step the largest
    for entry in history:
        value = entry.log_ratio_max_masked if masked else entry.log_ratio_max
        if value is not None and math.isfinite(value):
            largest[float(entry.step)] = max(value, largest.get(entry.step, value))
    points = sorted(largest.items())[-WINDOWS[-1] :]
    if len(points) < WINDOWS[0]:
        return ""
    trend, found = Trend.of(points), approach(points, own[1])
    left = f"{number(own[1] - points[-1][1])} nats left at {'masked' if masked else 'counted'} tokens"
    if found is not None:
        return f"{left}, {number(found.slope)} fewer each step: none in about {count(round(found.steps), 'step')}"
    if trend.low > 0 or trend.high < 0:
        return f"{left}, {number(abs(trend.slope))} {'fewer' if trend.slope > 0 else 'more'} each step"
    return f"{left}, and no trend over {count(len(points), 'step')}"


def _largest(trace: Trace, call: Call, masked: bool) -> tuple[float, float] | None:
    """The largest exponent of a call at tokens of one kind, and the one at which it overflows; None if it has none."""
    exponent = next(call.inputs(), None) if call.name in EXPONENTIALS and not call.module else None
    content = None if exponent is None else trace.values[exponent]
    if exponent is None or content is None or not content.is_floating_point() or not content.numel():
        return None
    top = torch.topk(content.detach().flatten().double(), min(FEW, content.numel()))
    for value, flat in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        if (is_masked(trace, exponent, flat) is True) is masked:
            return value, exponent_limit(content.dtype)
    return None
