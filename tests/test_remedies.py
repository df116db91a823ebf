"""Remedies: what helps in a framework's own words, and nothing that cannot apply to the step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nanscope.causes import Cause
from nanscope.frameworks.rows import Framework, Remedy, Term
from nanscope.frameworks.table import FRAMEWORKS
from nanscope.snapshot.observation import FOLK, Origin, Row
from nanscope.verdict.remedies import known, parsed, remedies

EXP = (str(Cause.EXP_OVERFLOW),)


def framework(*remedies: Remedy, guards: tuple[str, ...] = ()) -> Framework:
    return Framework("tiny", "tiny", "1.0", ("tiny/",), remedies=remedies, guards=guards)


def origin(role: str | None = None, module: str = "") -> Origin:
    return Origin("exp", (0, 1), (2, 3), math.inf, "float32", role=role, module=module)


CLAMP = Remedy(("exp_overflow", "inf_times_zero_mask"), "clamps the log-ratio", "clamp=20")
UPGRADE = Remedy(EXP, "upgrade to 1.1")


def test_remedies_are_in_the_frameworks_own_words() -> None:
    """With the setting where there is one, and what it guards against already only where something helps."""
    given = framework(CLAMP, UPGRADE, guards=("skips a step with an infinite norm",))
    unset = {"clamp": None}
    assert remedies(given, Cause.EXP_OVERFLOW, origin(), unset) == (
        "clamp=20: clamps the log-ratio",
        "upgrade to 1.1",
        "already there: skips a step with an infinite norm",
    )
    assert remedies(given, Cause.INF_TIMES_ZERO_MASK, origin(), unset)[0] == "clamp=20: clamps the log-ratio"
    assert remedies(given, Cause.LOG_ZERO, origin(), unset) == ()
    assert remedies(None, Cause.EXP_OVERFLOW, origin(), unset) == ()


@pytest.mark.parametrize(
    ("value", "role", "helps"), [(-math.inf, "old_log_probs", True), (math.nan, "old_log_probs", False), (-math.inf, "mask", False)]
)
def test_what_bounds_exp_helps_a_log_prob_that_came_in_infinite(value: float, role: str, helps: bool) -> None:
    """A sampler reports −inf for what it cuts off: a clamp of the log-ratio takes that, and no NaN."""
    came = Origin("input", (0, 1), (2, 3), value, "float32", role=role)
    assert remedies(framework(CLAMP), Cause.BAD_INPUT, came, {"clamp": None}) == (("clamp=20: clamps the log-ratio",) if helps else ())


BETA = Remedy(EXP, "leaves the KL out", "beta=0.0", Term.KL)
HEAD = Remedy(EXP, "in float32", "--model.cast-head", Term.HEAD)
RATIO = Remedy(EXP, "token by token", 'level="token"', Term.RATIO, unless=(("on_policy", True),))
PATCH = Remedy(EXP, "patch the line", None, Term.KL)

LINES: tuple[tuple[str, Remedy, str | None, str, dict[str, Any], str], ...] = (  # -> the line, "" for none
    ("it is not so, and it helps there", BETA, "kl", "", {"beta": 0.04}, "beta=0.0: leaves the KL out"),
    ("it is so already", BETA, "kl", "", {"beta": 0}, ""),
    ("as text, too", BETA, "kl", "", {"beta": "0.0"}, ""),
    ("nobody saw what it is", BETA, "kl", "", {}, "beta=0.0, if it is not so already: leaves the KL out"),
    ("nothing tells whose log-ratio it is", BETA, "log_ratio", "", {"beta": 1.0}, "beta=0.0, if the origin lies in the KL term: leaves the KL out"),
    ("neither", BETA, None, "", {}, "beta=0.0, if it is not so already and the origin lies in the KL term: leaves the KL out"),
    ("the origin lies in another term", BETA, "ratio", "", {"beta": 1.0}, ""),
    ("the origin lies in the model", BETA, None, "model.layers.3.mlp", {"beta": 1.0}, ""),
    ("a flag that is set", HEAD, "logits", "", {"cast_head": True}, ""),
    ("a flag that is not", HEAD, "logits", "", {"cast_head": False}, "--model.cast-head: in float32"),
    ("the overflow of an adapter", HEAD, "hidden", "model.layers.0.q_proj.lora_A.default", {"cast_head": False}, ""),
    ("that of the head", HEAD, "hidden", "model.lm_head", {"cast_head": False}, "--model.cast-head: in float32"),
    ("another setting makes it idle", RATIO, "ratio", "", {"level": "sequence", "on_policy": True}, ""),
    ("and does not", RATIO, "ratio", "", {"level": "sequence", "on_policy": False}, 'level="token": token by token'),
    ("quotes are no part of a value", RATIO, "ratio", "", {"level": "token"}, ""),
    ("no setting, elsewhere", PATCH, "entropy", "", {}, ""),
    ("no setting, perhaps there", PATCH, None, "", {}, "if the origin lies in the KL term: patch the line"),
)  # fmt: skip


@pytest.mark.parametrize(("remedy", "role", "module", "settings", "line"), [row[1:] for row in LINES], ids=[row[0] for row in LINES])
def test_a_remedy_that_cannot_apply_is_not_shown(
    remedy: Remedy, role: str | None, module: str, settings: dict[str, Any], line: str
) -> None:
    """One whose setting is so already, or that acts where the origin is not; what is not known stands as a condition."""
    assert remedies(framework(remedy), Cause.EXP_OVERFLOW, origin(role, module), settings) == ((line,) if line else ())


@pytest.mark.parametrize("given", FRAMEWORKS, ids=lambda given: given.name)
def test_no_framework_is_advised_what_it_does_already(given: Framework) -> None:
    """Under every cause, wherever the origin lies: a setting that is so already is never named."""
    for remedy in given.remedies:
        if remedy.setting is None:
            continue
        option, advised = parsed(remedy)
        for cause in remedy.causes:
            for role in (None, "kl", "ratio", "is_weight", "logits", "advantages", "entropy"):
                lines = remedies(given, Cause(cause), origin(role), {option: advised})
                assert not any(line.startswith((f"{remedy.setting}:", f"{remedy.setting},")) for line in lines)


@pytest.mark.parametrize("given", FRAMEWORKS, ids=lambda given: given.name)
def test_every_option_that_a_loss_has_is_known_by_its_name(given: Framework) -> None:
    """What a remedy names and `unless` asks is what the losses of the framework are run under, where they have it."""
    names = {name for loss in given.losses for name in loss.defaults()} | {name for loss in given.losses for name, _ in loss.fixed}
    for remedy in given.remedies:
        assert {name for name, _ in remedy.unless} <= names | set(given.settings), remedy


def test_what_the_key_of_a_loss_decides_is_known() -> None:
    """Besides the trainer's settings and those that were found live, which are nearer."""
    found = known({"beta": 0.1, "bf16": True}, {"key": "trl.cispo", "settings": {"beta": 0.0}})
    assert (found["loss_type"], found["beta"], found["bf16"]) == ("cispo", 0.0, True)
    assert known({}, {}) == {}


@pytest.mark.parametrize(("works", "line"), [(True, "clamps the log-ratio; tried on this step, it would have helped"), (False, "")])
def test_a_setting_that_was_tried_is_told_by_what_came_of_it(works: bool, line: str) -> None:
    """What the row says in general gives way to this step: where it did not help it is not advised."""
    row = Row("clamp", "actor.clamp=20", FOLK, 0.5 if works else math.nan, 0 if works else 1, 1, None, works)
    told = remedies(framework(CLAMP, UPGRADE), Cause.EXP_OVERFLOW, origin(), {}, (row,))
    assert told == ((f"clamp=20: {line}",) if line else ()) + ("upgrade to 1.1",)
    unrun = Row("clamp", "actor.clamp=20", FOLK, None, 0, 0, None, False, "it is so already")
    assert len(remedies(framework(CLAMP, UPGRADE), Cause.EXP_OVERFLOW, origin(), {}, (unrun,))) == 2


def test_another_trainer_of_the_framework_is_advised_nothing_that_it_has_not() -> None:
    """Of the options that TRL's trainers share GRPO has all, and DPO a few, of which one is called the same and is another."""
    trl = next(one for one in FRAMEWORKS if one.name == "TRL")
    seen = {"beta": 0.1, "learning_rate": 1e-6, "max_grad_norm": 1.0}
    for cause in (Cause.EXP_OVERFLOW, Cause.INF_TIMES_ZERO_COEF, Cause.BAD_INPUT):
        for role in (None, "kl", "ratio", "advantages", "is_weight"):
            assert remedies(trl, cause, origin(role), {**seen, "loss_type": "sigmoid"}) == ()
    assert remedies(trl, Cause.EXP_OVERFLOW, origin("ratio"), {}) != ()
