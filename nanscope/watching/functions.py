"""Of a custom autograd function whose backward was run once more: where it went wrong, and whether the loss counts that element."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from nanscope.capture.custom import Backward, Repeated
from nanscope.locate.location import is_masked, located
from nanscope.locate.origin import Location
from nanscope.locate.trace import Spot, Trace
from nanscope.program.calls import Computes
from nanscope.program.flow import sources
from nanscope.program.local import local
from nanscope.program.numbers import at, first_nonfinite, is_finite
from nanscope.program.program import Program, join
from nanscope.snapshot.observation import UNSEEN, Observation
from nanscope.text import ravel
from nanscope.watching.recording import Recording


def is_unwritten(location: Location) -> bool:
    """Does a walk end in memory that nobody has written?"""
    return location.origin.leaf is not None and location.origin.leaf.made_by == "empty"


def function_walked(recording: Recording, again: Repeated) -> tuple[Trace, Location]:
    """Return the walk through a backward, and on through the forward that saved what it reads. Where it differentiates something itself,
    what that is weighted by may have been bad."""
    assert again.program is not None
    trace, location = _walked(recording, again, again.program, again.tensors, again.flat)
    led = again.seeds.get(location.origin.leaf.id) if location.origin.leaf is not None else None
    return (trace, location) if led is None else _walked(recording, again, *led, None)


def _walked(
    recording: Recording, again: Repeated, program: Program, tensors: Mapping[int, Tensor], flat: int | None
) -> tuple[Trace, Location]:
    """flat: the element of the result that is bad, None for the first one."""
    tensors = dict(tensors)
    for leaf in program.leaves:
        glue = recording.made_within.get(again.places[leaf.id]) if not bool(is_finite(tensors[leaf.id])) else None
        if glue is not None and glue.is_whole():
            program = join([glue.leading_to(leaf.id), program]).slice()
            tensors |= glue.tensors
    program = replace(program, computes=Computes.GRADIENT)
    trace = Trace.of(program, {leaf.id: tensors[leaf.id] for leaf in program.leaves}, backward=False)
    return trace, located(trace, (first_nonfinite(trace.values[program.output]) or 0) if flat is None else flat)


def counted(recording: Recording, found: Backward, again: Repeated, location: Location, within: Trace | None) -> Observation:
    """Return whether the loss counts the element whose gradient went bad: by the element of the function's result that it belongs to, and
    where that is not known, by the gradient which came to it."""
    result = recording.tensors.get(found.leaf)
    if result is not None and recording.program is not None and result.numel() == math.prod(location.origin.shape):
        trace = Trace.of(recording.program, recording.tensors, backward=False)
        return Observation(masked=is_masked(trace, found.leaf, location.origin.flat))
    spot = _gradient_of(again, location, within) if within is not None else None
    if spot is None or within is None:
        return by_received(found, location.origin.shape, location.origin.flat)
    if result is not None and recording.program is not None and result.shape == within.values[spot[0]].shape:
        trace = Trace.of(recording.program, recording.tensors, backward=False)
        return Observation(masked=is_masked(trace, found.leaf, spot[1]))
    return Observation(masked=at(within.values[spot[0]], spot[1]) == 0)


def by_received(found: Backward, shape: tuple[int, ...], flat: int) -> Observation:
    """Return whether the loss counts an element of an argument, by the gradient that came to the result in the same place or row."""
    came = [part for grad in found.received if grad is not None and (part := local(grad)) is not None and part.dim()]
    alike = next((part for part in came if part.shape == shape[: part.dim()]), None)
    return UNSEEN if alike is None else Observation(masked=at(alike, flat // math.prod(shape[alike.dim() :])) == 0)


def _gradient_of(again: Repeated, location: Location, trace: Trace) -> Spot | None:
    """The element of a gradient that came in which the first call reads that the harm meets on its way out."""
    for crossed in location.chain:
        flat = ravel(crossed.index, trace.values[crossed.value_id].shape)
        own = [spot for spot in _made_of(trace, (crossed.value_id, flat)) if spot[0] in again.grads]
        if own:
            return own[0]
    return None


def _made_of(trace: Trace, spot: Spot) -> list[Spot]:
    """The elements that an element was made of one by one, as far back as that goes."""
    found: list[Spot] = []
    waiting, seen = [spot], {spot}
    while waiting and len(seen) < BACK:
        value, flat = waiting.pop()
        call = trace.program.maker(value)
        read = sources(call, trace.values, value, flat) if call is not None else []
        following = [(source.value, int(source.flat[0])) for source in read if source.flat.numel() == 1]
        found += [(value, flat)] if call is None else []
        waiting += [one for one in following if one not in seen]
        seen.update(following)
    return found


BACK = 256  # elements that are gone through from one back to a gradient
