"""The rules: each decides its own observation and leaves its neighbour alone, and where two fit, the order is the one that is meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from seen import INF, NAN, seen

from nanscope.causes import Cause
from nanscope.snapshot.observation import Kind, Observation, Past, Phase
from nanscope.verdict.rules import RULES, Rule, cause_of


def weight(value: float, **known: Any) -> Observation:
    return seen("parameter", value, phase=Phase.WEIGHTS, **known)


def came(value: float, **known: Any) -> Observation:
    return seen("input", value, phase=Phase.INPUT, **known)


class Case(NamedTuple):
    """What a rule decides, and its near neighbour with the cause that it has instead."""

    decided: Observation
    cause: Cause
    near: Observation
    instead: Cause


CASES = (  # one row a rule, in the order of the rules
    Case(weight(1e38), Cause.HW_BITFLIP, weight(INF), Cause.POISONED_WEIGHTS),
    Case(
        seen("div", 1e12, 1.0, 1e-12, kind=Kind.SPIKE, cancelled=True), Cause.CANCELLATION_SPIKE,
        seen("div", 1e12, 1.0, 1e-12, kind=Kind.SPIKE), Cause.UNKNOWN,
    ),
    Case(
        weight(NAN, past=Past(unwritten=True)), Cause.UNINITIALIZED,
        weight(NAN, whole=True, past=Past(fine_at=2, unwritten=True)), Cause.POISONED_WEIGHTS,
    ),
    Case(weight(NAN), Cause.POISONED_WEIGHTS, came(NAN), Cause.BAD_INPUT),
    Case(
        seen("all_reduce", NAN, phase=Phase.BACKWARD, kind=Kind.ARRIVED), Cause.ALLREDUCE_NAN,
        seen("all_reduce", NAN, phase=Phase.BACKWARD), Cause.UNKNOWN,
    ),
    Case(
        seen("linalg_vector_norm", 1e30, 1e30, phase=Phase.BACKWARD, kind=Kind.CLIP), Cause.INF_GRAD_NORM_CLIP,
        seen("linalg_vector_norm", 0.0, 0.0, phase=Phase.BACKWARD), Cause.SQRT_ZERO_GRAD,
    ),
    Case(came(NAN, unwritten=True), Cause.UNINITIALIZED, came(NAN), Cause.BAD_INPUT),
    Case(came(-INF, masked=True), Cause.INF_TIMES_ZERO_MASK, came(-INF, masked=False), Cause.BAD_INPUT),
    Case(came(NAN, masked=True), Cause.NAN_TIMES_ZERO_MASK, came(NAN, masked=None), Cause.BAD_INPUT),
    Case(came(NAN), Cause.BAD_INPUT, seen("input", NAN), Cause.UNKNOWN),
    Case(seen("_softmax", NAN, -INF), Cause.FULLY_MASKED_SOFTMAX, seen("_softmax", INF, -INF), Cause.UNKNOWN),
    Case(
        seen("div", INF, 1.0, 0.0, dtype="float16", eps_underflow=True), Cause.EPS_UNDERFLOW,
        seen("div", INF, 1e4, 1e-3, dtype="float16", eps_underflow=True), Cause.FP16_OVERFLOW,
    ),
    Case(
        seen("exp", INF, 99.0, phase=Phase.BACKWARD, dropped=True), Cause.WHERE_GRAD_TRAP,
        seen("sqrt", 0.0, 0.0, phase=Phase.BACKWARD, dropped=True), Cause.SQRT_ZERO_GRAD,
    ),
    Case(seen("log", -INF, 0.0, plogp=True), Cause.PLOGP_ZERO, seen("log", -INF, 0.0), Cause.LOG_ZERO),
    Case(
        seen("exp", INF, 99.0, multiplied=True, masked=True), Cause.INF_TIMES_ZERO_MASK,
        seen("exp", INF, 99.0, multiplied=True, masked=True, phase=Phase.BACKWARD), Cause.EXP_OVERFLOW,
    ),
    Case(
        seen("log", NAN, -1.0, multiplied=True, masked=True), Cause.NAN_TIMES_ZERO_MASK,
        seen("sub", NAN, INF, INF, multiplied=True, masked=True), Cause.INF_MINUS_INF,
    ),
    Case(seen("logsumexp", -INF, -INF), Cause.INF_MINUS_INF, seen("logsumexp", 3.0, 3.0), Cause.UNKNOWN),
    Case(seen("std", NAN, 1.0), Cause.STD_SINGLE, seen("std", 0.0, 1.0, phase=Phase.BACKWARD), Cause.SQRT_ZERO_GRAD),
    Case(seen("sqrt", NAN, -1e-9), Cause.SQRT_NEGATIVE, seen("sqrt", NAN, NAN), Cause.UNKNOWN),
    Case(
        seen("mul", 30.0, 0.1, 300.0, phase=Phase.BACKWARD, leaves_half=True), Cause.FP16_OVERFLOW,
        seen("mul", 30.0, 0.1, 300.0, phase=Phase.BACKWARD), Cause.OUTSIDE_DOMAIN,
    ),
    Case(
        seen("pow", 4.0, -2.0, 2.0, phase=Phase.BACKWARD), Cause.LOG_ZERO,
        seen("pow", 0.0, 0.0, 0.5, phase=Phase.BACKWARD), Cause.SQRT_ZERO_GRAD,
    ),
    Case(
        seen("sqrt", 0.0, 0.0, phase=Phase.BACKWARD), Cause.SQRT_ZERO_GRAD,
        seen("log", -87.5, 1e-38, phase=Phase.BACKWARD), Cause.LOG_ZERO,
    ),
    Case(
        seen("exp", INF, 99.0, coefficient=True), Cause.INF_TIMES_ZERO_COEF,
        seen("log", -INF, 0.0, coefficient=True), Cause.LOG_ZERO,
    ),
    Case(seen("exp", INF, 12.0, dtype="float16"), Cause.FP16_OVERFLOW, seen("exp", INF, 89.0, dtype="float16"), Cause.EXP_OVERFLOW),
    Case(
        seen("exp", INF, 99.0, ancestors=("sub", "sum"), role="ratio"), Cause.SEQ_RATIO_OVERFLOW,
        seen("exp", INF, 99.0, ancestors=("sub", "sum"), role="hidden"), Cause.EXP_OVERFLOW,
    ),
    Case(seen("exp", INF, 99.0), Cause.EXP_OVERFLOW, seen("sinh", INF, 99.0), Cause.MAGNITUDE_OVERFLOW),
    Case(seen("log", -INF, 0.0), Cause.LOG_ZERO, seen("lgamma", INF, 0.0), Cause.OUTSIDE_DOMAIN),
    Case(
        seen("_linalg_eigh", 1.0, 1.0, phase=Phase.BACKWARD, degenerate=True), Cause.ZERO_DIV_ZERO,
        seen("_linalg_eigh", 1.0, 1.0, phase=Phase.BACKWARD), Cause.OUTSIDE_DOMAIN,
    ),
    Case(seen("linalg_inv_ex", NAN, 1.0, degenerate=True), Cause.ZERO_DENOMINATOR, seen("linalg_inv_ex", NAN, 1.0), Cause.OUTSIDE_DOMAIN),
    Case(
        seen("mul", NAN, -INF, 0.0, zero_is_mask=True), Cause.INF_TIMES_ZERO_MASK,
        seen("mul", INF, 1e30, 1e30, zero_is_mask=True), Cause.MAGNITUDE_OVERFLOW,
    ),
    Case(seen("mul", NAN, INF, 0.0), Cause.INF_TIMES_ZERO_COEF, seen("mul", NAN, 0.0, -INF), Cause.PLOGP_ZERO),
    Case(seen("mul", NAN, 0.0, -INF), Cause.PLOGP_ZERO, seen("mul", NAN, 1.0, NAN), Cause.UNKNOWN),
    Case(seen("sub", NAN, -INF, -INF), Cause.INF_MINUS_INF, seen("sub", INF, 3e38, -3e38), Cause.MAGNITUDE_OVERFLOW),
    Case(
        seen("div", NAN, 0.0, 0.0, mask_denominator=True), Cause.EMPTY_MASK_MEAN,
        seen("div", INF, 1e30, 1e-30, mask_denominator=True), Cause.MAGNITUDE_OVERFLOW,
    ),
    Case(
        seen("div", NAN, 0.0, 0.0, literal_denominator=True), Cause.ZERO_DENOMINATOR,
        seen("reciprocal", NAN, NAN, literal_denominator=True), Cause.UNKNOWN,
    ),
    Case(seen("div", NAN, 0.0, 0.0), Cause.ZERO_DIV_ZERO, seen("div", INF, 1.0, 0.0), Cause.ZERO_DENOMINATOR),
    Case(seen("reciprocal", INF, 0.0), Cause.ZERO_DENOMINATOR, seen("reciprocal", INF, 1e-39), Cause.MAGNITUDE_OVERFLOW),
    Case(seen("mean", NAN), Cause.EMPTY_MASK_MEAN, seen("mean", INF), Cause.MAGNITUDE_OVERFLOW),
    Case(
        seen("add", NAN, 1.0, NAN, phase=Phase.OPTIMIZER, eps_underflow=True), Cause.EPS_UNDERFLOW,
        seen("add", NAN, 1.0, NAN, eps_underflow=True), Cause.UNKNOWN,
    ),
    Case(
        seen("mul", NAN, 0.0, 1e39, number=True, beyond=True), Cause.BAD_INPUT,
        seen("mul", INF, 2.0, 3e38), Cause.MAGNITUDE_OVERFLOW,
    ),
    Case(seen("mm", INF, dtype="float16"), Cause.FP16_OVERFLOW, seen("mm", INF, dtype="bfloat16"), Cause.MAGNITUDE_OVERFLOW),
    Case(seen("pow", INF, 1e30), Cause.MAGNITUDE_OVERFLOW, seen("pow", INF, -INF), Cause.UNKNOWN),
    Case(seen("lgamma", INF, 0.0, opposed=True), Cause.INF_MINUS_INF, seen("lgamma", INF, 0.0), Cause.OUTSIDE_DOMAIN),
    Case(seen("acos", NAN, 1.5), Cause.OUTSIDE_DOMAIN, seen("abs", NAN, 1.5), Cause.UNKNOWN),
    Case(seen("scatter", -INF, -INF, number=True), Cause.BAD_INPUT, seen("scatter", -INF, -INF), Cause.UNKNOWN),
    Case(
        seen("input", NAN, phase=Phase.OPTIMIZER, settings="lr = NaN"), Cause.BAD_INPUT,
        seen("input", NAN, phase=Phase.OPTIMIZER), Cause.UNKNOWN,
    ),
)  # fmt: skip

BOTH = (  # what two rules fit: the cause that is said, and the one that is not
    (weight(NAN, unwritten=True), Cause.UNINITIALIZED, Cause.POISONED_WEIGHTS),
    (came(INF, unwritten=True, masked=True), Cause.UNINITIALIZED, Cause.INF_TIMES_ZERO_MASK),
    (came(INF, masked=True), Cause.INF_TIMES_ZERO_MASK, Cause.NAN_TIMES_ZERO_MASK),
    (came(NAN, masked=True), Cause.NAN_TIMES_ZERO_MASK, Cause.BAD_INPUT),
    (seen("div", INF, 1.0, 0.0, phase=Phase.BACKWARD, eps_underflow=True, dropped=True), Cause.EPS_UNDERFLOW, Cause.WHERE_GRAD_TRAP),
    (seen("log", -INF, 0.0, phase=Phase.BACKWARD, dropped=True, plogp=True), Cause.WHERE_GRAD_TRAP, Cause.PLOGP_ZERO),
    (seen("log", -INF, 0.0, plogp=True, multiplied=True, masked=True), Cause.PLOGP_ZERO, Cause.INF_TIMES_ZERO_MASK),
    (seen("pow", 4.0, -2.0, 2.0, phase=Phase.BACKWARD, leaves_half=True), Cause.FP16_OVERFLOW, Cause.LOG_ZERO),
    (seen("pow", 1e-8, -1e-4, 2.0, phase=Phase.BACKWARD), Cause.LOG_ZERO, Cause.SQRT_ZERO_GRAD),
    (seen("exp", INF, 12.0, dtype="float16", coefficient=True), Cause.INF_TIMES_ZERO_COEF, Cause.FP16_OVERFLOW),
    (seen("exp", INF, 12.0, dtype="float16", ancestors=("sum",)), Cause.FP16_OVERFLOW, Cause.SEQ_RATIO_OVERFLOW),
    (seen("exp", INF, 99.0, ancestors=("sum",)), Cause.SEQ_RATIO_OVERFLOW, Cause.EXP_OVERFLOW),
    (seen("mul", NAN, INF, 0.0, zero_is_mask=True), Cause.INF_TIMES_ZERO_MASK, Cause.INF_TIMES_ZERO_COEF),
    (seen("mul", NAN, INF, 0.0), Cause.INF_TIMES_ZERO_COEF, Cause.PLOGP_ZERO),
    (seen("div", NAN, 0.0, 0.0, mask_denominator=True, literal_denominator=True), Cause.EMPTY_MASK_MEAN, Cause.ZERO_DENOMINATOR),
    (seen("div", NAN, 0.0, 0.0, selects_nothing=True, literal_denominator=True), Cause.EMPTY_MASK_MEAN, Cause.ZERO_DENOMINATOR),
    (seen("div", NAN, 0.0, 0.0, literal_denominator=True), Cause.ZERO_DENOMINATOR, Cause.ZERO_DIV_ZERO),
    (seen("div", NAN, 0.0, 0.0), Cause.ZERO_DIV_ZERO, Cause.ZERO_DENOMINATOR),
    (seen("mean", NAN, phase=Phase.OPTIMIZER, eps_underflow=True), Cause.EMPTY_MASK_MEAN, Cause.EPS_UNDERFLOW),
    (seen("mm", INF, phase=Phase.OPTIMIZER, eps_underflow=True, dtype="float16"), Cause.EPS_UNDERFLOW, Cause.FP16_OVERFLOW),
    (seen("mul", INF, 2.0, 1e39, dtype="float16", number=True, beyond=True), Cause.BAD_INPUT, Cause.FP16_OVERFLOW),
    (seen("mm", INF, dtype="float16"), Cause.FP16_OVERFLOW, Cause.MAGNITUDE_OVERFLOW),
    (seen("lgamma", INF, 0.0, opposed=True), Cause.INF_MINUS_INF, Cause.OUTSIDE_DOMAIN),
    (seen("lgamma", INF, 0.0, number=True), Cause.OUTSIDE_DOMAIN, Cause.BAD_INPUT),
    # further apart
    (seen("exp", INF, 99.0, multiplied=True, masked=True, coefficient=True), Cause.INF_TIMES_ZERO_MASK, Cause.INF_TIMES_ZERO_COEF),
    (seen("exp", INF, 99.0, phase=Phase.BACKWARD, dropped=True), Cause.WHERE_GRAD_TRAP, Cause.EXP_OVERFLOW),
    (seen("sqrt", NAN, -1.0, multiplied=True, masked=True), Cause.NAN_TIMES_ZERO_MASK, Cause.SQRT_NEGATIVE),
    (seen("log", -INF, 0.0, eps_underflow=True), Cause.EPS_UNDERFLOW, Cause.LOG_ZERO),
    (seen("std", NAN, 1.0, phase=Phase.BACKWARD, dropped=True), Cause.WHERE_GRAD_TRAP, Cause.STD_SINGLE),
    (seen("linalg_vector_norm", 1e30, phase=Phase.BACKWARD, kind=Kind.CLIP), Cause.INF_GRAD_NORM_CLIP, Cause.SQRT_ZERO_GRAD),
    (came(INF, dtype="float16"), Cause.BAD_INPUT, Cause.FP16_OVERFLOW),
)  # fmt: skip

NEVER = {  # two rules beside each other that fit no observation together, and share a phase and an operator all the same
    0: "a weight is no quotient",
    1: "a weight is no quotient",
    3: "what arrives is a gradient",
    4: "a step is of one kind",
    5: "what a clip divides was written by backward",
    7: "an infinity is not NaN",
    9: "what came in was made by no operator",
    14: "an infinity is not NaN",
    18: "NaN is not finite",
    26: "a logarithm is no spectrum",
    30: "the logarithm of 0 is below 0",
    41: "a pole is no overflow",
}


def can_meet(one: Rule, other: Rule) -> bool:
    """Could an observation fit both and be told apart by their order?"""
    phases = one.phase is None or other.phase is None or one.phase is other.phase
    operators = one.ops is None or other.ops is None or bool(set(one.ops) & set(other.ops))
    return phases and operators and one.cause is not other.cause


@pytest.mark.parametrize("number", range(len(RULES)), ids=lambda n: f"{n}-{RULES[n].cause}")
def test_a_rule_decides_its_own_and_not_its_neighbour(number: int) -> None:
    """No rule before it takes its observation away, and what differs in one point has another cause."""
    case = CASES[number]
    assert [n for n, rule in enumerate(RULES) if rule.fits(case.decided)][:1] == [number]
    assert (cause_of(case.decided), cause_of(case.near)) == (case.cause, case.instead)
    assert not RULES[number].fits(case.near)


def test_every_rule_has_a_row() -> None:
    """A rule that is added brings its observation and its neighbour along."""
    assert [case.cause for case in CASES] == [rule.cause for rule in RULES]


def test_a_token_of_which_minimum_picks_the_other_side_is_no_masked_one() -> None:
    """Its loss drops it, and it counts: what came in is to blame."""
    assert cause_of(came(-INF, masked=True, masked_by="minimum picked the other side")) is Cause.BAD_INPUT
    assert cause_of(seen("div", INF, 1.0, 0.0, selects_nothing=True)) is Cause.ZERO_DENOMINATOR


@pytest.mark.parametrize(("observation", "said", "unsaid"), BOTH, ids=[f"{said}-{unsaid}" for _, said, unsaid in BOTH])
def test_of_two_that_fit_the_first_decides(observation: Observation, said: Cause, unsaid: Cause) -> None:
    """The special cause before the general one."""
    fitting = list(dict.fromkeys(rule.cause for rule in RULES if rule.fits(observation)))
    assert fitting[:2] == [said, unsaid]
    assert cause_of(observation) is said


@pytest.mark.parametrize("number", range(len(RULES) - 1))
def test_two_neighbours_do_not_change_places_unseen(number: int) -> None:
    """Flipped, some observation gets another cause; or they never meet."""
    flipped = (*RULES[:number], RULES[number + 1], RULES[number], *RULES[number + 2 :])
    changed = [said for observation, said, _ in BOTH if cause_of(observation, flipped) is not said]
    assert bool(changed) == (can_meet(RULES[number], RULES[number + 1]) and number not in NEVER)


def test_what_no_rule_fits_is_unknown() -> None:
    """NaN out of an operator that nobody knows, and no rules at all."""
    assert cause_of(seen("relu", NAN, NAN)) is Cause.UNKNOWN
    assert cause_of(CASES[0].decided, ()) is Cause.UNKNOWN


@pytest.mark.parametrize(
    ("op", "operands"),
    [("div", (1.0, 0.0)), ("true_divide", (1.0, 0.0)), ("addcdiv", (3.0, 1.0, 0.0)), ("reciprocal", (0.0,)), ("rsqrt", (0.0,)),
     ("pow", (0.0, -1.0))],
)  # fmt: skip
def test_each_division_divides_by_its_own_operand(op: str, operands: tuple[float, ...]) -> None:
    """addcdiv divides by its third argument, a reciprocal by its only one, and a negative power by what is raised to it."""
    assert cause_of(seen(op, INF, *operands)) is Cause.ZERO_DENOMINATOR
    assert cause_of(seen(op, INF, *(number or 1e-30 for number in operands))) is Cause.MAGNITUDE_OVERFLOW


@pytest.mark.parametrize("operands", [(0.0, 2.0), (2.0, INF), (0.0, NAN), (NAN, INF)])
def test_a_product_needs_both_zero_and_infinity(operands: tuple[float, float]) -> None:
    """With one of them alone the NaN has another origin."""
    assert cause_of(seen("mul", NAN, *operands)) is Cause.UNKNOWN


@pytest.mark.parametrize("operand", [0.0, 0.5, NAN])
def test_only_the_root_of_a_negative_number_is_one(operand: float) -> None:
    """NaN of anything else came from elsewhere."""
    assert cause_of(seen("sqrt", NAN, operand)) is Cause.UNKNOWN


def test_zero_by_zero_reads_the_argument_before_the_divisor() -> None:
    """Of addcdiv that is the second: the first is what the quotient is added to."""
    assert cause_of(seen("addcdiv", NAN, 1.0, 0.0, 0.0)) is Cause.ZERO_DIV_ZERO
    assert cause_of(seen("addcdiv", INF, 0.0, 1.0, 0.0)) is Cause.ZERO_DENOMINATOR


FAMILIES: tuple[tuple[str, Callable[[str], Observation], Cause], ...] = (  # operators that are treated alike
    (
        "log log2 log10 log1p sqrt rsqrt pow asin acos atanh acosh",
        lambda op: seen(op, NAN, -2.0, multiplied=True, masked=True),
        Cause.NAN_TIMES_ZERO_MASK,
    ),
    ("_softmax softmax _safe_softmax _log_softmax log_softmax", lambda op: seen(op, NAN, -INF), Cause.FULLY_MASKED_SOFTMAX),
    ("std var", lambda op: seen(op, NAN, 1.0), Cause.STD_SINGLE),
    ("sqrt rsqrt pow native_batch_norm", lambda op: seen(op, NAN, -1.0), Cause.SQRT_NEGATIVE),
    (
        "sqrt linalg_vector_norm norm std pow rsqrt cdist acos asin",
        lambda op: seen(op, 0.0, 0.0, phase=Phase.BACKWARD),
        Cause.SQRT_ZERO_GRAD,
    ),
    ("exp expm1 exp2", lambda op: seen(op, INF, 99.0), Cause.EXP_OVERFLOW),
    ("log log2 log10 xlogy", lambda op: seen(op, -INF, 0.0, 0.0), Cause.LOG_ZERO),
    ("log log2 log10 xlogy", lambda op: seen(op, -INF, 0.0, 0.0, coefficient=True), Cause.LOG_ZERO),
    ("log1p", lambda op: seen(op, -INF, -1.0), Cause.LOG_ZERO),
    ("sub add rsub", lambda op: seen(op, NAN, INF, -INF), Cause.INF_MINUS_INF),
    ("div true_divide", lambda op: seen(op, NAN, 0.0, 0.0), Cause.ZERO_DIV_ZERO),
    ("mean nanmean nll_loss_forward nll_loss2d_forward", lambda op: seen(op, NAN), Cause.EMPTY_MASK_MEAN),
    (
        "sum mean cumsum index_add scatter_add",
        lambda op: seen("exp", INF, 99.0, ancestors=("sub", op)),
        Cause.SEQ_RATIO_OVERFLOW,
    ),
)


@pytest.mark.parametrize(
    ("op", "observe", "cause"),
    [pytest.param(op, observe, cause, id=f"{op}-{cause}") for ops, observe, cause in FAMILIES for op in ops.split()],
)
def test_operators_of_one_kind_are_treated_alike(op: str, observe: Callable[[str], Observation], cause: Cause) -> None:
    """And one that is not of the kind is not."""
    assert cause_of(observe(op)) is cause
    assert cause_of(observe(op + "_of_another_kind")) is not cause


@pytest.mark.parametrize("role", [None, "ratio", "is_weight", "kl", "log_ratio", "loss"])
def test_the_exponent_of_a_sequence_is_one_of_the_loss(role: str | None) -> None:
    """Sums inside the model, of a hidden state, are no sequences."""
    assert cause_of(seen("exp", INF, 99.0, ancestors=("sum",), role=role)) is Cause.SEQ_RATIO_OVERFLOW


@pytest.mark.parametrize(
    ("op", "pole", "beside"),
    [
        ("atanh", 1.0, 0.99),
        ("erfinv", -1.0, 0.0),
        ("logit", 0.0, 0.5),
        ("lgamma", -2.0, 1e38),
        ("digamma", 0.0, 1e-39),
        ("polygamma", 0.0, 1e-39),
    ],
)
def test_what_is_infinite_in_every_dtype_has_not_overflowed(op: str, pole: float, beside: float) -> None:
    """At the end of its domain an operation has no finite number; elsewhere an infinity is one of the dtype."""
    for dtype in ("float32", "float16"):
        assert cause_of(seen(op, INF, pole, dtype=dtype)) is Cause.OUTSIDE_DOMAIN
    assert cause_of(seen(op, INF, beside)) is Cause.MAGNITUDE_OVERFLOW
