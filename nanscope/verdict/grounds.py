"""What each cause says of its origin, as facts that a step has or has not: a cause is given only where all of them hold.

The rules say what to think of first; this says what must be true for it. So no verdict can contradict its own numbers, whichever rule
fitted, and a new rule that forgets a condition makes a step unknown, and not wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from nanscope.causes import Cause
from nanscope.locate.observe import CLIPPED
from nanscope.program.ops import (
    ALL_SOFTMAXES,
    BATCH_NORMS,
    DIVISIONS,
    EVERYWHERE,
    EXPONENTIALS,
    LOG_DETERMINANTS,
    MEANS,
    NORMALISATIONS,
    POWERS,
    QUOTIENTS,
    ROOTS,
    SEQUENCE_SUMS,
    SHIFTS,
    SPECTRA,
    SPREADS,
    STEEP,
    TAKEN_OF,
)
from nanscope.snapshot.observation import UNOPENED, Kind, Observation, Phase


class Grounds(NamedTuple):
    """facts: in words, for people. hold: do they, in this step?"""

    facts: str
    hold: Callable[[Observation], bool]


def is_nan(seen: Observation) -> bool:
    return math.isnan(seen.origin.value)


def is_infinite(seen: Observation) -> bool:
    return math.isinf(seen.origin.value)


def is_finite(seen: Observation) -> bool:
    return math.isfinite(seen.origin.value)


def factors(seen: Observation) -> tuple[float, float]:
    """Return the first two operands."""
    return seen.origin.number(0), seen.origin.number(1)


def divisor(seen: Observation) -> float:
    """Return what the origin divides by; of a logarithm, and of a power, its operand."""
    return seen.origin.number(DIVISIONS.get(seen.origin.op, 0))


def zero_by_zero(seen: Observation) -> bool:
    return divisor(seen) == 0 and seen.origin.number(DIVISIONS[seen.origin.op] - 1) == 0


def zero_times_infinity(seen: Observation) -> bool:
    return 0 in factors(seen) and any(math.isinf(factor) for factor in factors(seen))


def is_masked(seen: Observation) -> bool:
    """Does a mask take the element out? A token of which minimum picks the other side counts all the same."""
    return seen.origin.masked is True and not (seen.origin.masked_by or "").endswith(CLIPPED)


def overflows(seen: Observation) -> bool:
    """Did it become infinite of finite numbers, those included that the optimizer was set to? What came out of code that nobody looked
    into may have been so, what is infinite in every dtype has not."""
    operands = (number for _, number in seen.origin.operands)
    made = is_infinite(seen) and not seen.origin.is_pole and seen.origin.op not in UNOPENED | {"state"}
    return made and all(map(math.isfinite, operands)) and not seen.settings


def no_number(seen: Observation) -> bool:
    """Is it NaN of finite numbers, or infinite at the end of its domain, or, in backward, finite itself and its gradient is not?"""
    made = seen.origin.is_pole or (is_nan(seen) and seen.origin.op not in EVERYWHERE) or (seen.phase is Phase.BACKWARD and is_finite(seen))
    operands = [number for _, number in seen.origin.operands]
    return made and seen.phase in (Phase.FORWARD, Phase.BACKWARD) and bool(operands) and all(map(math.isfinite, operands))


def is_exponential(seen: Observation) -> bool:
    """Is it an exponential? Of powers those are whose exponent made them infinite."""
    return seen.origin.op in EXPONENTIALS or (seen.origin.op == "pow" and seen.facts.exponential and is_infinite(seen))


def exponent(seen: Observation) -> float:
    """Return what e is raised to, in nats."""
    base, power = factors(seen)
    if seen.origin.op == "pow":
        return power * math.log(abs(base)) if base else math.nan
    return base * math.log(2) if seen.origin.op == "exp2" else base


def of_a_sequence(seen: Observation) -> bool:
    """Was the exponent summed over tokens first?"""
    return not SEQUENCE_SUMS.isdisjoint(seen.facts.ancestors)


def of_setting(seen: Observation) -> bool:
    """Is it an update with a setting of the optimizer that is not finite?"""
    return seen.phase is Phase.OPTIMIZER and bool(seen.settings)


def over_nothing(seen: Observation) -> bool:
    """Is it divided by the sum of an empty mask, or what such a mask lets through by a count that came from elsewhere?"""
    return (seen.origin.number(1) == 0 and seen.facts.mask_denominator) or (is_nan(seen) and seen.facts.selects_nothing)


def outside_domain(seen: Observation) -> bool:
    """Is it a logarithm of 0 or of less, or, in backward, of so little that its gradient overflows? A power has one, too."""
    if seen.origin.op in LOG_DETERMINANTS:
        return seen.facts.degenerate
    return not logarithm_of(seen) > (LITTLE if seen.phase is Phase.BACKWARD else 0)


def logarithm_of(seen: Observation) -> float:
    """Return the number that the origin is the logarithm of; of a power, what is raised."""
    return seen.origin.number(TAKEN_OF.get(seen.origin.op, 0)) + (1 if seen.origin.op == "log1p" else 0)


def _zero_by_zero(seen: Observation) -> bool:
    """Is it a decomposition whose backward divides by a distance of 0, a normalisation of what is all alike, or a quotient?"""
    if seen.origin.op in NORMALISATIONS:
        return seen.facts.degenerate
    if seen.origin.op in SPECTRA:
        return seen.phase is Phase.BACKWARD and seen.facts.degenerate
    return seen.origin.op in QUOTIENTS and zero_by_zero(seen)


LITTLE = 1e-3  # far above any number whose reciprocal overflows


def _of_a_mask(seen: Observation) -> bool:
    return is_masked(seen) or (zero_times_infinity(seen) and seen.facts.zero_is_mask)


def _of_a_coefficient(seen: Observation) -> bool:
    return (is_infinite(seen) and seen.facts.coefficient) or zero_times_infinity(seen)


def _infinities_meet(seen: Observation) -> bool:
    if seen.origin.op in SHIFTS:
        return all(map(math.isinf, factors(seen)))
    return (seen.origin.op == "logsumexp" and not is_finite(seen)) or (is_infinite(seen) and seen.facts.opposed)


def _plogp(seen: Observation) -> bool:
    if seen.facts.plogp and outside_domain(seen):
        return True
    return zero_times_infinity(seen) and -math.inf in factors(seen) and not seen.facts.coefficient


def _means_nothing(seen: Observation) -> bool:
    return over_nothing(seen) or (seen.origin.op in MEANS and is_nan(seen))


def _is_steep(seen: Observation) -> bool:
    of_angle = seen.origin.op in STEEP - ROOTS
    return seen.phase is Phase.BACKWARD and is_finite(seen) and (of_angle or abs(seen.origin.value) < LITTLE or seen.origin.op == "rsqrt")


def _half(seen: Observation) -> bool:
    return (seen.origin.dtype == "float16" and is_infinite(seen)) or seen.facts.leaves_half


_ANY = Grounds("", lambda seen: True)

GROUNDS: Mapping[Cause, Grounds] = {
    Cause.EXP_OVERFLOW: Grounds("a finite exponent beyond the dtype's range", lambda o: is_exponential(o) and not is_nan(o)),
    Cause.SEQ_RATIO_OVERFLOW: Grounds(
        "a finite exponent beyond the dtype's range, which is a sum over tokens", lambda o: is_exponential(o) and of_a_sequence(o)
    ),
    Cause.INF_TIMES_ZERO_MASK: Grounds(
        "an infinity at an element that a mask takes out", lambda o: _of_a_mask(o) and (is_infinite(o) or zero_times_infinity(o))
    ),
    Cause.NAN_TIMES_ZERO_MASK: Grounds("NaN at an element that a mask takes out", lambda o: is_masked(o) and is_nan(o)),
    Cause.INF_TIMES_ZERO_COEF: Grounds("an infinity that is multiplied by 0, and the 0 is no mask", _of_a_coefficient),
    Cause.INF_MINUS_INF: Grounds("two infinities, of which one is taken from the other", _infinities_meet),
    Cause.WHERE_GRAD_TRAP: Grounds(
        "a bad value that forward takes out, and whose gradient is bad all the same",
        lambda o: o.phase is Phase.BACKWARD and o.facts.dropped and not is_finite(o),
    ),
    Cause.LOG_ZERO: Grounds("the logarithm of a number that is not above 0", outside_domain),
    Cause.PLOGP_ZERO: Grounds("a probability of 0 that meets its own logarithm", _plogp),
    Cause.ZERO_DIV_ZERO: Grounds("a numerator and a denominator that are 0", _zero_by_zero),
    Cause.ZERO_DENOMINATOR: Grounds("a denominator that is 0", lambda o: o.facts.degenerate or o.origin.divided == 0 or divisor(o) == 0),
    Cause.EMPTY_MASK_MEAN: Grounds("a mean of nothing", _means_nothing),
    Cause.STD_SINGLE: Grounds("a deviation that is NaN", lambda o: o.origin.op in SPREADS and is_nan(o)),
    Cause.SQRT_ZERO_GRAD: Grounds("a root of 0, or next to it, or what is as steep somewhere", _is_steep),
    Cause.SQRT_NEGATIVE: Grounds("the root of a number below 0", lambda o: o.origin.op in POWERS | BATCH_NORMS and o.origin.number(0) < 0),
    Cause.OUTSIDE_DOMAIN: Grounds("finite operands, and a result or a gradient that is not", no_number),
    Cause.CANCELLATION_SPIKE: Grounds("a denominator as small as the rounding of what it is made of", lambda o: o.facts.cancelled),
    Cause.FULLY_MASKED_SOFTMAX: Grounds("a softmax that is NaN", lambda o: o.origin.op in ALL_SOFTMAXES and is_nan(o)),
    Cause.FP16_OVERFLOW: Grounds("an infinity of half precision, made of finite numbers, or a gradient that it cannot hold", _half),
    Cause.EPS_UNDERFLOW: Grounds("a number of the code that its dtype rounds away", lambda o: o.facts.eps_underflow),
    Cause.MAGNITUDE_OVERFLOW: Grounds("an infinity, made of finite numbers", overflows),
    Cause.BAD_INPUT: Grounds(
        "a bad number that nothing here has computed",
        lambda o: (o.phase is Phase.INPUT or o.facts.number or of_setting(o)) and not is_finite(o),
    ),
    Cause.UNINITIALIZED: Grounds(
        "memory that nobody was seen to write to", lambda o: o.facts.unwritten or (o.past.unwritten and o.past.fine_at is None)
    ),
    Cause.POISONED_WEIGHTS: Grounds("a weight that is not finite", lambda o: o.phase is Phase.WEIGHTS and not is_finite(o)),
    Cause.HW_BITFLIP: Grounds(
        "a finite weight, orders of magnitude beyond all others", lambda o: o.phase is Phase.WEIGHTS and is_finite(o)
    ),
    Cause.INF_GRAD_NORM_CLIP: Grounds("a clip by a norm that is not finite", lambda o: o.kind is Kind.CLIP),
    Cause.ALLREDUCE_NAN: Grounds("what is bad since that of the ranks was put together", lambda o: o.kind is Kind.ARRIVED),
    Cause.UNKNOWN: _ANY,
}
