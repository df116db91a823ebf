"""The rules: what is known of an origin in, the cause out. The first rule that fits decides, so the special ones come first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from nanscope.causes import Cause
from nanscope.locate.location import Phase
from nanscope.locate.observe import EXPS, LOGS, Case
from nanscope.roles import Role


class Rule(NamedTuple):
    """If the origin's operator is one of `ops` (None: any) and `when` holds, this is the cause."""

    ops: tuple[str, ...] | None
    when: Callable[[Case], bool]
    cause: Cause


def cause_of(case: Case, rules: tuple[Rule, ...] | None = None) -> Cause:
    """Return the cause of a case. rules: other than `RULES`."""
    for rule in RULES if rules is None else rules:
        if (rule.ops is None or case.place.op in rule.ops) and rule.when(case):
            return rule.cause
    return Cause.UNKNOWN


_DOMAIN = ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow", "asin", "acos", "atanh", "acosh")  # NaN outside their domain

_DIVISORS = {"div": 1, "true_divide": 1, "addcdiv": 2, "reciprocal": 0, "rsqrt": 0}  # which argument an op divides by

_STEEP = ("sqrt", "linalg_vector_norm", "norm", "std", "pow", "rsqrt", "cdist", "acos", "asin")  # infinite derivatives

_WIDE_LIMIT = 88.72  # nats; below it float32 holds what overflows in half precision

_MEANS = ("mean", "nanmean", "nll_loss_forward", "nll_loss2d_forward")


def _divisor(case: Case) -> float:
    """What the origin divides by (of a logarithm: its operand)."""
    return case.number(_DIVISORS.get(case.place.op, 0))


def _zero_by_zero(case: Case) -> bool:
    return _divisor(case) == 0 and case.number(_DIVISORS.get(case.place.op, 1) - 1) == 0


def _zero_times_infinity(case: Case) -> bool:
    numbers = [value for _, value in case.place.operands[:2]]
    return 0 in numbers and any(math.isinf(number) for number in numbers)


def _of_a_sequence(case: Case) -> bool:
    """Was the exponent summed over tokens first?"""
    roles = (Role.RATIO, Role.IS_WEIGHT, Role.KL, Role.LOG_RATIO, Role.LOSS, None)
    return (
        bool({"sum", "mean", "cumsum", "index_add", "scatter_add", "segment_reduce"} & set(case.facts.ancestors))
        and case.place.role in roles
    )


def _nan(case: Case) -> bool:
    return math.isnan(case.place.value)


def _inf(case: Case) -> bool:
    return math.isinf(case.place.value)


RULES: tuple[Rule, ...] = (
    # An update spoils the elements it touches; memory that was never written is bad from end to end.
    Rule(None, lambda c: c.phase is Phase.WEIGHTS and math.isfinite(c.place.value), Cause.HW_BITFLIP),
    Rule(tuple(_DIVISORS), lambda c: c.facts.suspect, Cause.CANCELLATION_SPIKE),
    Rule(None, lambda c: c.phase is Phase.WEIGHTS and c.facts.story.poisoned_at is not None, Cause.POISONED_WEIGHTS),
    Rule(None, lambda c: c.phase is Phase.WEIGHTS and c.facts.whole and math.prod(c.place.shape) > 1, Cause.UNINITIALIZED),
    Rule(None, lambda c: c.phase is Phase.WEIGHTS, Cause.POISONED_WEIGHTS),
    Rule(None, lambda c: c.facts.allreduce, Cause.ALLREDUCE_NAN),
    Rule(None, lambda c: c.facts.clip == "inf", Cause.INF_GRAD_NORM_CLIP),
    Rule(None, lambda c: c.facts.unwritten, Cause.UNINITIALIZED),
    Rule(None, lambda c: c.phase is Phase.INPUT and c.place.masked is True and _inf(c), Cause.INF_TIMES_ZERO_MASK),
    Rule(None, lambda c: c.phase is Phase.INPUT and c.place.masked is True, Cause.NAN_TIMES_ZERO_MASK),
    Rule(None, lambda c: c.phase is Phase.INPUT, Cause.BAD_INPUT),
    Rule(("_softmax", "softmax", "_safe_softmax", "_log_softmax", "log_softmax"), _nan, Cause.FULLY_MASKED_SOFTMAX),
    Rule((*_DIVISORS, "log"), lambda c: c.facts.eps_underflow and _divisor(c) == 0, Cause.EPS_UNDERFLOW),
    Rule(None, lambda c: c.phase is Phase.BACKWARD and c.facts.dropped and not math.isfinite(c.place.value), Cause.WHERE_GRAD_TRAP),
    Rule(LOGS, lambda c: c.facts.plogp, Cause.PLOGP_ZERO),
    Rule(None, lambda c: c.phase is Phase.FORWARD and c.facts.multiplied and _inf(c), Cause.INF_TIMES_ZERO_MASK),
    Rule(_DOMAIN, lambda c: c.phase is Phase.FORWARD and c.facts.multiplied and _nan(c), Cause.NAN_TIMES_ZERO_MASK),
    Rule(("logsumexp",), lambda c: not math.isfinite(c.place.value), Cause.INF_MINUS_INF),
    Rule(("std", "var"), _nan, Cause.STD_SINGLE),
    Rule(("sqrt", "rsqrt", "pow"), lambda c: c.number(0) < 0 and _nan(c), Cause.SQRT_NEGATIVE),
    Rule(_STEEP, lambda c: c.phase is Phase.BACKWARD and math.isfinite(c.place.value), Cause.SQRT_ZERO_GRAD),
    Rule(
        None,
        lambda c: c.phase is Phase.FORWARD and c.facts.coefficient and _inf(c) and c.place.op not in (*LOGS, *_DIVISORS),
        Cause.INF_TIMES_ZERO_COEF,
    ),
    Rule(EXPS, lambda c: c.place.dtype == "float16" and c.number(0) < _WIDE_LIMIT, Cause.FP16_OVERFLOW),
    Rule(EXPS, _of_a_sequence, Cause.SEQ_RATIO_OVERFLOW),
    Rule(EXPS, lambda c: True, Cause.EXP_OVERFLOW),
    Rule(LOGS, lambda c: True, Cause.LOG_ZERO),
    Rule(("mul",), lambda c: _zero_times_infinity(c) and c.facts.zero_is_mask, Cause.INF_TIMES_ZERO_MASK),
    Rule(("mul",), lambda c: _zero_times_infinity(c) and math.inf in (c.number(0), c.number(1)), Cause.INF_TIMES_ZERO_COEF),
    Rule(("mul",), _zero_times_infinity, Cause.PLOGP_ZERO),
    Rule(("sub", "add", "rsub"), lambda c: math.isinf(c.number(0)) and math.isinf(c.number(1)), Cause.INF_MINUS_INF),
    Rule(("div",), lambda c: c.number(1) == 0 and c.facts.mask_denominator, Cause.EMPTY_MASK_MEAN),
    Rule(("div",), lambda c: c.facts.literal_denominator, Cause.ZERO_DENOMINATOR),
    Rule(("div", "true_divide", "addcdiv"), _zero_by_zero, Cause.ZERO_DIV_ZERO),
    Rule(tuple(_DIVISORS), lambda c: _divisor(c) == 0, Cause.ZERO_DENOMINATOR),
    Rule(_MEANS, _nan, Cause.EMPTY_MASK_MEAN),
    Rule(None, lambda c: c.phase is Phase.OPTIMIZER and c.facts.eps_underflow, Cause.EPS_UNDERFLOW),
    Rule(None, lambda c: _inf(c) and c.place.dtype == "float16", Cause.FP16_OVERFLOW),
    Rule(None, _inf, Cause.MAGNITUDE_OVERFLOW),
)
