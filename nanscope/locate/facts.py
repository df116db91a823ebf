"""What around an origin is worth knowing when its cause is named."""

from __future__ import annotations

import math
import sys
from collections.abc import Container
from pathlib import Path

import torch
from torch import Tensor

from nanscope.locate.drops import is_times_nothing
from nanscope.locate.forward import bad_sources
from nanscope.locate.half import leaves_half
from nanscope.locate.matrices import is_degenerate
from nanscope.locate.normalisations import is_flat
from nanscope.locate.origin import NUMBER, Element, Location
from nanscope.locate.trace import Trace
from nanscope.program.calls import Arg, Call, Computes, Leaf, Ref, is_within
from nanscope.program.flow import sources
from nanscope.program.numbers import at, is_binary, smallest
from nanscope.program.ops import (
    ADDITIONS,
    BOUNDING,
    CHOICES,
    CLAMPS,
    CONSTANT_PAYLOADS,
    COPIES,
    DIFFERENCES,
    DIVISIONS,
    DIVISORS,
    LITERALS,
    LOG_SOFTMAXES,
    LOGARITHMS,
    NATURAL_EXPONENTIALS,
    POWERS,
    PROBABILITIES,
    PRODUCTS,
    RESCALINGS,
    SEQUENCE_SUMS,
    SETS,
    SHIFTS,
    SPREADS,
    SUMS,
    TAKEN_OF,
    ZERO_PRODUCTS,
    Flow,
    carries,
    flow_of,
)
from nanscope.program.program import Program
from nanscope.roles import Role
from nanscope.snapshot.observation import Facts, Phase
from nanscope.text import line_in, ravel

_MOST = dict.fromkeys(("float64", "complex128"), sys.float_info.max)


def facts_of(location: Location, trace: Trace) -> Facts:
    """Return the facts around the origin of a location."""
    origin, program = location.origin, trace.program
    call = program.calls[origin.call] if origin.call is not None else None
    literal = call is not None and call.name == "div" and len(call.args) > 1 and isinstance(call.args[1], (int, float))
    own = program.computes is not Computes.GRADIENT  # what comes into a backward is what forward saved, and no setting
    exponential = call is not None and _is_exponential(origin, call)
    filled = call is not None and _filled(trace, call)
    divisor = DIVISORS.get(origin.op, 1)
    most = _MOST.get(origin.dtype, torch.finfo(torch.float32).max)  # of half precision, too: a number of Python is taken in float32 there
    return Facts(
        coefficient=(origin.coefficient is not None and not math.isnan(origin.value))  # a NaN was one before it met that
        or _is_given_infinity(call, location, program)
        or _by_one_zero(call, trace)
        or _of_no_logarithm(call, location, trace),
        ancestors=tuple(sorted(_summed(trace, origin.operands[int(exponential)].id))) if origin.operands else (),
        exponential=exponential,
        mask_denominator=len(origin.operands) > 1 and _from_mask(trace, origin.operands[1].id),
        literal_denominator=literal,
        setting=literal or (own and len(origin.operands) > 1 and _came_in(program, origin.operands[int(origin.op != "pow")].id)),
        computed=own and not literal and len(origin.operands) > divisor and not _came_in(program, origin.operands[divisor].id),
        dropped=_is_dropped(origin, filled),
        zero_is_mask=program.computes is Computes.LOSS and trace.drops.mask_factor(origin.call, origin.value_id, origin.flat) is not None,
        extent=extent_of(~torch.isfinite(trace.values[origin.value_id]), origin.index) if origin.call is None else "",
        put=_put_at(trace, origin) if location.phase is Phase.INPUT and origin.call is None else "",
        whole=not bool(torch.isfinite(trace.values[origin.value_id]).any()),
        multiplied=any(drop.how == "mask" and not drop.before for drop in origin.drops) and _meets_zero(location, program),
        plogp=origin.op in LOGARITHMS and call is not None and _times_own_operand(program, call),
        selects_nothing=call is not None and call.name == "div" and _sums_nothing(trace, call.args[0]),
        unwritten=origin.leaf is not None and (origin.leaf.made_by == "empty" or _is_left_over(origin.leaf, trace.values[origin.value_id])),
        cancelled=_cancelled(location, trace),
        filled=filled,
        number=any(operand.id == NUMBER and not abs(operand.value) <= most for operand in origin.operands),
        beyond=any(operand.id == NUMBER and most < abs(operand.value) < math.inf for operand in origin.operands),
        degenerate=call is not None and (is_degenerate(call, trace.values) or is_flat(call, trace.values)),
        eps_underflow=origin.call is not None and bool(vanishing_eps(trace, origin.call)),
        leaves_half=leaves_half(origin, location.phase, trace),
        opposed=_is_opposed(location, trace),
    )


def _is_dropped(origin: Element, filled: bool) -> bool:
    """Does forward take its value out? A softmax does that with −inf: of one that the code has put there and scaled, and of no other is it
    what went wrong that the gradient is not taken out."""
    shared = any(drop.how == "share" for drop in origin.drops)
    return bool(origin.drops) and (not shared or (filled and origin.op in RESCALINGS | SHIFTS))


def _is_opposed(location: Location, trace: Trace) -> bool:
    """Is another infinity taken from this one where it becomes NaN?"""
    met = next((crossed for crossed in location.chain if math.isnan(crossed.value) and not crossed.backward), None)
    call = None if met is None else trace.program.maker(met.value_id)
    if met is None or call is None or call.name not in SHIFTS:
        return False
    read = sources(call, trace.values, met.value_id, ravel(met.index, trace.values[met.value_id].shape))
    return len(read) == 2 and all(bool(torch.isinf(trace.values[one.value].flatten()[one.flat]).all()) for one in read)


def _is_exponential(origin: Element, call: Call) -> bool:
    """Is it a power, and the exponent what made it as large as it is? A number of the code is not; of two tensors it is the larger one."""
    if origin.op != "pow" or len(origin.operands) != 2 or not isinstance(call.args[1], Ref):
        return False
    base, exponent = (abs(operand.value) for operand in origin.operands)
    return base != 0 and (not isinstance(call.args[0], Ref) or exponent > max(base, 1 / base))


LOOKED_AT = 256  # elements of one operand


def _is_left_over(leaf: Leaf, tensor: Tensor) -> bool:
    """Does a weight hold what was in its memory before? Numbers next to 0 that nobody computes, beside the one that is bad."""
    if not leaf.is_of_model or not tensor.is_floating_point() or torch.finfo(tensor.dtype).tiny > TINY:
        return False
    sizes = tensor.detach().abs()
    return bool(((sizes > 0) & (sizes < torch.finfo(tensor.dtype).tiny)).any())


TINY = 1e-30  # dtypes in which a weight may well be subnormal end above it
ROUNDING = 1024  # rounding errors of its operands that a difference may be off by
CLOSE = 0.1  # of its operands at most, however coarse the dtype
BACK = 12  # calls that are gone through in search of a difference
NEAR = 5  # calls back in which an operator is among what made a value


def _cancelled(location: Location, trace: Trace) -> bool:
    """Is what the origin divides by, or takes the root of, nothing but what the rounding of larger numbers has left of their difference?"""
    origin = location.origin
    position = DIVISIONS.get(origin.op, 0 if origin.op in POWERS else len(origin.operands))
    if position >= len(origin.operands):
        return False
    operand = origin.operands[position]
    if operand.id == NUMBER:
        return False
    value, flat = operand.id, ravel(operand.index, trace.values[operand.id].shape)
    for _ in range(BACK):
        call = trace.program.maker(value)
        if call is None or not trace.values[value].is_floating_point():
            return False
        read = [(source.value, int(one)) for source in sources(call, trace.values, value, flat) for one in source.flat[:LOOKED_AT]]
        sizes = [(abs(at(trace.values[spot[0]], spot[1])), spot) for spot in read]
        largest, spot = max(sizes, default=(0.0, (value, flat)))
        left = min(ROUNDING * torch.finfo(trace.values[value].dtype).eps, CLOSE)
        if call.name in SHIFTS | SPREADS and abs(at(trace.values[value], flat)) <= left * largest:
            return True
        if spot == (value, flat):
            return False
        value, flat = spot
    return False


def _by_one_zero(call: Call | None, trace: Trace) -> bool:
    """Does a product multiply all elements by one number, and that is 0? It is a setting, and no probability of each."""
    if call is not None and is_times_nothing(call):
        return True
    factors = [trace.values[value] for value in call.inputs()] if call is not None and call.name == "mul" else []
    return len(factors) == 2 and any(one.numel() == 1 < other.numel() and not bool(one.any()) for one, other in (factors, factors[::-1]))


_LOGARITHMIC = LOGARITHMS | LOG_SOFTMAXES | {"logsumexp"}


def _of_no_logarithm(call: Call | None, location: Location, trace: Trace) -> bool:
    """Is it −inf · 0, and the −inf neither a logarithm nor what a softmax is taken of? Then the 0 is no probability of it."""
    operands = location.origin.operands
    if call is None or call.name != "mul" or len(operands) != 2 or {operand.value for operand in operands} != {0.0, -math.inf}:
        return False
    zero, infinite = sorted(operands, key=lambda operand: -operand.value)
    made = trace.program.maker_behind(zero.id, CLAMPS)
    if made is not None and made.name in PROBABILITIES | NATURAL_EXPONENTIALS:
        return False
    if not _ancestors(trace.program, infinite.id).isdisjoint(_LOGARITHMIC):
        return False
    return infinite.role in (
        Role.HIDDEN,
        Role.REWARDS,
        Role.ADVANTAGES,
        Role.WEIGHTS,
        Role.GRAD,
        Role.OPTIMIZER,
        Role.RATIO,
        Role.IS_WEIGHT,
    )


def _put_at(trace: Trace, origin: Element) -> str:
    """Return the line on which the code wrote out a number that is read as data; "" if it came with the data."""
    value, flat, into_a_part = origin.value_id, origin.flat, False
    while (call := trace.program.maker(value)) is not None:
        site = trace.program.site_of(call)
        given = (arg for arg in call.args if isinstance(arg, float))
        if call.name in LITERALS and site is not None and not all(map(math.isfinite, given)):
            return line_in(site.file, site.line)
        if into_a_part and trace.values[value].numel() == 1 and site is not None:
            return line_in(site.file, site.line)
        into_a_part |= call.name in SETS
        read = bad_sources(trace, call, value, flat)
        if not read:
            break
        value, flat = read[0]
    return ""


def _is_given_infinity(call: Call | None, location: Location, program: Program) -> bool:
    """Is it infinite since a number of the code is, and not by an overflow, and multiplied by 0 after that?"""
    given = () if call is None or program.computes is not Computes.LOSS else call.args
    nan = any(math.isnan(crossed.value) and not crossed.backward for crossed in location.chain)
    return nan and any(isinstance(arg, float) and math.isinf(arg) for arg in given) and _meets_zero(location, program)


def _meets_zero(location: Location, program: Program) -> bool:
    """Is it a product with 0 that makes NaN of an infinity, and not something on the way there, a softmax for instance?"""
    if math.isnan(location.origin.value):
        return True
    first = next((crossed for crossed in location.chain if math.isnan(crossed.value) and not crossed.backward), None)
    if first is None:
        return True
    call = program.maker(first.value_id)
    return call is not None and (flow_of(call.op) is Flow.MATMUL or call.name in ZERO_PRODUCTS)


def extent_of(bad: Tensor, index: tuple[int, ...]) -> str:
    """Return how much of a tensor is bad beside the element that was named."""
    count = int(bad.sum())
    if count <= 1:
        return ""
    if count == bad.numel():
        return "all of it"
    row = bad[index[0]] if len(index) > 1 else bad
    if len(index) > 1 and bool(row.all()) and count == row.numel():
        return f"the whole row {index[0]}"
    column = bad[..., index[-1]] if len(index) > 1 else bad
    if column.numel() > 1 and bool(column.all()) and count == column.numel():
        return f"the whole column {index[-1]}"
    return f"{count} of {bad.numel()} elements"


def _summed(trace: Trace, value: int) -> set[str]:
    """The operators that a value was made by, but for sums that add up nothing, or the numbers of what a distribution has drawn."""
    made_by = _makers(trace.program, value, trace.names.counted)
    return {call.name for call in made_by if call.name not in SEQUENCE_SUMS or not _is_of_one(trace, call)}


def _is_of_one(trace: Trace, call: Call) -> bool:
    """Does it add up nothing, or what a distribution has drawn? What is added to something has the size of that."""
    read = next((trace.values[value].numel() for value in call.inputs()), 0)
    site = trace.program.site_of(call)
    drawn = site is not None and ("distributions" in Path(site.file).parts or ".log_prob(" in site.expression)
    return drawn or (call.name in SUMS and call.outs[0] is not None and read == trace.values[call.outs[0]].numel())


def _filled(trace: Trace, call: Call) -> bool:
    """Is the first operand bad by an infinity that a line of the code puts in, and not the call's own?"""
    value = next(call.inputs(), None)
    for _ in range(NEAR):
        made = trace.program.maker(value) if value is not None else None
        if made is None or made.site == call.site:
            return False
        if any(isinstance(arg, float) and math.isinf(arg) for arg in made.args) and made.name in CONSTANT_PAYLOADS:
            return True
        value = next(made.inputs(), None) if carries(made.op) else None
    return False


def _ancestors(program: Program, value: int) -> set[str]:
    """The operators that a value was made by, a few calls back."""
    return {call.name for call in _makers(program, value)}


def _makers(program: Program, value: int, counted: Container[int] = ()) -> list[Call]:
    """The calls that a value was made by, those of as many calls back together: each is gone back from once, however many read it.
    counted: values that are not gone back from: an index says which element it is, and not what."""
    found: list[Call] = []
    values = {value}
    for _ in range(NEAR):
        calls = [call for one in sorted(values) if (call := program.maker(one)) is not None]
        found += calls
        values = {read for call in calls for read in call.inputs() if read not in counted}
    return found


def _times_own_operand(program: Program, call: Call) -> bool:
    """Is the logarithm multiplied by the number it was taken of, p · log p?"""
    operand = next(iter(call.inputs()), None)
    value = call.outs[0]
    if call.name in TAKEN_OF:
        return len(call.args) > 1 and call.args[0] == call.args[1]  # xlogy(p, p)
    for _ in range(6):
        readers = program.readers(value) if value is not None else []
        if any(reader.name == "mul" and operand in set(reader.inputs()) for reader in readers):
            return True
        following = [r for r in readers if flow_of(r.op) in (Flow.POINTWISE, Flow.MOVE)]
        if not following:
            return False
        value = following[0].outs[0]
    return False


def _came_in(program: Program, value: int) -> bool:
    """Is a value one that came in as it is, a temperature for instance, and was at most reshaped?"""
    for _ in range(12):
        call = program.maker(value)
        if call is None:
            return True
        if not carries(call.op):
            return False
        value = next(iter(call.inputs()), value)
    return False


def _from_mask(trace: Trace, value: int) -> bool:
    """Is a value a sum over a mask?"""
    if "sum" not in _ancestors(trace.program, value):
        return False
    summed = False
    for _ in range(12):
        call = trace.program.maker(value)
        summed = summed or (call is not None and call.name in SEQUENCE_SUMS)
        if call is not None and (call.name in DIFFERENCES or (not summed and call.name in ADDITIONS and len(set(call.inputs())) > 1)):
            return False  # a count less one; a sum beside something else
        if call is not None and call.name in SPREADS:
            return False  # how far counts lie apart: rewards may be some
        if trace.names.says_mask(value):
            return True
        if call is None:
            tensor = trace.values[value]
            return tensor.dim() > 0 and is_binary(tensor)
        following = next(iter(call.inputs()), None)
        if following is None:
            return False
        value = following
    return False


def _sums_nothing(trace: Trace, numerator: Arg) -> bool:
    """Is this a sum over a product with a mask, or over what a condition takes, of which every element is 0, or false?"""
    summed = _maker(trace.program, numerator)
    if summed is None or summed.name not in SUMS:
        return False
    inner = _maker(trace.program, summed.args[0])
    if inner is None or inner.name not in PRODUCTS | CHOICES:
        return False
    taken = [value for value in inner.inputs() if inner.name in PRODUCTS or value == next(iter(inner.inputs()))]
    # an advantage of 0 is no mask
    return any(
        trace.names.says_mask(value) or not trace.values[value].is_floating_point()
        for value in taken
        if not bool(trace.values[value].any())
    )


def _maker(program: Program, value: Arg) -> Call | None:
    """The call that made a value, behind copies and changes of sign."""
    while isinstance(value, Ref):
        call = program.maker(value.id)
        if call is None or call.name not in COPIES | _SIGNS:
            return call
        value = call.args[0]
    return None


_SIGNS = frozenset({"neg"})


def _is_of_torch(program: Program, call: Call) -> bool:
    """Is it the division of an optimizer of torch's, of whose code nothing is seen?"""
    site = program.site_of(call)
    return call.name == "addcdiv" and site is not None and is_within(site, call.name)


def vanishing_eps(trace: Trace, index: int) -> dict[tuple[int, int], float]:
    """Return the numbers of the code, on the way into a call, that the dtype they meet cannot hold.

    An epsilon that rounds to 0, or an optimizer's that is 0, or a bound next to 1 that rounds to 1: (call, argument) → what to write there
    instead.
    """
    program, values, producers = trace.program, trace.values, trace.program.producers
    found: dict[tuple[int, int], float] = {}
    of_update = program.computes is Computes.UPDATE and _is_of_torch(program, program.calls[index])  # which adds its epsilon, be it 0
    stack, seen = [(index, 0)], set[int]()
    while stack:
        current, depth = stack.pop()
        if current in seen or depth > 6:
            continue
        seen.add(current)
        call = program.calls[current]
        dtype = next((values[v].dtype for v in call.inputs() if values[v].is_floating_point()), None)
        if dtype is not None and call.name in BOUNDING:
            for position, arg in enumerate(call.args):
                if isinstance(arg, float) and math.isfinite(arg):
                    held = float(torch.tensor(arg, dtype=dtype))
                    if held == 0 and (arg != 0 or of_update):
                        found[(current, position)] = math.copysign(smallest(dtype), arg)
                    elif abs(arg) != 1 and abs(held) == 1:
                        found[(current, position)] = math.copysign(1 + math.copysign(torch.finfo(dtype).eps, abs(arg) - 1), arg)
        stack += [(producers[v], depth + 1) for v in call.inputs() if v in producers]
    return found
