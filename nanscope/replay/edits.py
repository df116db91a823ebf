"""Edits: named changes of a recorded program, each a pure function from a program to a program.

An edit is tried at the origin. Those that mend the operand before the op are candidates; those that mend the result after it are the
tempting wrong ones, kept as controls: forward looks repaired and backward is not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.given import spelled
from nanscope.locate.describe import element_at
from nanscope.locate.drops import Drop
from nanscope.locate.facts import vanishing_eps
from nanscope.locate.origin import NUMBER
from nanscope.program.calls import Arg, Ref, refs
from nanscope.program.numbers import first_nonfinite, smallest
from nanscope.program.ops import (
    ADDITIONS,
    BOUNDS,
    CHECKS,
    CLAMPABLE,
    CLAMPS,
    DECOMPOSITIONS,
    DIVISIONS,
    EXPONENTIALS,
    FILLS,
    MEANS,
    NEEDS_MORE_THAN_ZERO,
    NORMALISATIONS,
    PRODUCTS,
    REARRANGINGS,
    REORDERINGS,
    ROOTS,
    SETS,
    SOFTMAXES,
    SPOILT_BY_EITHER,
    SPOILT_BY_INFINITY,
    SPREADS,
    SQUARES,
    SUMS,
    TAKEN_OF,
    Flow,
    carries,
    flow_of,
)
from nanscope.program.program import Program
from nanscope.program.summary import broadcasts
from nanscope.replay.dropped import drop_invalid_sample, reject_input
from nanscope.replay.emptiness import guard_empty
from nanscope.replay.initialised import initialise_memory
from nanscope.replay.matrices import apart
from nanscope.replay.normalisations import with_eps
from nanscope.replay.patch import Insert, Patch, Variant, after, before, in_order, index_in
from nanscope.replay.rebind import bound_anew, wherever_written
from nanscope.replay.stable import stable
from nanscope.replay.upcast import upcast_fp32
from nanscope.replay.usual import ROOM, elsewhere, floor_of, shortest_within, usual

SPIKE_FLOOR = 1e-4  # what frameworks add to a standard deviation

CLAMP = 20.0  # nats; e^20 is 4.9e8, the bound that frameworks which clamp have settled on


def mask_before_op(patch: Patch) -> Variant | None:
    """Fill the operand where the mask excludes it, before the op."""
    return _masked(patch, before)


def mask_variable(patch: Patch) -> Variant | None:
    """Fill the variable that the operand is, for all that reads it from there on. Raises NanscopeError where it is none."""
    return _masked(patch, bound_anew) if patch.origin.call is not None else None


def mask_expression(patch: Patch) -> Variant | None:
    """Fill the operand wherever its statement has the same expression. Raises NanscopeError where that is at one place."""
    return _masked(patch, wherever_written, "wherever the line has it") if patch.origin.call is not None else None


Putting = Callable[[Patch, int, Callable[[int], list[Insert]]], Program]


def _masked(patch: Patch, put: Putting, where: str = "") -> Variant | None:
    """Put a mask on the operand of the origin. where: that is, in words, if it is not before the op alone."""
    drops = patch.trace.drops
    mask = next((one for one in patch.origin.drops if drops.says_which(one) or (one.how == "other" and one.by is not None)), None)
    position = _spoilt(patch)
    behind = patch.origin.call is None or patch.op in SETS  # what is put into a part of it stands there afterwards
    target = patch.origin.value_id if behind else patch.operand(position)
    ordered = None if mask is None or target is None else _in_order_of(patch, mask, target)
    if mask is None or mask.by is None or ordered is None or (ordered != target and patch.origin.call is not None):
        return None
    if ordered != target:
        moved = element_at(patch.trace, ordered, first_nonfinite(patch.values[ordered]) or 0)
        patch = Patch(patch.trace, replace(moved, call=None, masked=patch.origin.masked, drops=patch.origin.drops))
    target = ordered
    keep, content = patch.values[mask.by], patch.values[target]
    asking: frozenset[int] = frozenset()  # what the mask is made of, where it asks of an input what is finite
    if _descends(patch.program, mask.by, target):
        if patch.origin.call is not None or not _asks_what_is_finite(patch.program, mask.by, target):
            return None  # a guard made from the operand itself (`where(length > 0, …)`), not a mask
        asking = frozenset(patch.program.slice(mask.by).producers)
    deeper = 0 if broadcasts(keep.shape, content.shape) else content.dim() - keep.dim()
    shaped = keep.reshape(*keep.shape, *(1,) * deeper)  # tokens, of which each has several numbers
    if deeper < 0 or not broadcasts(shaped.shape, content.shape):
        return None
    excluded = float(shaped.expand(content.shape)[index_in(patch.origin, content)]) if content.dim() == len(patch.origin.index) else 0.0
    neutral = 1.0 if (position == 1 and patch.op not in PRODUCTS) or patch.op in NEEDS_MORE_THAN_ZERO else 0.0
    if excluded and patch.origin.masked is False and mask.how == "mask":
        return None  # what multiplies an element that counts does not leave it out
    excluded = int(excluded) if excluded.is_integer() else excluded
    masks = _masks(patch, mask)

    def inserts(ordinal: int) -> list[Insert]:
        by = masks[ordinal] if ordinal < len(masks) else masks[0]
        widened: list[Insert] = [("aten.unsqueeze.default", (Ref(by if turn == 0 else -2), -1)) for turn in range(deeper)]
        taken = -2 if deeper else by
        if keep.dtype is torch.bool:
            out: list[Insert] = [] if excluded else [("aten.bitwise_not.default", (Ref(taken),))]
        else:
            out = [("aten.eq.Scalar", (Ref(taken), excluded))]
        return [*widened, *out, ("aten.masked_fill.Scalar", (Ref(-1), Ref(-2 if widened or out else by), neutral))]

    name = mask.name or "the mask"
    place = "after it is set" if patch.op in SETS else where or f"before {patch.acting}"
    label = f"fill {patch.called(target)} with {neutral:g} where {name} excludes it, {place}"
    program = in_order(after(patch, inserts(0), asking)) if behind else put(patch, position, inserts)
    return Variant("mask_before_op", label, program, patch.tensors)


def _in_order_of(patch: Patch, mask: Drop, target: int) -> int | None:
    """Return the value that holds the elements of another one as the mask has them, where nothing was made of them so far: rows may have
    been shuffled before the loss. None where they were after something was made of them, or do not come to the mask."""
    found: dict[int, int | None] = {target: target}
    only_moved = {target}
    for call in patch.program.calls[: mask.call]:
        source = next((value for value in call.inputs() if value in found), None)
        for out in (out for out in call.outs if out is not None and source is not None):
            assert source is not None
            found[out] = found[source]
            if call.name in REORDERINGS:
                found[out] = out if source in only_moved and found[source] is not None else None
            if source in only_moved and call.name in REARRANGINGS:
                only_moved.add(out)
    read = [value for value in patch.program.calls[mask.call].inputs() if value in found and value != mask.by]
    return found[read[0]] if read else target


def _spoilt(patch: Patch) -> int:
    """Return which argument the mask is to be applied to: of a product the one that is bad, which may stand behind the mask."""
    if patch.op == "div" or (patch.op == "pow" and patch.operand(0) is None):
        return 1
    bad = [position for position, operand in enumerate(patch.origin.operands[:2]) if not math.isfinite(operand.value)]
    if patch.op in PRODUCTS and bad == [1] and patch.operand(1) == patch.origin.operands[1].id:
        return 1
    return TAKEN_OF.get(patch.op, 0)


def _masks(patch: Patch, drop: Drop) -> list[int]:
    """The mask of every sibling: chunks of a batch have a chunk of the mask each."""
    assert drop.by is not None
    if patch.origin.call is None:
        return [drop.by]
    calls, ours = patch.program.calls, patch.siblings(drop.call)
    position = next((p for p, arg in enumerate(calls[drop.call].args) if drop.by in refs(arg)), None)
    if position is None or len(ours) != len(patch.siblings()):
        return [drop.by]
    return [next(refs(calls[index].args[position]), drop.by) for index in ours]


def _descends(program: Program, value: int, ancestor: int) -> bool:
    """Is a value computed from another one?"""
    return any(ancestor in call.inputs() for call in program.slice(value).calls)


def _asks_what_is_finite(program: Program, value: int, ancestor: int) -> bool:
    """Is all that a value is told of another one which of its elements are finite?"""
    readers = [call for call in program.slice(value).calls if ancestor in call.inputs()]
    return bool(readers) and all(call.name in CHECKS for call in readers)


def clamp_exponent(patch: Patch, bound: float | None = None) -> Variant | None:
    """Clamp what is raised to e."""
    position = 0 if patch.op in EXPONENTIALS else 1
    if position and (patch.op != "pow" or patch.operand(position) is None):
        return None
    rest = usual(patch, position) if bound is None and not position else None
    if rest is not None:
        return _clamp_spike(patch, float(rest.max()))
    fits = math.floor(math.log(torch.finfo(patch.values[patch.origin.value_id].dtype).max)) - 1  # of half precision less than usual
    bound = min(CLAMP, float(fits)) if bound is None else bound
    label = f"clamp {patch.called(patch.operand(position))} to ±{bound:g} before {patch.acting}"
    return Variant("clamp_exponent", label, before(patch, position, [("aten.clamp.default", (Ref(-1), -bound, bound))]), patch.tensors)


def _clamp_spike(patch: Patch, largest: float) -> Variant:
    """Clamp an exponent that made a spike beside the largest of the others."""
    bound = shortest_within(largest, largest + math.log(ROOM))
    label = f"clamp {patch.called(patch.operand(0))} to at most {bound:g} before {patch.acting}"
    return Variant("clamp_exponent", label, before(patch, 0, [("aten.clamp_max.default", (Ref(-1), bound))]), patch.tensors)


def clamp_denominator(patch: Patch, least: float | None = None) -> Variant | None:
    """Keep a denominator away from 0: at least 1 for a count, at least a small representable number for anything else.

    Of a spike it is kept among what the rest of the batch divides by. One of either sign keeps its sign, and only what is too near to 0 is
    filled.
    """
    position = DIVISIONS.get(patch.op)
    value = None if position is None else patch.operand(position)
    if position is None or value is None:
        return None
    content = patch.values[value]
    finite = content[torch.isfinite(content)] if content.is_floating_point() else content
    count = bool((finite == finite.round()).all()) and bool((finite >= 0).all()) and _is_count(patch, value)
    spiky = bool(finite.numel()) and math.isfinite(patch.origin.value)  # a tiny denominator, not a zero: the floor must be well above it
    signed, rest = bool((finite < 0).any()), usual(patch, position)
    if least is not None:
        bound = least
    elif count:
        bound = 1.0
    elif not signed and rest is not None and bool(rest.any()):
        bound = floor_of(rest)
    else:
        bound = _spike_floor(finite) if spiky else smallest(content.dtype)
    if signed:
        fill = bound if bool((finite > 0).any()) else -bound
        inserts: list[Insert] = [
            ("aten.abs.default", (Ref(-1),)),
            ("aten.lt.Scalar", (Ref(-2), bound)),
            ("aten.masked_fill.Scalar", (Ref(-1), Ref(-2), fill)),
        ]
        label = f"fill {patch.called(value)} with {fill:g} where it is nearer to 0 than that, before dividing"
        return Variant("clamp_denominator", label, before(patch, position, inserts), patch.tensors)
    label = f"clamp {patch.called(value)} to at least {bound:g} before dividing"
    return Variant("clamp_denominator", label, before(patch, position, [("aten.clamp_min.default", (Ref(-1), bound))]), patch.tensors)


def _is_count(patch: Patch, value: int) -> bool:
    """Is a value, of which all elements are whole numbers, a count: a sum of zeros and ones, of numbers that are whole by their dtype, or
    what came in and is more than one somewhere?"""
    call = patch.program.maker(value)
    while call is not None and (carries(call.op) or call.name in ADDITIONS | CLAMPS | PRODUCTS):
        value = next(call.inputs(), -1)
        call = patch.program.maker(value)
    content = patch.values.get(value)
    if content is None or not content.is_floating_point():
        return content is not None
    if call is None:
        return bool((content > 1).any())
    counted = patch.values.get(next(call.inputs(), -1))
    if call.name not in SUMS - MEANS or counted is None:
        return False
    if not counted.is_floating_point() or bool((counted == 1).any()):
        return not counted.is_floating_point() or bool(((counted == 0) | (counted == 1)).all())
    return bool((counted == 0).all()) and _says_which(patch, next(call.inputs()))


def _says_which(patch: Patch, value: int) -> bool:
    """Does a value that is 0 throughout say which elements count? A mask that selects nothing does, weights that underflowed do not."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        call, content = patch.program.maker(one), patch.values.get(one)
        if one in seen or content is None or not content.is_floating_point():
            continue
        seen.add(one)
        if call is None or flow_of(call.op) is Flow.CREATE:
            if content.dim() and not bool(((content == 0) | (content == 1)).all()):
                return False
            continue
        if not (carries(call.op) or call.name in ADDITIONS | CLAMPS | PRODUCTS):
            return False
        waiting += call.inputs()
    return True


def _spike_floor(denominators: Tensor) -> float:
    """What frameworks add to a deviation; where that was there and too small, a tenth of what the others have."""
    usual = float(denominators.double().abs().median())
    return SPIKE_FLOOR if float(denominators.double().abs().min()) < SPIKE_FLOOR / 100 else max(SPIKE_FLOOR, usual / 10)


def representable_eps(patch: Patch) -> Variant | None:
    """Use an epsilon that the dtype can hold."""
    if patch.origin.call is None:
        return None
    found = vanishing_eps(patch.trace, patch.origin.call)
    if not found:
        return None
    calls = list(patch.program.calls)
    for (index, position), number in found.items():
        args = tuple(number if place == position else arg for place, arg in enumerate(calls[index].args))
        calls[index] = replace(calls[index], args=args)
    (index, position), number = next(iter(found.items()))
    was = patch.program.calls[index].args[position]
    label = f"{number:.4g} instead of {was:.4g}, which {patch.origin.dtype} cannot hold" if was else f"{number:.4g} as epsilon, not 0"
    return Variant("representable_eps", label, replace(patch.program, calls=tuple(calls)), patch.tensors)


def clamp_input(patch: Patch) -> Variant | None:
    """Keep an operand inside the domain of its op, or what came in far out among the others."""
    if patch.origin.call is None:
        return _clamp_input_of_spike(patch)
    if patch.op not in CLAMPABLE:
        return None
    position = TAKEN_OF.get(patch.op, 0)
    value = patch.operand(position)
    if value is None:
        return None
    dtype = patch.values[value].dtype
    if patch.op in BOUNDS:
        return _inside(patch, position, value, dtype)
    if patch.op in SQUARES and _is_too_large(patch.origin.value, patch.origin.operands[0].value):
        rest = elsewhere(patch, position)  # a square that overflows is no bound for what is squared
        largest = float(rest.abs().max()) if rest is not None else 0.0
        high = shortest_within(largest, ROOM * largest) if largest else float(f"{torch.finfo(dtype).max ** 0.25:.1g}")
        inserts: list[Insert] = [("aten.clamp.default", (Ref(-1), -high, high))]
        return Variant("clamp_input", f"clamp {patch.called(value)} to ±{high:.3g}", before(patch, position, inserts), patch.tensors)
    low = smallest(dtype)
    label = f"clamp {patch.called(value)} to at least {low:.3g} before {patch.acting}"
    return Variant("clamp_input", label, before(patch, position, [("aten.clamp_min.default", (Ref(-1), low))]), patch.tensors)


def _clamp_input_of_spike(patch: Patch) -> Variant | None:
    """Bound what came in and is finite by what its tensor has elsewhere."""
    rest, leaf = usual(patch, 0), patch.origin.leaf
    if rest is None or not bool(rest.any()) or (leaf is not None and leaf.is_of_model):
        return None  # a weight is not mended by looking away
    largest = float(rest.abs().max())
    high = shortest_within(largest, ROOM * largest)
    inserts: list[Insert] = [("aten.clamp.default", (Ref(-1), -high, high))]
    label = f"clamp {patch.called(patch.origin.value_id)} to ±{high:g} before {patch.acting}"
    return Variant("clamp_input", label, after(patch, inserts), patch.tensors)


def _inside(patch: Patch, position: int, value: int, dtype: torch.dtype) -> Variant:
    """Clamp to the inside of a domain: at its bounds the op, or its derivative, is infinite."""
    eps, (low, high) = torch.finfo(dtype).eps, BOUNDS[patch.op]
    bounds: list[Insert] = [("aten.clamp.default", (Ref(-1), low + eps, None if high == math.inf else high - eps))]
    most = "" if high == math.inf else f", and at most {high:g} − {eps:.3g},"
    label = f"clamp {patch.called(value)} to at least {low:g} + {eps:.3g}{most} before {patch.acting}"
    return Variant("clamp_input", label, before(patch, position, bounds), patch.tensors)


def _is_too_large(power: float, base: float) -> bool:
    """Or is it that 0 and what is below have no such power, or no logarithm, which is a part of a power's gradient?"""
    return base != 0 if math.isinf(power) else (base if math.isnan(power) else abs(base)) > 1


def stable_function(patch: Patch) -> Variant | None:
    """Replace the op, and what feeds it, by the function that numerical libraries provide for the pair."""
    product = patch if patch.op == "mul" else _first_product(patch)
    return (_zero_infinite_factor(product) if product is not None else None) or stable(patch)


def _first_product(patch: Patch) -> Patch | None:
    """Of an infinity that the code writes, as where a teacher has no probability: the product that it goes into, to be left out there. None
    where that is no term of a sum of its own, as over a vocabulary: it is all that a token has."""
    origin = patch.origin
    if origin.call is None or origin.op not in FILLS or not any(one.id == NUMBER and math.isinf(one.value) for one in origin.operands):
        return None
    spoilt = {origin.value_id}
    for call in patch.program.calls[origin.call + 1 :]:
        bad = {out: flat for out in call.outs if out is not None and (flat := first_nonfinite(patch.values[out])) is not None}
        if not bad or spoilt.isdisjoint(call.inputs()):
            continue
        if call.name == "mul":
            value, flat = next(iter(bad.items()))
            sums = (one for one in patch.program.readers(value) if one.name in SUMS)
            summed = any(out is not None and patch.values[out].dim() > 0 for one in sums for out in one.outs)
            return Patch(patch.trace, element_at(patch.trace, value, flat)) if summed else None
        spoilt.update(bad)
    return None


def _zero_infinite_factor(patch: Patch) -> Variant | None:
    """p · log p: where log p is −inf, its product is 0 by convention; make it 0 before the product."""
    for position in (0, 1):
        value = patch.operand(position)
        if value is not None and bool(torch.isinf(patch.values[value]).any()):
            inserts: list[Insert] = [
                ("aten.isinf.default", (Ref(-1),)),
                ("aten.masked_fill.Scalar", (Ref(-1), Ref(-2), 0.0)),
            ]
            label = f"set {patch.called(value)} to 0 where it is infinite, before the product"
            return Variant("stable_function", label, before(patch, position, inserts), patch.tensors)
    return None


def finite_mask_fill(patch: Patch) -> Variant | None:
    """Replace −inf in the operand by the lowest finite number; or one that the code calculates with."""
    if (variant := finite_number(patch)) is not None:
        return variant
    positions = (0, 1) if patch.op in SPOILT_BY_EITHER else (0,)
    given = {position: value for position in positions if (value := patch.operand(position)) is not None}
    infinite = [position for position, value in given.items() if bool(torch.isinf(patch.values[value]).any())]
    if patch.op not in SPOILT_BY_INFINITY or not infinite:
        return None
    lowest = torch.finfo(patch.values[given[infinite[0]]].dtype).min / 4
    bounds = (lowest, -lowest) if patch.op == "mul" else (lowest, None)
    edited = patch
    for position in infinite:
        edited = edited.edited(before(edited, position, [("aten.clamp.default", (Ref(-1), *bounds))]))
    label = f"mask {patch.called(given[infinite[0]])} with a large finite number instead of an infinite one"
    return Variant("finite_mask_fill", label, edited.program, patch.tensors)


def finite_number(patch: Patch) -> Variant | None:
    """A number of the code that is infinite, as a large finite one; None if the origin's call is given none."""
    index, dtype = patch.origin.call, patch.values[patch.origin.value_id].dtype
    given = () if index is None else patch.program.calls[index].args
    if not any(isinstance(arg, float) and math.isinf(arg) for arg in given) or not dtype.is_floating_point:
        return None
    calls = list(patch.program.calls)
    for sibling in patch.siblings():
        calls[sibling] = replace(calls[sibling], args=tuple(_finite(arg, dtype) for arg in calls[sibling].args))
    label = f"a large finite number instead of the infinite one, in {patch.acting}"
    return Variant("finite_mask_fill", label, replace(patch.program, calls=tuple(calls)), patch.tensors)


def _finite(arg: Arg, dtype: torch.dtype) -> Arg:
    return math.copysign(torch.finfo(dtype).max / 4, arg) if isinstance(arg, float) and math.isinf(arg) else arg


def safe_softmax(patch: Patch) -> Variant | None:
    """Softmax that gives zeros for a row that is entirely −inf."""
    if patch.op not in SOFTMAXES or patch.origin.call is None:
        return None
    calls = list(patch.program.calls)
    for index in patch.siblings():
        calls[index] = replace(calls[index], op="aten._safe_softmax.default", args=calls[index].args[:2], kwargs=())
    return Variant(
        "safe_softmax", "softmax that gives zeros for a fully masked row", replace(patch.program, calls=tuple(calls)), patch.tensors
    )


def guard_small_group(patch: Patch) -> Variant | None:
    """Use the biased deviation, which is 0 for a group of one and whose gradient is 0, too."""
    if patch.op not in SPREADS or not patch.call.op.endswith(".correction"):
        return None
    calls = list(patch.program.calls)
    for index in patch.siblings():
        out, source = calls[index].outs[0], next(calls[index].inputs())
        if out is not None and patch.values[source].numel() <= max(1, patch.values[out].numel()):
            others = tuple(item for item in calls[index].kwargs if item[0] != "correction")
            calls[index] = replace(calls[index], kwargs=(*others, ("correction", 0)))
    label = f"{patch.acting} with correction=0 for groups of one: 0 instead of 0/0"
    return Variant("guard_small_group", label, replace(patch.program, calls=tuple(calls)), patch.tensors)


def skip_disabled_term(patch: Patch) -> Variant | None:
    """Leave the term out whose coefficient is a 0 of the code, or a setting that is 0."""
    made = {patch.origin.value_id}
    for index, call in enumerate(patch.program.calls):
        if not any(value in made for value in call.inputs()):
            continue
        term = next((arg for arg in call.args if isinstance(arg, Ref) and arg.id in made), None)
        if call.name == "mul" and term is not None and any(_is_zero(patch, arg) for arg in call.args):
            calls = list(patch.program.calls)
            calls[index] = replace(call, op="aten.zeros_like.default", args=(term,), kwargs=(), grad=False)
            return Variant(
                "skip_disabled_term", "leave the term out whose coefficient is 0", replace(patch.program, calls=tuple(calls)), patch.tensors
            )
        made.update(out for out in call.outs if out is not None)
    return None


def _is_zero(patch: Patch, arg: Arg) -> bool:
    """Is it the number 0, or a single one that came in?"""
    if isinstance(arg, Ref):
        return patch.program.maker(arg.id) is None and patch.values[arg.id].dim() == 0 and bool(patch.values[arg.id] == 0)
    return isinstance(arg, (int, float)) and arg == 0


def avoid_singular_op(patch: Patch) -> Variant | None:
    """Move the operand off the point where the derivative is infinite."""
    if patch.op in DECOMPOSITIONS:
        return apart(patch)
    if patch.op in NORMALISATIONS:
        return with_eps(patch)
    if patch.op not in ROOTS:
        return None
    value = patch.operand(0)
    if value is None:
        return None
    small = smallest(patch.values[value].dtype)
    label = f"add {small:.0e} to {patch.called(value)} before {patch.acting}"
    return Variant("avoid_singular_op", label, before(patch, 0, [("aten.add.Scalar", (Ref(-1), small))]), patch.tensors)


def where_after_op(patch: Patch) -> Variant | None:
    """Select the good elements after the op: what people try first."""
    inserts: list[Insert] = [
        ("aten.abs.default", (Ref(-1),)),
        ("aten.lt.Scalar", (Ref(-2), float("inf"))),
        ("aten.where.ScalarOther", (Ref(-2), Ref(-1), 0.0)),
    ]
    return Variant("where_after_op", f"torch.where on {patch.result}, after {patch.acting}", after(patch, inserts), patch.tensors, True)


def nan_to_num_after_op(patch: Patch) -> Variant | None:
    """nan_to_num on the result."""
    inserts: list[Insert] = [("aten.nan_to_num.default", (Ref(-1), 0.0, 0.0, 0.0))]
    return Variant("nan_to_num_after_op", f"nan_to_num on {patch.result}, after {patch.acting}", after(patch, inserts), patch.tensors, True)


def clamp_after_op(patch: Patch) -> Variant | None:
    """clamp on the result."""
    high = 1e4
    inserts: list[Insert] = [("aten.clamp.default", (Ref(-1), -high, high))]
    return Variant("clamp_after_op", f"clamp on {patch.result}, after {patch.acting}", after(patch, inserts), patch.tensors, True)


EDITS: dict[str, Callable[[Patch], Variant | None]] = {
    "mask_before_op": mask_before_op,
    "clamp_exponent": clamp_exponent,
    "clamp_denominator": clamp_denominator,
    "clamp_input": clamp_input,
    "stable_function": stable_function,
    "finite_mask_fill": finite_mask_fill,
    "safe_softmax": safe_softmax,
    "upcast_fp32": upcast_fp32,
    "representable_eps": representable_eps,
    "guard_small_group": guard_small_group,
    "guard_empty": guard_empty,
    "drop_invalid_sample": drop_invalid_sample,
    "reject_input": reject_input,
    "initialise_memory": initialise_memory,
    "avoid_singular_op": avoid_singular_op,
    "skip_disabled_term": skip_disabled_term,
}

WIDER = {"mask_before_op": (mask_variable, mask_expression)}  # tried first: what a person would write

FILL_IN = frozenset(("drop_invalid_sample", "reject_input"))  # a number of ours takes the place of one that came in
BOUNDING = frozenset(("clamp_denominator", "clamp_exponent", "clamp_input"))  # by a number of ours
MOVE_OFF = frozenset(("avoid_singular_op", "clamp_denominator"))  # near where it was, the derivative may be as steep as they make it

# Tried where the first bound leaves a gradient far beyond the others.
TIGHTER: dict[str, tuple[Callable[[Patch, float], Variant | None], tuple[float, ...]]] = {
    "clamp_exponent": (clamp_exponent, (10.0, 5.0, 2.0)),
    "clamp_denominator": (clamp_denominator, (1e-6, 1e-4, 1e-2)),
}

CONTROLS: dict[str, Callable[[Patch], Variant | None]] = {
    "where_after_op": where_after_op,
    "nan_to_num_after_op": nan_to_num_after_op,
    "clamp_after_op": clamp_after_op,
}

SHORT = {"clamp": "clamp_exponent", "mask": "mask_before_op", "where": "where_after_op", "nan_to_num": "nan_to_num_after_op"}


def parse_edit(text: str) -> Callable[[Patch], Variant | None]:
    """Return the edit that a command line names: `clamp:20`, `clamp_denominator:1e-8`, `mask_before_op`, `where_after_op`.

    Raises NanscopeError for an unknown name or a bound that is not a positive number.
    """
    name, _, bound = text.partition(":")
    name = SHORT.get(name, name)
    known = {**EDITS, **CONTROLS}
    if name not in known:
        raise NanscopeError(
            f"unknown edit {text!r}{spelled(name, {*known, *SHORT})}; known are {', '.join(sorted({*known, *SHORT}))}", slug="unknown-edit"
        )
    if not bound:
        return known[name]
    if not re.fullmatch(r"[0-9.]+(e[+-]?[0-9]+)?", bound) or name not in ("clamp_exponent", "clamp_denominator"):
        raise NanscopeError(f"{text!r}: only clamp and clamp_denominator take a bound, a positive number as in clamp:20", slug="bad-edit")
    try:
        number = float(bound)
    except ValueError:
        raise NanscopeError(f"{text!r}: {bound!r} is not a number", slug="bad-edit") from None
    if not 0 < number < math.inf:
        raise NanscopeError(f"{text!r}: a bound is a positive number", slug="bad-edit")
    if name == "clamp_exponent":
        return lambda patch: clamp_exponent(patch, number)
    return lambda patch: clamp_denominator(patch, number)
