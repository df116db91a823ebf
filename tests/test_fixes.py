"""Fixes: which of what was tried is one, in which order, what is advised where nothing can be tried, and what is rejected."""

from __future__ import annotations

from typing import Any

import pytest
from seen import INF, NAN, seen

from nanscope.causes import ADVICE, CAUSES, Cause
from nanscope.snapshot.observation import Observation, Phase, Row
from nanscope.verdict.fixes import fixes_of
from nanscope.verdict.incident import Fix

SEEN = seen("exp", INF, 99.0)


def row(name: str, distortion: float | None = 0.0, *, works: bool = True, kind: str = "fix", loss: float | None = 0.5) -> Row:
    """An edit that was tried. Where it does not work, a gradient is bad."""
    return Row(name, f"try {name}", kind, loss, 0 if works else 1, 3, distortion, works)


FILLED = seen("masked_fill", -INF, -INF)


def names(fixes: tuple[Fix, ...]) -> list[str]:
    return [fix.id for fix in fixes]


ORDER: dict[str, tuple[Cause, list[Row], list[str], list[str]]] = {  # cause, tried -> fixes, rejected
    "what does not make the gradients finite is no fix": (
        Cause.INF_TIMES_ZERO_MASK,
        [row("clamp_exponent", works=False), row("mask_before_op")],
        ["mask_before_op"], ["clamp_exponent"],
    ),
    "the natural order of the cause, not that of the rows": (
        Cause.INF_TIMES_ZERO_MASK,
        [row("finite_mask_fill"), row("clamp_exponent"), row("mask_before_op")],
        ["mask_before_op", "clamp_exponent", "finite_mask_fill"], [],
    ),
    "the smaller distortion before the natural order": (
        Cause.INF_TIMES_ZERO_MASK,
        [row("mask_before_op", 0.5), row("clamp_exponent", 0.1), row("finite_mask_fill", 0.0)],
        ["finite_mask_fill", "clamp_exponent", "mask_before_op"], [],
    ),
    "of those that distort alike the one that gives what float64 gives": (
        Cause.MAGNITUDE_OVERFLOW,
        [row("float64", None, kind="float64", loss=0.71), row("clamp_input", loss=0.5), row("stable_function", loss=0.71)],
        ["stable_function", "clamp_input"], [],
    ),
    "and the natural one where float64 is no better": (
        Cause.MAGNITUDE_OVERFLOW,
        [row("float64", None, kind="float64", loss=None, works=False), row("clamp_input", loss=0.5), row("stable_function", loss=0.71)],
        ["clamp_input", "stable_function"], [],
    ),
    "below the noise of the dtype all distortions are the same": (
        Cause.INF_TIMES_ZERO_MASK,
        [row("clamp_exponent", 0.0), row("mask_before_op", 9e-5)],
        ["mask_before_op", "clamp_exponent"], [],
    ),
    "at the noise they are not": (
        Cause.INF_TIMES_ZERO_MASK,
        [row("clamp_exponent", 0.0), row("mask_before_op", 1e-4)],
        ["clamp_exponent", "mask_before_op"], [],
    ),
    "what cannot be measured counts as wholly distorted": (
        Cause.INF_TIMES_ZERO_MASK,
        [row("mask_before_op", None), row("clamp_exponent", 0.9), row("finite_mask_fill", 1.1)],
        ["clamp_exponent", "mask_before_op", "finite_mask_fill"], [],
    ),
    "what answers the cause before what does not": (
        Cause.EXP_OVERFLOW,
        [row("upcast_fp32", 0.0), row("clamp_exponent", 0.01)],
        ["clamp_exponent", "upcast_fp32"], [],
    ),
    "but not if it changes healthy tokens": (
        Cause.EXP_OVERFLOW,
        [row("clamp_exponent", 0.02), row("upcast_fp32", 0.0)],
        ["upcast_fp32", "clamp_exponent"], [],
    ),
    "nor if nobody could measure whether it does": (
        Cause.EXP_OVERFLOW,
        [row("clamp_exponent", None), row("upcast_fp32", 0.0)],
        ["upcast_fp32", "clamp_exponent"], [],
    ),
    "of what does not answer it, the smaller distortion": (
        Cause.EXP_OVERFLOW,
        [row("upcast_fp32", 0.5), row("mask_before_op", 0.1)],
        ["mask_before_op", "upcast_fp32"], [],
    ),
    "what is done after the op is rejected even where this step survives it": (
        Cause.EXP_OVERFLOW,
        [row("clamp_after_op", kind="control"), row("clamp_exponent")],
        ["clamp_exponent"], ["clamp_after_op"],
    ),
    "a control that works is a fix": (
        Cause.EXP_OVERFLOW, [row("skip_disabled_term", kind="control"), row("clamp_exponent")],
        ["clamp_exponent", "skip_disabled_term"], [],
    ),
    "and so is what was asked for": (Cause.EXP_OVERFLOW, [row("mine", kind="asked")], ["mine"], []),
    "neither the recorded step nor float64 is an edit": (
        Cause.EXP_OVERFLOW, [row("as_recorded", kind="recorded"), row("float64", kind="float64"), row("clamp_exponent")],
        ["clamp_exponent"], [],
    ),
    "what could not be run was not tried": (
        Cause.EXP_OVERFLOW, [Row("mine", "mine", "asked", None, 0, 0, None, False, "no such op"), row("clamp_exponent")],
        ["clamp_exponent"], [],
    ),
    "what gave a loss and no gradient was": (
        Cause.EXP_OVERFLOW, [Row("mine", "mine", "asked", NAN, 0, 0, None, False), row("clamp_exponent")],
        ["clamp_exponent"], ["mine"],
    ),
    "and what gave gradients and no loss": (
        Cause.EXP_OVERFLOW, [row("mine", works=False, kind="asked", loss=None), row("clamp_exponent")], ["clamp_exponent"], ["mine"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDER)
def test_fixes_are_those_that_work_the_best_first(name: str) -> None:
    """Finite gradients first, then what answers the cause, then the distortion of the healthy elements, then the natural order."""
    cause, rows, fixes, rejected = ORDER[name]
    found = fixes_of(SEEN, cause, rows)
    assert (names(found[0]), names(found[1])) == (fixes, rejected)
    assert all(fix.executed for fix in (*found[0], *found[1]))


def test_a_fix_says_what_came_out_and_where_it_goes() -> None:
    """The figures of its row, and file:line of the origin."""
    (fix,), (control,) = fixes_of(SEEN, Cause.EXP_OVERFLOW, [row("clamp_exponent", 0.25), row("clamp_after_op", None, works=False)])
    assert fix == Fix("clamp_exponent", "try clamp_exponent", "loss.py:12", True, True, 0.5, 0, 3, 0.25)
    assert control == Fix("clamp_after_op", "try clamp_after_op", "loss.py:12", True, False, 0.5, 1, 3, None)


@pytest.mark.parametrize("missing", ["file", "line"])
def test_where_is_not_said_of_what_has_no_line(missing: str) -> None:
    """An origin without a file or a line has no place."""
    nowhere = seen("exp", INF, 99.0, **{missing: None})
    ((tried,), _), ((advised,), _) = (fixes_of(nowhere, Cause.EXP_OVERFLOW, rows) for rows in ([row("clamp_exponent")], []))
    assert tried.where is None and advised.where is None


ADVISED: dict[str, tuple[Observation, Cause, list[Row], list[str]]] = {  # -> what is named, those that are only advised with a star
    "nothing was tried": (FILLED, Cause.INF_TIMES_ZERO_MASK, [], ["mask_before_op*", "clamp_exponent*", "finite_mask_fill*"]),
    "nothing of it works": (
        FILLED, Cause.INF_TIMES_ZERO_MASK, [row("clamp_exponent", works=False)], ["mask_before_op*", "finite_mask_fill*"],
    ),
    "what overflowed was filled in by nobody": (SEEN, Cause.INF_TIMES_ZERO_MASK, [], ["mask_before_op*", "clamp_exponent*"]),
    "a term of which some rows are 0 cannot be left out": (
        SEEN, Cause.INF_TIMES_ZERO_COEF, [row("clamp_input", works=False)], ["clamp_exponent*"],
    ),
    "whether they are nobody knows of a step that was not replayed": (
        SEEN, Cause.INF_TIMES_ZERO_COEF, [], ["clamp_exponent*", "skip_disabled_term*"],
    ),
    "all of it was tried in vain": (SEEN, Cause.EXP_OVERFLOW, [row("clamp_exponent", works=False)], []),
    "where something works nobody advises the rest": (SEEN, Cause.INF_TIMES_ZERO_MASK, [row("clamp_exponent")], ["clamp_exponent"]),
    "no edit of a step can go back to the one before": (SEEN, Cause.POISONED_WEIGHTS, [], ["fix_upstream*"]),
    "what is advised so comes before what works": (
        SEEN, Cause.HW_BITFLIP, [row("clamp_input")], ["fix_upstream*", "clamp_input"],
    ),
    "nor write memory": (SEEN, Cause.UNINITIALIZED, [row("clamp_input")], ["initialise_memory*", "clamp_input"]),
    "a clip by an infinite norm": (SEEN, Cause.INF_GRAD_NORM_CLIP, [row("clamp_input")], ["skip_bad_step*", "clamp_input"]),
    "nothing else is advised beside it": (SEEN, Cause.INF_GRAD_NORM_CLIP, [], ["skip_bad_step*"]),
    "a setting that is 0 is rejected when the run starts": (
        seen("div", INF, 1.0, 0.0, setting=True), Cause.ZERO_DENOMINATOR, [row("clamp_denominator")],
        ["validate_config*", "clamp_denominator"],
    ),
    "a number of the batch that is 0 is no setting": (
        seen("div", INF, 1.0, 0.0), Cause.ZERO_DENOMINATOR, [row("clamp_denominator")], ["clamp_denominator", "validate_config*"],
    ),
    "nothing is advised against the unknown": (SEEN, Cause.UNKNOWN, [], []),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVISED)
def test_what_cannot_be_tried_is_advised(name: str) -> None:
    """It was not executed, nobody claims that it works, and the advice is in words."""
    observation, cause, rows, expected = ADVISED[name]
    fixes, _ = fixes_of(observation, cause, rows)
    assert [fix.id + "*" * (not fix.executed) for fix in fixes] == expected
    assert all(fix.label == ADVICE[fix.id] and fix.works is None and fix.where == "loss.py:12" for fix in fixes if not fix.executed)


def test_a_rank_that_was_only_reached_is_sent_to_the_other_one() -> None:
    """On it nothing was done earlier: no checkpoint of its own helps."""
    (fix,), _ = fixes_of(SEEN, Cause.ALLREDUCE_NAN, [])
    assert (fix.id, fix.executed) == ("fix_upstream", False)
    assert "rank" in fix.label and "checkpoint" not in fix.label


@pytest.mark.parametrize("cause", Cause)
def test_every_fix_of_a_cause_can_be_advised(cause: Cause) -> None:
    """There are words for each of them."""
    assert {name for name in CAUSES[cause].fixes if name not in ADVICE} == set()


def minus(**known: Any) -> Observation:
    return seen("sub", NAN, INF, INF, **known)


RATHER: dict[str, tuple[Observation, Cause, list[str]]] = {  # what is known of the origin changes what is natural
    "the difference of two infinite log-probs": (
        minus(), Cause.INF_MINUS_INF, ["mask_before_op", "drop_invalid_sample", "finite_mask_fill"],
    ),
    "over a vocabulary, by its shape": (
        minus(shape=(2, 3, 4)), Cause.INF_MINUS_INF, ["finite_mask_fill", "mask_before_op", "drop_invalid_sample"],
    ),
    "over a vocabulary, by what made it": (
        minus(ancestors=("_log_softmax", "sub")), Cause.INF_MINUS_INF, ["finite_mask_fill", "mask_before_op", "drop_invalid_sample"],
    ),
    "by the other name of it": (
        minus(ancestors=("log_softmax",)), Cause.INF_MINUS_INF, ["finite_mask_fill", "mask_before_op", "drop_invalid_sample"],
    ),
    "of the tokens of a vocabulary that were picked": (
        minus(ancestors=("_log_softmax", "gather")), Cause.INF_MINUS_INF, ["mask_before_op", "drop_invalid_sample", "finite_mask_fill"],
    ),
    "by an index": (
        minus(ancestors=("_log_softmax", "index")), Cause.INF_MINUS_INF, ["mask_before_op", "drop_invalid_sample", "finite_mask_fill"],
    ),
    "another cause of that shape": (seen("exp", INF, 99.0, shape=(2, 3, 4)), Cause.EXP_OVERFLOW, ["clamp_exponent"]),
    "a logarithm": (seen("log", -INF, 0.0), Cause.LOG_ZERO, ["stable_function", "clamp_input"]),
    "a logarithm in half precision": (
        seen("log", -INF, 0.0, dtype="float16"), Cause.LOG_ZERO, ["stable_function", "upcast_fp32", "clamp_input"],
    ),
    "and in the other one": (
        seen("log", -INF, 0.0, dtype="bfloat16"), Cause.LOG_ZERO, ["stable_function", "upcast_fp32", "clamp_input"],
    ),
    "what a mask is multiplied onto": (seen("exp", INF, 99.0, multiplied=True), Cause.EXP_OVERFLOW, ["mask_before_op", "clamp_exponent"]),
    "where the mask comes first anyway": (
        seen("log", NAN, -1.0, multiplied=True), Cause.NAN_TIMES_ZERO_MASK, ["mask_before_op"],
    ),
    "an epsilon in the loss": (seen("div", INF, 1.0, 0.0), Cause.EPS_UNDERFLOW, ["upcast_fp32", "representable_eps"]),
    "an epsilon of the optimizer": (
        seen("div", INF, 1.0, 0.0, phase=Phase.OPTIMIZER, multiplied=True), Cause.EPS_UNDERFLOW, ["representable_eps", "upcast_fp32"],
    ),
    "another fault of the optimizer": (seen("div", INF, 1.0, 0.0, phase=Phase.OPTIMIZER), Cause.SQRT_NEGATIVE, ["clamp_input"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RATHER)
def test_the_natural_order_is_that_of_the_origin(name: str) -> None:
    """Tried or advised, the same order."""
    observation, cause, expected = RATHER[name]
    assert names(fixes_of(observation, cause, [row(fix) for fix in sorted(expected)])[0]) == expected
    assert names(fixes_of(observation, cause, [])[0]) == expected


def test_an_update_has_no_samples() -> None:
    """What acts on a batch is no advice for the optimizer."""
    update = seen("input", NAN, phase=Phase.OPTIMIZER, multiplied=True)
    assert names(fixes_of(update, Cause.BAD_INPUT, [])[0]) == []
    assert names(fixes_of(update, Cause.ZERO_DIV_ZERO, [])[0]) == ["clamp_denominator"]


def test_no_advice_is_given_twice() -> None:
    """Also where a mask is multiplied onto the difference of two infinities over a vocabulary."""
    advised = names(fixes_of(minus(shape=(2, 3, 4), multiplied=True), Cause.INF_MINUS_INF, [])[0])
    assert len(advised) == len(set(advised))
