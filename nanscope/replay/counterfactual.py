"""What each cause says would have to be different, as a change of the recorded program that can be run.

A cause is an intervention: with the divisor 1 where it was 0, with the masked elements taken out before the op, in float32 instead of
half, the harm is gone at this origin, or the cause is not this one. The change is as narrow as the claim: where a fix would edit a line,
a counterfactual touches the offending elements of this one step.

    otherwise(patch, Cause.ZERO_DIV_ZERO)      the program in which nothing is divided by 0, None if that cannot be told of this origin
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from nanscope.causes import Cause
from nanscope.program.calls import Ref
from nanscope.program.numbers import exponent_limit
from nanscope.program.ops import ALL_SOFTMAXES, BOUNDS, DECOMPOSITIONS, DIVISIONS, EXPONENTIALS, INSIDE, NORMALISATIONS, TAKEN_OF
from nanscope.replay.edits import (
    CLAMP,
    clamp_denominator,
    finite_number,
    guard_small_group,
    mask_before_op,
    representable_eps,
    safe_softmax,
)
from nanscope.replay.emptiness import guard_empty
from nanscope.replay.matrices import apart
from nanscope.replay.normalisations import with_eps
from nanscope.replay.patch import Insert, Patch, Variant, after
from nanscope.replay.reference import repaired
from nanscope.replay.refill import Fed, leaf_refilled, numbers, refilled
from nanscope.replay.upcast import upcast_fp32


def otherwise(patch: Patch, cause: Cause) -> Iterator[Variant]:
    """Yield the program as it would have to be for a step to be healthy here if the cause is this one, the narrowest change first.

    Nothing where the cause has no such program (a clip, another rank), or it cannot be made of this one.
    """
    for change in COUNTERFACTUALS.get(cause, ()):
        variant = change(patch)
        if variant is not None:
            yield replace(variant, id=str(cause))


def _bounded(patch: Patch) -> Variant | None:
    """The exponent is within what its dtype can take; of a power, whose base may be anything, it is 1."""
    if patch.op not in EXPONENTIALS | {"pow"}:
        return None
    raises = patch.op == "pow"
    position = int(raises)
    bound = 1.0 if raises else min(CLAMP, exponent_limit(patch.values[patch.origin.value_id].dtype) / 2)

    def filling(fed: Fed) -> tuple[Tensor, Tensor] | None:
        where = fed.where
        return (where, fed.content.clamp(-bound, bound)) if where is not None and fed.position == position else None

    return refilled(patch, filling, "", f"with {patch.called(patch.operand(position))} within ±{bound:.3g} there")


def _divided(patch: Patch) -> Variant | None:
    """What is divided by is 1 where it is 0, whether that has done harm or not."""
    position = DIVISIONS.get(patch.op)
    if position is None or patch.origin.call is None:
        return None
    if position < len(patch.call.args) and patch.call.args[position] == 0:  # a number of the code
        return Variant("", "divided by 1 instead of 0", patch.with_number(position, 1.0), patch.tensors)

    def filling(fed: Fed) -> tuple[Tensor, Tensor] | None:
        zero = fed.content == 0
        return (zero, numbers(fed.content, 1.0)) if fed.position == position and bool(zero.any()) else None

    return refilled(patch, filling, "", f"with {patch.called(patch.operand(position))} as 1 where it is 0")


def _regular(patch: Patch) -> Variant | None:
    """A matrix is regular, and no two of its eigenvalues are equal; what is normalised is not all alike."""
    if patch.op in DECOMPOSITIONS:
        return apart(patch)
    return (with_eps(patch) or _harmless(patch)) if patch.op in NORMALISATIONS else None


def _in_domain(patch: Patch) -> Variant | None:
    """What a logarithm or a root is taken of is 1 where it is not above 0, whether that has done harm or not."""
    if patch.origin.call is None:
        return None
    if patch.call.args and isinstance(patch.call.args[0], (int, float)):  # of a power, a number of the code
        return Variant("", f"with 1 instead of {patch.call.args[0]:g}", patch.with_number(0, 1.0), patch.tensors)
    edge, _ = BOUNDS.get(patch.op, (0.0, 0.0))
    position, inside = TAKEN_OF.get(patch.op, 0), INSIDE.get(patch.op, 1.0)

    def filling(fed: Fed) -> tuple[Tensor, Tensor] | None:
        if fed.position != position or not fed.content.is_floating_point():
            return None
        where = fed.content <= edge if fed.where is None else (fed.content <= edge) | fed.where
        return where, numbers(fed.content, inside)

    return refilled(patch, filling, "", f"with {patch.called(patch.operand(position))} as {inside:g} where it is not above {edge:g}")


def _harmless(patch: Patch) -> Variant | None:
    """The operands are ordinary numbers where the result is as bad as the origin."""
    return _ordinary(patch, alike=True)


def _harmless_all(patch: Patch) -> Variant | None:
    """And where it is bad in another way: of a large product some elements are +inf and some are −inf."""
    return _ordinary(patch, alike=False)


def _ordinary(patch: Patch, *, alike: bool) -> Variant | None:
    variant = repaired(patch, alike=alike)
    return None if variant is None else replace(variant, label=f"with ordinary numbers there, before {patch.acting}")


def _softmax(patch: Patch) -> Variant | None:
    """A row with a finite number in it."""
    return _harmless(patch) if patch.op in ALL_SOFTMAXES else None


def _unmasked(patch: Patch) -> Variant | None:
    """What the mask excludes does not reach the op; where nobody knows the mask, the elements that it excludes. A step whose origin no
    mask excludes stays as it is."""
    if not patch.origin.drops:
        return Variant("", "without what a mask excludes", patch.program, patch.tensors)
    return mask_before_op(patch) or _harmless(patch)


def _clean(patch: Patch) -> Variant | None:
    """What came in is finite, and not out of scale."""
    content, value = patch.values[patch.origin.value_id], patch.origin.value_id
    if patch.origin.call is not None or not content.is_floating_point():
        return None
    label = f"with {patch.result} as 0 there"
    if value in patch.tensors and len(patch.entries()) == 1:
        return leaf_refilled(patch, numbers(content, 0.0), "", label)
    finite: list[Insert] = [("aten.nan_to_num.default", (Ref(-1), 0.0, 0.0, 0.0))]
    return Variant("", label, after(patch, finite), patch.tensors)  # put together by calls, out of data, or a sample of several


COUNTERFACTUALS: Mapping[Cause, tuple[Callable[[Patch], Variant | None], ...]] = {
    Cause.EXP_OVERFLOW: (_bounded,),
    Cause.SEQ_RATIO_OVERFLOW: (_bounded,),
    Cause.INF_TIMES_ZERO_MASK: (_unmasked, finite_number),
    Cause.NAN_TIMES_ZERO_MASK: (_unmasked,),
    Cause.INF_TIMES_ZERO_COEF: (_harmless, _harmless_all, finite_number),
    Cause.INF_MINUS_INF: (_harmless, _harmless_all, finite_number),
    Cause.WHERE_GRAD_TRAP: (_harmless, _harmless_all),
    Cause.LOG_ZERO: (_regular, _in_domain, _harmless, _harmless_all),
    Cause.PLOGP_ZERO: (_harmless, _harmless_all),
    Cause.ZERO_DIV_ZERO: (_regular, _divided),
    Cause.ZERO_DENOMINATOR: (_regular, _divided),
    Cause.EMPTY_MASK_MEAN: (guard_empty, _divided),
    Cause.STD_SINGLE: (guard_small_group,),
    Cause.SQRT_ZERO_GRAD: (_in_domain, _harmless, _harmless_all),
    Cause.SQRT_NEGATIVE: (_in_domain, _harmless, _harmless_all),
    Cause.OUTSIDE_DOMAIN: (_harmless, _harmless_all),
    Cause.CANCELLATION_SPIKE: (clamp_denominator,),
    Cause.FULLY_MASKED_SOFTMAX: (safe_softmax, _softmax),
    Cause.FP16_OVERFLOW: (upcast_fp32,),
    Cause.EPS_UNDERFLOW: (representable_eps, upcast_fp32),
    Cause.MAGNITUDE_OVERFLOW: (_harmless, _harmless_all),
    Cause.BAD_INPUT: (_clean,),
    Cause.UNINITIALIZED: (_clean,),
    Cause.POISONED_WEIGHTS: (_clean,),
    Cause.HW_BITFLIP: (_clean,),
}
