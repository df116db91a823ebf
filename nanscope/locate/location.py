"""Finds the first harmful non-finite value: an exact walk, element by element, from the harm back to where it was born.

Two walks. Forward harm: the loss is non-finite, so go from the loss to whoever made the first bad contributor. Backward harm: the loss
is finite and a gradient is not, so go from the bad gradient towards the loss until the gradient that comes in is still finite; that
call made it, and its forward operands say why.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from nanscope.locate.backward import walk_gradient, why
from nanscope.locate.describe import crossing_at, element_at, phase_of
from nanscope.locate.forward import (
    Birth,
    Root,
    bad_sources,
    first_alike,
    first_that_counts,
    flipped_weight,
    is_intended,
    walk_back,
    where_it_was_put,
)
from nanscope.locate.origin import Crossing, Element, Location
from nanscope.locate.trace import Trace
from nanscope.program.calls import Computes
from nanscope.program.numbers import at, first_nonfinite
from nanscope.program.ops import CLAMPS, SELECTORS, Flow, flow_of
from nanscope.snapshot.observation import Phase

_PHASES = {Computes.GRADIENT: Phase.BACKWARD, Computes.UPDATE: Phase.OPTIMIZER, Computes.ACTIVATION: Phase.FORWARD}


def locate(trace: Trace) -> Location | None:
    """Return the origin of the harm that a run shows, None if its output and all gradients are finite.

    trace: with what every backward returned.
    """
    program, grads = trace.program, trace.run.grads
    flat = first_nonfinite(trace.values[program.output])
    if flat is not None:
        return _forward(trace, _worst(trace.values[program.output]) if program.computes is Computes.ACTIVATION else flat)
    bad = (leaf.id for leaf in program.leaves if leaf.diff and leaf.id in grads and first_nonfinite(grads[leaf.id]) is not None)
    first = next(bad, None)
    return None if first is None else _backward(trace, first)


def _forward(trace: Trace, flat: int, alike: bool = True) -> Location:
    walked = walk_back(trace, trace.program.output, flat)
    root = flipped_weight(trace, walked) or where_it_was_put(
        trace, first_that_counts(trace, first_alike(trace, walked)) if alike else walked
    )
    origin = element_at(trace, root.value, root.flat, fed=root.birth is Birth.FED)
    if root.path == walked.path and origin.masked:
        origin = _as_it_came(origin)
    chain = tuple(crossing_at(trace, *spot) for spot in reversed(root.path))
    phase = _PHASES.get(trace.program.computes) or phase_of(trace, origin, Phase.FORWARD)
    if origin.given is not None and trace.program.computes is not Computes.UPDATE:  # there it is a setting
        phase, origin = Phase.INPUT, replace(origin, masked=None, drops=())  # all that is calculated with it is NaN
    return Location(phase, origin, chain, *_other(trace, root))


def _as_it_came(origin: Element) -> Element:
    """Of an element that has come to the loss: some ways leave it out, as an index that does not select it. It has come by another, where a
    mask multiplies it by 0, or nothing was to hold it."""
    if all(drop.how == "select" for drop in origin.drops):
        return replace(origin, masked=False, drops=())
    return replace(origin, drops=tuple(sorted(origin.drops, key=lambda drop: drop.how != "mask")))


def _backward(trace: Trace, leaf: int) -> Location:
    path, spot = walk_gradient(trace, leaf)
    root = why(trace, *spot)
    origin = element_at(trace, root.value, root.flat, fed=root.birth is Birth.FED, via=spot[0])
    forth = tuple(crossing_at(trace, *crossed) for crossed in reversed(root.path))
    back = tuple(crossing_at(trace, *crossed, backward=True) for crossed in reversed(path))
    return Location(phase_of(trace, origin, Phase.BACKWARD), origin, (*forth, *back), *_other(trace, root))


def _other(trace: Trace, root: Root) -> tuple[Crossing | None, int]:
    """Where else something was born bad, and which link of the chain was made of both."""
    if not root.other:
        return None, 0
    met = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(root.path, root.other, strict=False)))
    return crossing_at(trace, *root.other[-1]), len(root.path) - met


def located(trace: Trace, flat: int) -> Location:
    """Return the origin of one element of what a program ends in."""
    return _forward(trace, flat, alike=False)


def spotted(trace: Trace) -> Location | None:
    """Return the first overflow, invalid or divide-by-zero of a forward pass that did no harm, None if there is none.

    Only values that were born from finite operands count: what is infinite on purpose is not worth a word. If there is none, an infinity
    of the batch that counts and was clamped.
    """
    for call in trace.program.calls:
        if flow_of(call.op) in (Flow.MOVE, Flow.CREATE) or call.name in SELECTORS:
            continue
        for out in call.outs:
            flat = first_nonfinite(trace.values[out]) if out is not None else None
            if out is None or flat is None or bad_sources(trace, call, out, flat) or is_intended(trace, call):
                continue
            return Location(Phase.FORWARD, element_at(trace, out, flat), ())
    return _bounded(trace)


def _bounded(trace: Trace) -> Location | None:
    """Return an infinity that came in, counts, and has become the bound of a clamp: the token trains with a number that nobody has seen."""
    for call in trace.program.calls:
        value, out = (next(call.inputs(), None), call.outs[0]) if call.name in CLAMPS else (None, None)
        flat = first_nonfinite(trace.values[value]) if value is not None else None
        if value is None or out is None or flat is None or is_masked(trace, out, flat):
            continue
        root = walk_back(trace, value, flat)
        if root.birth is Birth.FED and math.isfinite(at(trace.values[out], flat)):
            return Location(Phase.INPUT, element_at(trace, root.value, root.flat, fed=True), (crossing_at(trace, out, flat),))
    return None


def is_masked(trace: Trace, value: int, flat: int) -> bool | None:
    """Is an element outside the loss? None where nothing selects."""
    return trace.drops.of(value, flat)[0]


def came_in(trace: Trace, value: int, flat: int) -> Location:
    """Return the location of an element that came into the program bad, and did its harm in the backward of what made it."""
    return Location(Phase.BACKWARD, element_at(trace, value, flat, fed=True), (crossing_at(trace, value, flat),))


def left_behind(trace: Trace, flat: int) -> Location:
    """Return the location of an element that forward made, and that did its harm in the backward of what had read it."""
    return Location(Phase.BACKWARD, element_at(trace, trace.program.output, flat), ())


def _worst(tensor: Tensor) -> int:
    """The first NaN, else the first +inf, else the first −inf: among values of a model −inf is most often a mask."""
    values = tensor.detach().flatten()
    for bad in (torch.isnan(values), values == math.inf, values == -math.inf):
        if bool(bad.any()):
            return int(bad.int().argmax())
    return 0
