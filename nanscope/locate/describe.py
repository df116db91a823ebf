"""Describes an element of a run: what it is called and means, what it was made of, and whether the loss counts it."""

from __future__ import annotations

import math

import torch

from nanscope.locate.forward import bad_sources
from nanscope.locate.origin import NUMBER, Crossing, Element, Operand
from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Computes, Leaf, Ref, Site
from nanscope.program.flow import Source, sources
from nanscope.program.numbers import at, dtype_name
from nanscope.program.ops import FILLS, LITERALS, MOVES_OF_WRITES, NLL_LOSSES, NUMBERED, SCALES_OF, WRITES
from nanscope.roles import Role
from nanscope.snapshot.observation import Phase
from nanscope.text import unravel


def element_at(trace: Trace, value: int, flat: int, *, fed: bool = False, via: int | None = None) -> Element:
    """Describe an element as origin.

    fed: it came in with the value, whatever call put it there. via: the value through whose backward it did harm, if another one.
    """
    program, tensor = trace.program, trace.values[value]
    index = None if fed else program.producers.get(value)
    call = None if index is None else program.calls[index]
    masked, drops, coefficient = trace.drops.of(value, flat)
    if program.computes is not Computes.LOSS and not (masked and program.computes is Computes.ACTIVATION):
        masked, drops, coefficient = None, (), None  # what an activation holds the loss may leave out; what that leaves out it does, too
    mask = trace.drops.own_mask(index, value, flat) if program.computes is Computes.LOSS else None
    mask = mask or trace.drops.own_padding(index, value, flat)
    if mask is not None:
        masked, drops = True, (mask, *drops)
    elif masked is False and trace.drops.is_bias(index, value, flat):
        masked = None
    leaf = program.leaf(value)
    if leaf is not None and leaf.is_of_model:
        masked = None  # the loss counts tokens, and a weight is none
    return Element(
        value_id=value,
        call=index,
        op=_source(leaf) if call is None else call.name,
        born=call is not None,
        flat=flat,
        index=unravel(flat, tensor.shape),
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        value=at(tensor, flat),
        operands=() if call is None else _operands(trace, call, value, flat),
        variable=trace.names.name(value),
        role=_role(trace, value, leaf, via, call is None),
        site=(program.made_at(leaf) or _first_reader(trace, value)) if call is None else program.site_of(call),
        leaf=leaf,
        masked=masked,
        drops=drops,
        coefficient=coefficient,
    )


def crossing_at(trace: Trace, value: int, flat: int, *, backward: bool = False) -> Crossing:
    """Describe an element that harm went through. backward: of its gradient."""
    call = trace.program.maker(value)
    tensor = trace.run.grads[value] if backward else trace.values[value]
    site = None if call is None else trace.program.site_of(call)
    return Crossing(
        value,
        "input" if call is None else call.name,
        trace.names.name(value),
        unravel(flat, tensor.shape),
        at(tensor, flat),
        site.line if site else None,
        backward,
        site.file if site else None,
    )


def phase_of(trace: Trace, element: Element, otherwise: Phase) -> Phase:
    """Return where the harm of an origin was made: `otherwise`, unless it came in."""
    if element.born:
        return otherwise
    if element.leaf is None:
        return Phase.INPUT
    if element.leaf.made_by == "empty" and any(call.module for call in trace.program.readers(element.value_id)):
        return Phase.FORWARD if otherwise is Phase.INPUT else otherwise
    return {"parameter": Phase.WEIGHTS, "buffer": Phase.WEIGHTS, "data": Phase.INPUT}.get(element.leaf.origin, otherwise)


def _source(leaf: Leaf | None) -> str:
    """What stands for the op where a value came in."""
    if leaf is None or leaf.origin == "data":
        return "empty" if leaf is not None and leaf.made_by == "empty" else "input"
    return leaf.origin


def _role(trace: Trace, value: int, leaf: Leaf | None, via: int | None, came: bool) -> Role | None:
    if trace.program.computes is Computes.UPDATE:
        named = trace.names.role(value, via=via)
        return named if named in (Role.REWARDS, Role.ADVANTAGES) else Role.OPTIMIZER  # evolution strategies weigh noise by returns
    if trace.program.computes is Computes.GRADIENT:
        return Role.GRAD
    if leaf is not None and leaf.is_of_model:
        return Role.WEIGHTS
    if came and any(call.module for call in trace.program.readers(value)[:1]):
        return Role.HIDDEN  # read inside the model
    found = trace.names.role(value, via=via)
    if found is Role.MASK:
        found = _unmasked(trace, value, via)
    if found is not Role.LOSS or trace.program.computes is Computes.LOSS:
        return found
    call = trace.program.maker(value)  # there is no loss: it is what it was made of
    return next((role for read in (call.inputs() if call is not None else ()) if (role := trace.names.role(read)) is not Role.LOSS), None)


def _unmasked(trace: Trace, value: int, via: int | None) -> Role | None:
    """What it means that went bad and is called a mask: zeros and ones do not. Where nothing tells, it is an activation."""
    found = trace.names.by_use(value, via)
    return Role.HIDDEN if found is Role.MASK else found


def _operands(trace: Trace, call: Call, value: int, flat: int) -> tuple[Operand, ...]:
    """What an element was computed from, in order of the arguments."""
    found = [source for source in sources(call, trace.values, value, flat) if trace.values[source.value].numel()]
    if call.name in NLL_LOSSES and math.isnan(at(trace.values[value], flat)) and not bad_sources(trace, call, value, flat):
        return ()  # none of these log-probs is counted
    named = [
        Operand(NUMBER, key, None, (), float(arg))
        for key, arg in call.kwargs
        if key in SCALES_OF and isinstance(arg, (int, float)) and arg != 1
    ]
    numbers = {
        place: Operand(NUMBER, None, None, (), float(arg))
        for place, arg in enumerate(call.args)
        if isinstance(arg, (int, float)) and (call.name in NUMBERED or not math.isfinite(arg))
    }
    if call.name in FILLS:  # what is put in may be a tensor that holds a number of the code
        given = ((place, _number_of_code(trace, arg.id)) for place, arg in enumerate(call.args[1:], 1) if isinstance(arg, Ref))
        numbers |= {place: Operand(NUMBER, None, None, (), number) for place, number in given if number is not None}
    elif call.name in MOVES_OF_WRITES and (number := _put_there(trace, value, flat)) is not None:
        numbers = {0: Operand(NUMBER, None, None, (), number)}
        found = []
    if not numbers:
        return (*(_operand(trace, source) for source in found), *named)
    read = {source.argument: _operand(trace, source) for source in found}
    return (*(operand for _, operand in sorted({**read, **numbers}.items())), *named)


def _operand(trace: Trace, source: Source) -> Operand:
    """The element of a source that tells most: the largest, and NaN and infinities before all."""
    if (given := _number_of_code(trace, source.value)) is not None:
        return Operand(NUMBER, None, None, (), given)  # `x[0] = nan`
    shape, tensor = trace.values[source.value].shape, trace.values[source.value].flatten()
    part = tensor[source.flat]
    if part.numel() == 0:
        flat = 0
    elif part.numel() > 1 and part.is_floating_point():
        flat = int(source.flat[int(torch.nan_to_num(part.float(), nan=math.inf).abs().argmax())])
    else:
        flat = int(source.flat[0])
    number = at(tensor, flat)
    maker = trace.program.maker(source.value)
    site = None if maker is None else trace.program.site_of(maker)
    made = site.expression if site is not None else ""
    return Operand(source.value, trace.names.name(source.value), trace.names.role(source.value), unravel(flat, shape), number, made)


def _put_there(trace: Trace, value: int, flat: int) -> float | None:
    """Return what the code has put into an element as a number that is not finite, in a write to a part of the tensor, or None."""
    while _number_of_code(trace, value) is None:
        made = trace.program.maker(value)
        bad = bad_sources(trace, made, value, flat) if made is not None and made.name in WRITES | {"clone"} else []
        if not bad:
            return None
        value, flat = bad[0]
    return at(trace.values[value], flat)


def _number_of_code(trace: Trace, value: int) -> float | None:
    """Return what the code writes as a number that is not finite, be it moved to where it is put; None if it is no such thing."""
    made = trace.program.maker(value)
    while made is not None and made.name in MOVES_OF_WRITES and made.name not in LITERALS:
        made = trace.program.maker(next(made.inputs()))
    tensor = trace.values[value]
    if made is None or made.name not in LITERALS or not tensor.is_floating_point() or not tensor.numel():
        return None
    number = at(tensor, 0)
    alike = tensor.isnan() if math.isnan(number) else tensor == number
    return None if math.isfinite(number) or not bool(alike.all()) else number


def _first_reader(trace: Trace, value: int) -> Site | None:
    sites = (trace.program.site_of(call) for call in trace.program.readers(value))
    return next((site for site in sites if site is not None), None)
