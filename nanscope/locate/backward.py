"""The walk over gradients: from a bad leaf gradient towards the loss, to the call whose backward made it, and on to what explains that."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from nanscope.locate.drops import marked_at
from nanscope.locate.forward import Birth, Root, bad_sources, walk_back
from nanscope.locate.trace import Spot, Trace
from nanscope.program.calls import Call, refs
from nanscope.program.flow import spread
from nanscope.program.numbers import at, first_nonfinite
from nanscope.program.ops import PAYLOAD, Flow, flow_of
from nanscope.program.perform import perform

LOOKED_AT = 256  # elements of one result that are looked at for bad operands

DEEP = 10_000  # elements of one walk


def walk_gradient(trace: Trace, leaf: int) -> tuple[list[Spot], Spot]:
    """Return the path from a bad leaf gradient to the last bad one (leaf first), and the element of the call that made it bad."""
    value, flat = leaf, first_nonfinite(trace.run.grads[leaf]) or 0
    path = [(value, flat)]
    for _ in range(DEEP):
        found = _contributor(trace, value, flat)
        if found is None:  # finite gradients overflowed when they were added up
            break
        index, out, marked = found
        grad = trace.run.grads.get(out)
        bad = marked & ~torch.isfinite(grad) if grad is not None else torch.zeros_like(marked)
        if not bool(bad.any()):
            return path, (out, _suspicious(trace, out, _all_made(trace, index, out, value, marked)))
        value, flat = out, int(bad.flatten().int().argmax())
        path.append((value, flat))
    return path, (value, flat)


def why(trace: Trace, value: int, flat: int) -> Root:
    """Explain by forward values why the backward of an element's call made a bad gradient out of finite ones."""
    here, call = Root(Birth.BORN, ((value, flat),)), trace.program.maker(value)
    if call is None:
        return here
    if math.isfinite(at(trace.values[value], flat)) and not bad_sources(trace, call, value, flat):
        return here
    root = walk_back(trace, value, flat)
    return here if root.birth is Birth.INTENDED else root


def _contributor(trace: Trace, value: int, flat: int) -> tuple[int, int, Tensor] | None:
    """Return the call whose backward gave this element a bad gradient, its result, and the result's elements concerned."""
    marks = {value: marked_at(trace.values[value], flat)}
    readers = trace.program.consumers.get(value, ())
    for index in (index for index in trace.run.order if index in readers):
        if not any(bool(~torch.isfinite(grad.flatten()[flat])) for grad in returned_to(trace, index, value)):
            continue
        for out, mark in spread(trace.program.calls[index], trace.values, marks).items():
            return index, out, mark
    return None


def returned_to(trace: Trace, index: int, value: int) -> Iterator[Tensor]:
    """Yield the gradients that a call's backward returned for one of its arguments."""
    call, returned, shape = trace.program.calls[index], trace.run.returned[index], trace.values[value].shape
    for names in (list(call.inputs()), _payload(call)):
        if len(names) == len(returned):
            yield from (g for v, g in zip(names, returned, strict=True) if v == value and g is not None and g.shape == shape)
            return
    yield from (g for g in returned if g is not None and g.shape == shape)


def _payload(call: Call) -> list[int]:
    return [v for position, arg in enumerate(call.args) if position in PAYLOAD.get(call.name, (0,)) for v in refs(arg)]


def _all_made(trace: Trace, index: int, out: int, value: int, marked: Tensor) -> Tensor:
    """Widen the marked elements to all whose backward went bad in the same call, so that the first one is named."""
    grad = trace.run.grads.get(out)
    if grad is not None and trace.values[value].shape != marked.shape:
        return _apart(trace, index, value, grad, marked)
    wide = marked.clone()
    for returned in returned_to(trace, index, value):
        if returned.shape == marked.shape:
            wide |= ~torch.isfinite(returned) & (torch.isfinite(grad) if grad is not None else True)
    return wide


def _apart(trace: Trace, index: int, value: int, grad: Tensor, marked: Tensor) -> Tensor:
    """What an argument got that was broadcast is the sum of what each element gave it: return those that gave something bad."""
    call = trace.program.calls[index]
    if flow_of(call.op) is not Flow.POINTWISE or trace.values[value].dim() > marked.dim():  # a loss that is put together is smaller
        return marked
    wide = trace.values[value].detach().expand(marked.shape).clone().requires_grad_()
    contents = {read: wide if read == value else trace.values[read].detach() for read in call.inputs()}
    result = next(one for one in perform(call, contents, None, wide.device, True, None, index) if isinstance(one, Tensor))
    (parts,) = torch.autograd.grad(result, wide, grad.reshape(result.shape), allow_unused=True)
    made = marked if parts is None else marked & ~torch.isfinite(parts)
    return made if bool(made.any()) else marked


def _suspicious(trace: Trace, out: int, marked: Tensor) -> int:
    """Of the elements that a bad gradient went through, the one whose forward value or operands are non-finite."""
    positions = marked.flatten().nonzero().flatten()
    values = trace.values[out].flatten()
    bad = positions[~torch.isfinite(values[positions])]
    if bad.numel():
        return int(bad[0])
    call = trace.program.maker(out)
    for position in positions[:LOOKED_AT].tolist():
        if call is not None and bad_sources(trace, call, out, position):
            return int(position)
    return int(positions[0])
