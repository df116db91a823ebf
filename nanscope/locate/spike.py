"""What made a step huge although everything in it is finite: the call that made something large out of what was not."""

from __future__ import annotations

import math

from torch import Tensor

from nanscope.locate.backward import DEEP
from nanscope.locate.describe import crossing_at, element_at, phase_of
from nanscope.locate.origin import Location
from nanscope.locate.trace import Spot, Trace
from nanscope.program.calls import Call
from nanscope.program.flow import sources
from nanscope.program.numbers import at
from nanscope.snapshot.observation import Phase

JUMP = 1e3  # a call whose result is this much larger than anything it reads makes a spike


def spike(trace: Trace) -> Location | None:
    """Return what made a step huge, None if nothing stands out.

    Follows the largest contribution back to the call that made something large out of what was not, or to where it came in.
    trace: with what every backward returned.
    """
    value = trace.program.output
    path = [(value, _largest(trace.values[value]))]
    for _ in range(DEEP):
        call = trace.program.maker(path[-1][0])
        top = _largest_source(trace, call, path[-1]) if call is not None else None
        if top is None:
            break
        value, flat = path[-1]
        size, spot = top
        if size * JUMP < abs(at(trace.values[value], flat)):
            return _found(trace, path, fed=False)
        path.append(spot)
    value, flat = path[-1]
    return _found(trace, path, fed=True) if abs(at(trace.values[value], flat)) > JUMP else _steepest(trace)


def _found(trace: Trace, path: list[Spot], *, fed: bool) -> Location:
    element = element_at(trace, *path[-1], fed=fed)
    phase = phase_of(trace, element, Phase.INPUT) if fed else Phase.FORWARD
    return Location(phase, element, tuple(crossing_at(trace, *spot) for spot in reversed(path)))


def _largest_source(trace: Trace, call: Call, spot: Spot) -> tuple[float, Spot] | None:
    """The largest of the elements that an element came from, with its magnitude; None if it came from no number."""
    read = []
    for source in sources(call, trace.values, *spot):
        content = trace.values[source.value].flatten()
        if content.is_floating_point() and source.flat.numel():
            best = int(source.flat[_largest(content[source.flat])])
            read.append((abs(float(content[best])), (source.value, best)))
    return max(read, default=None)


def _steepest(trace: Trace) -> Location | None:
    """The call whose backward made its gradient larger by the largest factor."""
    found: tuple[float, int, Tensor] | None = None
    for index, returned in trace.run.returned.items():
        outs = [out for out in trace.program.calls[index].outs if out is not None]
        received = [trace.run.grads[out] for out in outs if out in trace.run.grads]
        came = max((float(g.abs().max()) for g in received if g.numel()), default=0.0)
        for grad in returned:
            if grad is not None and grad.numel() and came > 0:
                factor = float(grad.abs().max()) / came
                if math.isfinite(factor) and (found is None or factor > found[0]):
                    found = (factor, outs[0], grad)
    if found is None or found[0] < JUMP:
        return None
    _, out, grad = found
    spot = (out, _largest(grad) if grad.shape == trace.values[out].shape else 0)
    return Location(Phase.BACKWARD, element_at(trace, *spot), (crossing_at(trace, *spot),))


def _largest(tensor: Tensor) -> int:
    return int(tensor.detach().flatten().double().abs().argmax())
