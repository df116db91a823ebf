"""Which row and token of the batch an element is whose tensor is a piece of it, or lies otherwise.

    for lp, old, mask in zip(lps.split(2, 1), olds.split(2, 1), masks.split(2, 1)):    [1, 1] of [4, 2] is row 1, token 7
    ratio = (lp - old).flip(1).exp().flip(1) * mask                                      [1, 5] of [4, 8] is row 1, token 2
    ratio = torch.exp(log_ratio[order])                                                  [0, 2] of [4, 8] is row 3, token 2

The mask that it meets says so, which comes with the batch, and lies as that does; where there is none, what it was cut out of, on the way
of the gradient: what the policy was given is the batch. What is cut off once, as where tokens are shifted by one, is the batch from there
on; of several parts that have no element in common, each is a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nanscope.locate.trace import Spot, Trace
from nanscope.program.calls import Call
from nanscope.program.flow import dims_of, element_flow, origins, sources, spread
from nanscope.program.ops import ALL_SOFTMAXES, COPIES, PICKS_OF_EACH, REARRANGINGS, SLICES, SPLITS, Flow
from nanscope.roles import LOG_PROBS, Role
from nanscope.text import unravel

AHEAD = 32  # calls behind the origin that are gone through for a mask

_OF_TOKENS = LOG_PROBS | {Role.LOG_RATIO, Role.RATIO, Role.IS_WEIGHT, Role.KL, Role.ENTROPY, Role.MASK, Role.RESPONSE_IDS}


def row_and_token(trace: Trace, value: int, flat: int) -> tuple[int, ...] | None:
    """Return the row and the token that an element is, (), if it is somewhere else than its index says and nothing tells where; None if its
    index says it."""
    met, moved = _mask_beside(trace, value, flat)
    came = None if met is None else _as_it_came(trace, *met)
    if came is None:
        came, cut = _before_cut(trace, value, flat)
        if came is None or trace.values[came[0]].shape not in batches(trace, came[0]):
            return () if moved or cut else None
    shape, own = trace.values[came[0]].shape, trace.values[value].shape
    index = unravel(came[1], shape)
    return None if shape == own and index == unravel(flat, own) else index


def _mask_beside(trace: Trace, value: int, flat: int) -> tuple[Spot | None, bool]:
    """The element of a mask that an element meets, made with it, or on its way to the loss; and did it go to another place before that?"""
    made = trace.program.maker(value)
    way, seen, moved = [(value, flat, False)], {value}, False
    if made is not None and (met := _mask_of(trace, made, value)) is not None:
        return (met, flat), False
    while way and len(seen) < AHEAD:
        one, at, elsewhere = way.pop(0)
        moved |= elsewhere
        for call in trace.program.readers(one):
            if (met := _mask_of(trace, call, one)) is not None:
                return (met, at), moved
            for out, there, turned in _onward(call, trace.values, one, at):
                if out not in seen:
                    seen.add(out)
                    way.append((out, there, elsewhere or turned))
    return None, moved


def _mask_of(trace: Trace, call: Call, value: int) -> int | None:
    """The mask that a call puts to a value, element by element, or by which it picks some of them."""
    shape = trace.values[value].shape
    alike = (one for one in call.inputs() if one != value and trace.values[one].shape == shape)
    return next((one for one in alike if trace.names.says_mask(one) or trace.names.role(one) is Role.MASK), None)


def _onward(call: Call, values: Mapping[int, Tensor], value: int, flat: int) -> list[tuple[int, int, bool]]:
    """Where an element goes that stays one of its own: value, position, and is that another place in a tensor of the same size?"""
    flow = element_flow(call)
    if flow not in (Flow.POINTWISE, Flow.MOVE) or not all(values[one].is_floating_point() for one in call.inputs()):
        return []
    if flow is Flow.POINTWISE:
        return [(out, flat, False) for out in call.outs if out is not None and values[out].shape == values[value].shape]
    marked = torch.zeros(values[value].numel(), dtype=torch.bool)
    marked[flat] = True
    found = spread(call, values, {value: marked.reshape(values[value].shape)})
    there = [(out, mark.flatten().nonzero().flatten().tolist()) for out, mark in found.items()]
    return [(out, at[0], values[out].numel() == len(marked) and at[0] != flat) for out, at in there if len(at) == 1]


def _as_it_came(trace: Trace, value: int, flat: int) -> Spot | None:
    """The element of a mask where that is not cut into pieces yet, nor turned, and has rows and tokens."""
    found = None
    call = trace.program.maker(value)
    while True:
        shape = trace.values[value].shape
        if len(shape) == 2 and 1 not in shape:
            found = value, flat
        read = [] if call is None or not _is_cut(trace, call, value) else sources(call, trace.values, value, flat)
        if len(read) != 1 or len(read[0].flat) != 1:
            return found
        value, flat = read[0].value, int(read[0].flat[0])
        call = trace.program.maker(value)


def _before_cut(trace: Trace, value: int, flat: int) -> tuple[Spot | None, bool]:
    """The element of what an element was made of, one of the other, before that was cut into pieces or put in another order; and was it?"""
    found, cut = None, False
    for _ in range(AHEAD):
        call = trace.program.maker(value)
        flow = None if call is None or call.module else element_flow(call)
        if call is None or flow not in (Flow.POINTWISE, Flow.MOVE) or call.name in PICKS_OF_EACH:
            break
        if flow is Flow.POINTWISE:
            alike = [one for one in call.inputs() if trace.values[one].shape == trace.values[value].shape]
            floats = [one for one in alike if trace.values[one].is_floating_point()]
            value = next((one for one in floats if trace.names.carried(one)), next(iter(floats), -1))
            if value == -1:
                break
            continue
        read = sources(call, trace.values, value, flat)
        if len(read) != 1 or len(read[0].flat) != 1 or (call.name in SLICES and not _is_one_of_several(trace, call, read[0].value)):
            break
        whole, at = read[0].value, int(read[0].flat[0])
        shape, size = trace.values[whole].shape, trace.values[value].numel()
        cut |= shape.numel() > size or (at != flat and shape.numel() == size)  # else it was put together
        value, flat = whole, at
        if cut and len(shape) == 2 and 1 not in shape and (found is None or shape.numel() >= trace.values[found[0]].numel()):
            found = value, flat
    return found, cut


def _is_cut(trace: Trace, call: Call, value: int) -> bool:
    """Is it a copy of what came, in another dtype at most, or a piece of that, or that turned round?"""
    read = list(call.inputs())
    if len(read) != 1 or (element_flow(call) is not Flow.MOVE and call.name not in COPIES):
        return False
    if call.name in SLICES:
        return trace.values[value].shape == trace.values[read[0]].shape or _is_one_of_several(trace, call, read[0])
    return call.name in REARRANGINGS | SPLITS


def _is_one_of_several(trace: Trace, call: Call, whole: int) -> bool:
    """Is another part cut out of the same tensor that has no element in common with this one?"""
    own = _elements(trace, call, whole)
    others = (one for one in trace.program.readers(whole) if one.name == call.name and one is not call)
    return any(not bool(torch.isin(_elements(trace, one, whole), own).any()) for one in others)


def _elements(trace: Trace, call: Call, whole: int) -> Tensor:
    """Which elements of a tensor a call takes."""
    out = next(one for one in call.outs if one is not None)
    return origins(call, trace.values, out, torch.arange(trace.values[out].numel()), 0)[whole]


def batches(trace: Trace, value: int) -> list[torch.Size]:
    """Return the shapes [B, T] of what has a number for each token, first of what the value was made of."""
    path = trace.program.slice(value)
    behind = {leaf.id for leaf in path.leaves} | {out for call in path.calls for out in call.outs}
    classes = set(_classes(trace))
    shapes = ((one in behind, content.shape) for one, content in trace.values.items() if content.dim() == 2 and _is_of_tokens(trace, one))
    found = sorted(shapes, key=lambda pair: not pair[0])
    return list(dict.fromkeys(shape for _, shape in found if shape[1] > 1 and shape not in classes))


def _is_of_tokens(trace: Trace, value: int) -> bool:
    return trace.names.role(value) in _OF_TOKENS or trace.names.says_mask(value)


def _classes(trace: Trace) -> Iterator[torch.Size]:
    """Yield the shapes whose last dimension is what a softmax is taken over: those are classes, or actions, and no tokens."""
    for call in trace.program.calls:
        source = next((one for one in call.inputs() if one in trace.values), None)
        if call.name in ALL_SOFTMAXES and source is not None:
            shape = trace.values[source].shape
            if len(shape) - 1 in dims_of(call, trace.values[source]):
                yield shape
