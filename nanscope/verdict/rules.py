"""The rules: what is known of an origin in, the cause out. The first rule that fits decides, so the special ones come first."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import NamedTuple

import torch

from nanscope.causes import Cause
from nanscope.program.numbers import exponent_limit
from nanscope.program.ops import (
    ALL_SOFTMAXES,
    DIVISIONS,
    DOMAINS,
    EXPONENTIALS,
    LOGARITHMS,
    MEANS,
    POWERS,
    QUOTIENTS,
    SEQUENCE_SUMS,
    SHIFTS,
    SPREADS,
    STEEP,
)
from nanscope.roles import Role
from nanscope.snapshot.observation import Kind, Observation, Phase


class Rule(NamedTuple):
    """If the origin's operator is one of `ops` (None: any) and `when` holds, this is the cause."""

    ops: Container[str] | None
    when: Callable[[Observation], bool]
    cause: Cause


def cause_of(seen: Observation, rules: tuple[Rule, ...] | None = None) -> Cause:
    """Return the cause of what was observed. rules: other than `RULES`."""
    for rule in RULES if rules is None else rules:
        if (rule.ops is None or seen.origin.op in rule.ops) and rule.when(seen):
            return rule.cause
    return Cause.UNKNOWN


_WIDE_LIMIT = exponent_limit(torch.float32)  # nats; below it float32 holds what overflows in half precision


def _divisor(seen: Observation) -> float:
    """What the origin divides by (of a logarithm: its operand)."""
    return seen.origin.number(DIVISIONS.get(seen.origin.op, 0))


def _zero_by_zero(seen: Observation) -> bool:
    return _divisor(seen) == 0 and seen.origin.number(DIVISIONS.get(seen.origin.op, 1) - 1) == 0


def _zero_times_infinity(seen: Observation) -> bool:
    numbers = [value for _, value in seen.origin.operands[:2]]
    return 0 in numbers and any(math.isinf(number) for number in numbers)


def _of_a_sequence(seen: Observation) -> bool:
    """Was the exponent summed over tokens first?"""
    roles = (Role.RATIO, Role.IS_WEIGHT, Role.KL, Role.LOG_RATIO, Role.LOSS, None)
    return bool(SEQUENCE_SUMS & set(seen.facts.ancestors)) and seen.origin.role in roles


def _nan(seen: Observation) -> bool:
    return math.isnan(seen.origin.value)


def _inf(seen: Observation) -> bool:
    return math.isinf(seen.origin.value)


RULES: tuple[Rule, ...] = (
    # An update spoils the elements it touches; memory that was never written is bad from end to end.
    Rule(None, lambda o: o.phase is Phase.WEIGHTS and math.isfinite(o.origin.value), Cause.HW_BITFLIP),
    Rule(DIVISIONS, lambda o: o.suspect, Cause.CANCELLATION_SPIKE),
    Rule(None, lambda o: o.phase is Phase.WEIGHTS and o.poisoned_at is not None, Cause.POISONED_WEIGHTS),
    Rule(None, lambda o: o.phase is Phase.WEIGHTS and o.facts.whole and math.prod(o.origin.shape) > 1, Cause.UNINITIALIZED),
    Rule(None, lambda o: o.phase is Phase.WEIGHTS, Cause.POISONED_WEIGHTS),
    Rule(None, lambda o: o.kind is Kind.ARRIVED, Cause.ALLREDUCE_NAN),
    Rule(None, lambda o: o.kind is Kind.CLIP, Cause.INF_GRAD_NORM_CLIP),
    Rule(None, lambda o: o.facts.unwritten, Cause.UNINITIALIZED),
    Rule(None, lambda o: o.phase is Phase.INPUT and o.origin.masked is True and _inf(o), Cause.INF_TIMES_ZERO_MASK),
    Rule(None, lambda o: o.phase is Phase.INPUT and o.origin.masked is True, Cause.NAN_TIMES_ZERO_MASK),
    Rule(None, lambda o: o.phase is Phase.INPUT, Cause.BAD_INPUT),
    Rule(ALL_SOFTMAXES, _nan, Cause.FULLY_MASKED_SOFTMAX),
    Rule({*DIVISIONS, "log"}, lambda o: o.facts.eps_underflow and _divisor(o) == 0, Cause.EPS_UNDERFLOW),
    Rule(None, lambda o: o.phase is Phase.BACKWARD and o.facts.dropped and not math.isfinite(o.origin.value), Cause.WHERE_GRAD_TRAP),
    Rule(LOGARITHMS, lambda o: o.facts.plogp, Cause.PLOGP_ZERO),
    Rule(None, lambda o: o.phase is Phase.FORWARD and o.facts.multiplied and _inf(o), Cause.INF_TIMES_ZERO_MASK),
    Rule(DOMAINS, lambda o: o.phase is Phase.FORWARD and o.facts.multiplied and _nan(o), Cause.NAN_TIMES_ZERO_MASK),
    Rule(("logsumexp",), lambda o: not math.isfinite(o.origin.value), Cause.INF_MINUS_INF),
    Rule(SPREADS, _nan, Cause.STD_SINGLE),
    Rule(POWERS, lambda o: o.origin.number(0) < 0 and _nan(o), Cause.SQRT_NEGATIVE),
    Rule(STEEP, lambda o: o.phase is Phase.BACKWARD and math.isfinite(o.origin.value), Cause.SQRT_ZERO_GRAD),
    Rule(
        None,
        lambda o: o.phase is Phase.FORWARD and o.facts.coefficient and _inf(o) and o.origin.op not in LOGARITHMS | DIVISIONS.keys(),
        Cause.INF_TIMES_ZERO_COEF,
    ),
    Rule(EXPONENTIALS, lambda o: o.origin.dtype == "float16" and o.origin.number(0) < _WIDE_LIMIT, Cause.FP16_OVERFLOW),
    Rule(EXPONENTIALS, _of_a_sequence, Cause.SEQ_RATIO_OVERFLOW),
    Rule(EXPONENTIALS, lambda o: True, Cause.EXP_OVERFLOW),
    Rule(LOGARITHMS, lambda o: True, Cause.LOG_ZERO),
    Rule(("mul",), lambda o: _zero_times_infinity(o) and o.facts.zero_is_mask, Cause.INF_TIMES_ZERO_MASK),
    Rule(("mul",), lambda o: _zero_times_infinity(o) and math.inf in (o.origin.number(0), o.origin.number(1)), Cause.INF_TIMES_ZERO_COEF),
    Rule(("mul",), _zero_times_infinity, Cause.PLOGP_ZERO),
    Rule(SHIFTS, lambda o: math.isinf(o.origin.number(0)) and math.isinf(o.origin.number(1)), Cause.INF_MINUS_INF),
    Rule(("div",), lambda o: o.origin.number(1) == 0 and o.facts.mask_denominator, Cause.EMPTY_MASK_MEAN),
    Rule(("div",), lambda o: o.facts.literal_denominator, Cause.ZERO_DENOMINATOR),
    Rule(QUOTIENTS, _zero_by_zero, Cause.ZERO_DIV_ZERO),
    Rule(DIVISIONS, lambda o: _divisor(o) == 0, Cause.ZERO_DENOMINATOR),
    Rule(MEANS, _nan, Cause.EMPTY_MASK_MEAN),
    Rule(None, lambda o: o.phase is Phase.OPTIMIZER and o.facts.eps_underflow, Cause.EPS_UNDERFLOW),
    Rule(None, lambda o: _inf(o) and o.origin.dtype == "float16", Cause.FP16_OVERFLOW),
    Rule(None, _inf, Cause.MAGNITUDE_OVERFLOW),
)
