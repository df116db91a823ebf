"""The rules: what is known of an origin in, its possible causes out, in the order in which they are tested: the special ones first."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

import torch

from nanscope.causes import Cause
from nanscope.program.numbers import exponent_limit
from nanscope.program.ops import (
    ALL_SOFTMAXES,
    BATCH_NORMS,
    DIVISIONS,
    DIVISORS,
    DOMAINS,
    EXPONENTIALS,
    LOG_DETERMINANTS,
    LOGARITHMS,
    MEANS,
    NORMALISATIONS,
    POWERS,
    QUOTIENTS,
    ROOTS,
    SHIFTS,
    SOLVERS,
    SPECTRA,
    SPREADS,
    STEEP,
)
from nanscope.roles import Role
from nanscope.snapshot.observation import REDUCED, Kind, Observation, Phase
from nanscope.verdict.grounds import (
    GROUNDS,
    divisor,
    exponent,
    factors,
    is_exponential,
    is_finite,
    is_infinite,
    is_masked,
    is_nan,
    no_number,
    of_a_sequence,
    of_setting,
    over_nothing,
    overflows,
    zero_by_zero,
    zero_times_infinity,
)


class Rule(NamedTuple):
    """In this phase (None: any), if the origin's operator is one of `ops` (None: any) and `when` holds, this is the cause."""

    phase: Phase | None
    ops: Container[str] | None
    when: Callable[[Observation], bool]
    cause: Cause

    def fits(self, seen: Observation) -> bool:
        """Does the rule decide?"""
        return self.phase in (None, seen.phase) and (self.ops is None or seen.origin.op in self.ops) and self.when(seen)


def causes_of(seen: Observation, rules: tuple[Rule, ...] | None = None) -> Iterator[Cause]:
    """Yield the causes whose rules fit what was observed, and whose facts hold, in the order in which they are to be tested; none twice.

    rules: other than `RULES`.
    """
    fitting = dict.fromkeys(rule.cause for rule in (RULES if rules is None else rules) if rule.fits(seen))
    return (cause for cause in fitting if GROUNDS[cause].hold(seen))


def cause_of(seen: Observation, rules: tuple[Rule, ...] | None = None) -> Cause:
    """Return the first cause of what was observed that nothing is known against, without a test."""
    return next(causes_of(seen, rules), Cause.UNKNOWN)


_OF_A_SEQUENCE = (Role.RATIO, Role.IS_WEIGHT, Role.KL, Role.LOG_RATIO, Role.LOSS, None)  # what one exponent of a sequence may be

_RAISING = EXPONENTIALS | {"pow"}

_WIDE_LIMIT = exponent_limit(torch.float32)  # nats; below it float32 holds what overflows in half precision


def _always(seen: Observation) -> bool:
    return True


def _of_a_sequence(seen: Observation) -> bool:
    """Is it the exponent of a sequence, and one of the loss?"""
    return of_a_sequence(seen) and seen.origin.role in _OF_A_SEQUENCE


def _never_written(seen: Observation) -> bool:
    """Was a weight, as far as is seen, never anything but what had been in its memory before?"""
    return seen.poisoned_at is None and seen.past.fine_at is None and (seen.past.unwritten or seen.facts.unwritten)


RULES: tuple[Rule, ...] = (
    Rule(Phase.WEIGHTS, None, is_finite, Cause.HW_BITFLIP),
    Rule(None, DIVISIONS, lambda o: o.suspect and o.facts.cancelled, Cause.CANCELLATION_SPIKE),
    Rule(Phase.WEIGHTS, None, _never_written, Cause.UNINITIALIZED),
    Rule(Phase.WEIGHTS, None, _always, Cause.POISONED_WEIGHTS),
    Rule(None, None, lambda o: o.kind is Kind.ARRIVED and (o.origin.op == REDUCED or o.exchanged or bool(o.source)), Cause.ALLREDUCE_NAN),
    Rule(None, None, lambda o: o.kind is Kind.CLIP, Cause.INF_GRAD_NORM_CLIP),
    Rule(None, None, lambda o: o.facts.unwritten, Cause.UNINITIALIZED),
    Rule(Phase.INPUT, None, lambda o: is_masked(o) and is_infinite(o), Cause.INF_TIMES_ZERO_MASK),
    Rule(Phase.INPUT, None, is_masked, Cause.NAN_TIMES_ZERO_MASK),
    Rule(Phase.INPUT, None, _always, Cause.BAD_INPUT),
    Rule(None, ALL_SOFTMAXES, is_nan, Cause.FULLY_MASKED_SOFTMAX),
    Rule(None, {*DIVISIONS, *ROOTS, "log"}, lambda o: o.facts.eps_underflow and divisor(o) == 0, Cause.EPS_UNDERFLOW),
    Rule(Phase.BACKWARD, None, lambda o: o.facts.dropped and not is_finite(o), Cause.WHERE_GRAD_TRAP),
    Rule(None, LOGARITHMS, lambda o: o.facts.plogp, Cause.PLOGP_ZERO),
    Rule(Phase.FORWARD, None, lambda o: o.facts.multiplied and o.origin.shape != () and is_infinite(o), Cause.INF_TIMES_ZERO_MASK),
    Rule(Phase.FORWARD, DOMAINS, lambda o: o.facts.multiplied and o.origin.shape != () and is_nan(o), Cause.NAN_TIMES_ZERO_MASK),
    Rule(None, ("logsumexp",), lambda o: not is_finite(o), Cause.INF_MINUS_INF),
    Rule(None, SPREADS, is_nan, Cause.STD_SINGLE),
    Rule(None, POWERS | BATCH_NORMS, lambda o: o.origin.number(0) < 0 and is_nan(o), Cause.SQRT_NEGATIVE),
    Rule(Phase.BACKWARD, None, lambda o: o.facts.leaves_half, Cause.FP16_OVERFLOW),
    Rule(Phase.BACKWARD, ("pow",), lambda o: o.origin.number(0) < 0 and is_finite(o), Cause.LOG_ZERO),  # of what is raised
    Rule(Phase.BACKWARD, STEEP, is_finite, Cause.SQRT_ZERO_GRAD),
    Rule(
        Phase.FORWARD,
        None,
        lambda o: o.facts.coefficient and is_infinite(o) and o.origin.op not in LOGARITHMS | DIVISIONS.keys(),
        Cause.INF_TIMES_ZERO_COEF,
    ),
    Rule(None, _RAISING, lambda o: is_exponential(o) and o.origin.dtype == "float16" and exponent(o) < _WIDE_LIMIT, Cause.FP16_OVERFLOW),
    Rule(None, _RAISING, lambda o: is_exponential(o) and _of_a_sequence(o) and not is_nan(o), Cause.SEQ_RATIO_OVERFLOW),
    Rule(None, _RAISING, lambda o: is_exponential(o) and not is_nan(o), Cause.EXP_OVERFLOW),  # of no number it is NaN
    Rule(None, LOGARITHMS | LOG_DETERMINANTS, _always, Cause.LOG_ZERO),
    Rule(None, SPECTRA | NORMALISATIONS, lambda o: o.facts.degenerate, Cause.ZERO_DIV_ZERO),
    Rule(None, SOLVERS, lambda o: o.facts.degenerate, Cause.ZERO_DENOMINATOR),
    Rule(None, ("mul",), lambda o: zero_times_infinity(o) and o.facts.zero_is_mask, Cause.INF_TIMES_ZERO_MASK),
    Rule(None, ("mul",), lambda o: zero_times_infinity(o) and (math.inf in factors(o) or o.facts.coefficient), Cause.INF_TIMES_ZERO_COEF),
    Rule(None, ("mul",), zero_times_infinity, Cause.PLOGP_ZERO),
    Rule(None, SHIFTS, lambda o: all(math.isinf(number) for number in factors(o)), Cause.INF_MINUS_INF),
    Rule(None, ("div",), over_nothing, Cause.EMPTY_MASK_MEAN),
    Rule(None, ("div",), lambda o: o.facts.literal_denominator and not abs(divisor(o)) > 0, Cause.ZERO_DENOMINATOR),
    Rule(None, QUOTIENTS, zero_by_zero, Cause.ZERO_DIV_ZERO),
    Rule(None, DIVISORS, lambda o: o.origin.divided == 0, Cause.ZERO_DENOMINATOR),
    Rule(None, MEANS, is_nan, Cause.EMPTY_MASK_MEAN),
    Rule(Phase.OPTIMIZER, None, lambda o: o.facts.eps_underflow, Cause.EPS_UNDERFLOW),
    Rule(Phase.FORWARD, None, lambda o: o.facts.beyond and not is_finite(o), Cause.BAD_INPUT),
    Rule(None, None, lambda o: overflows(o) and o.origin.dtype == "float16", Cause.FP16_OVERFLOW),
    Rule(None, None, overflows, Cause.MAGNITUDE_OVERFLOW),
    Rule(None, None, lambda o: o.origin.is_pole and o.facts.opposed, Cause.INF_MINUS_INF),
    Rule(None, None, no_number, Cause.OUTSIDE_DOMAIN),
    Rule(Phase.FORWARD, None, lambda o: o.facts.number and is_infinite(o), Cause.BAD_INPUT),
    Rule(Phase.OPTIMIZER, None, of_setting, Cause.BAD_INPUT),
)
