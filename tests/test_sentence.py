"""The sentence: what happened, why, and how far it got, word for word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import record
from seen import INF, NAN, seen
from torch import Tensor

import nanscope
from nanscope.causes import CAUSES, Cause
from nanscope.locate.location import spotted
from nanscope.program.calls import Call, Leaf, Ref
from nanscope.program.program import Program
from nanscope.snapshot.observation import Kind, Observation, Past, Phase
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.sentence import absorbed, sentence

UNKNOWN = Reached()


def ratio(**known: Any) -> Observation:
    return seen("exp", INF, 99.0, **{"variable": "ratio", "expression": "torch.exp(log_ratio)", "limit": 88.72, **known})


def told(observation: Observation, cause: Cause = Cause.UNKNOWN, reached: Reached = UNKNOWN) -> str:
    return sentence(Snapshot(7, 0, Program((), (), -1), {}, None, {}, reached), observation, cause)


RECORDED = Program((Leaf(0, "x", "data", False, ""),), (Call("aten.exp.default", (Ref(0),), (), (1,)),), 1)
RATIO = "ratio = torch.exp(log_ratio) overflowed to +inf at [0, 1] of [2, 3]"
EXP = "loss.py:12: exp(99) = +inf, float32 ends at exp(88.72)."
ARRIVED: dict[str, Any] = {"phase": Phase.BACKWARD, "kind": Kind.ARRIVED}
UPDATE: dict[str, Any] = {"phase": Phase.OPTIMIZER, "optimizer": "AdamW"}

WHAT = {  # what happened: observation -> sentence
    # a call of the loss
    "an exponential says where its dtype ends": (ratio(), f"{RATIO}, {EXP}"),
    "nothing but an expression": (ratio(variable=None), f"torch.exp(log_ratio) overflowed to +inf at [0, 1] of [2, 3], {EXP}"),
    "nothing but a variable": (ratio(expression=None), f"ratio overflowed to +inf at [0, 1] of [2, 3], {EXP}"),
    "nothing but an operator": (seen("mul", NAN, 0.0, INF), "mul gave NaN at [0, 1] of [2, 3], loss.py:12: mul(0, +inf) = NaN."),
    "minus infinity": (seen("log", -INF, 0.0, variable="p"), "p gave −inf at [0, 1] of [2, 3], loss.py:12: log(0) = −inf."),
    "NaN of an exponential has no limit": (ratio(limit=None), f"{RATIO}, loss.py:12: exp(99) = +inf."),
    "all operands are told": (seen("addcdiv", NAN, 1.0, 0.0, 0.0), "addcdiv gave NaN at [0, 1] of [2, 3], loss.py:12: addcdiv(1, 0, 0) = NaN."),
    "of a product of matrices its largest factors": (seen("mm", INF, 3e38, -0.9), "mm overflowed to +inf at [0, 1] of [2, 3], loss.py:12: mm(…) = +inf, a sum of products of numbers up to 3e+38 and 0.9."),
    "of a sum no operand is told": (seen("sum", INF, 3.0), "sum overflowed to +inf at [0, 1] of [2, 3], loss.py:12: sum(…) = +inf."),
    "a division by zero is no overflow": (seen("div", INF, 1.0, 0.0), "div gave +inf at [0, 1] of [2, 3], loss.py:12: div(1, 0) = +inf."),
    "nor is a negative power of zero": (seen("pow", INF, 0.0), "pow gave +inf at [0, 1] of [2, 3], loss.py:12: pow(0) = +inf."),
    "a quotient may overflow": (seen("div", INF, 1e38, 1e-3), "div overflowed to +inf at [0, 1] of [2, 3], loss.py:12: div(1e+38, 0.001) = +inf."),
    "nor of a softmax": (seen("_log_softmax", NAN, -INF), "_log_softmax gave NaN at [0, 1] of [2, 3], loss.py:12: _log_softmax(…) = NaN."),
    "a scalar has no index": (seen("div", NAN, 0.0, 0.0, index=(), shape=()), "div gave NaN, loss.py:12: div(0, 0) = NaN."),
    "no file": (seen("div", NAN, 0.0, 0.0, file=None), "div gave NaN at [0, 1] of [2, 3], an unknown line: div(0, 0) = NaN."),
    "no line": (seen("div", NAN, 0.0, 0.0, line=None), "div gave NaN at [0, 1] of [2, 3], an unknown line: div(0, 0) = NaN."),
    "finite in forward": (
        seen("sqrt", 0.0, 0.0, variable="norm", expression="x.sqrt()", phase=Phase.BACKWARD),
        "the gradient of norm = x.sqrt() is not finite at [0, 1] of [2, 3], loss.py:12: sqrt(0) = 0.",
    ),
    # inside and outside the loss
    "multiplied by a mask": (
        ratio(masked=True, masked_by="multiplied by mask = 0"),
        f"{RATIO} at a token that the loss does not count (multiplied by mask = 0), {EXP}",
    ),
    "on the side that was not picked": (
        ratio(masked=True, masked_by="minimum picked the other side"),
        f"{RATIO} at a token where minimum picked the other side, {EXP}",
    ),
    "masked, nobody knows by what": (ratio(masked=True), f"{RATIO} at a token outside the loss, {EXP}"),
    "counted": (ratio(masked=False, masked_by="multiplied by mask = 0"), f"{RATIO}, {EXP}"),
    "masked, and no token": (
        ratio(masked=True, index=(1,), shape=(3,)),
        f"ratio = torch.exp(log_ratio) overflowed to +inf at [1] of [3] at an element outside the loss, {EXP}",
    ),
    # the batch
    "came in": (
        seen("input", NAN, phase=Phase.INPUT, variable="rewards", extent="the whole row 0"),
        "rewards came in as NaN at [0, 1] of [2, 3] (the whole row 0), read at loss.py:12.",
    ),
    "came in, masked and without a name": (
        seen("input", -INF, phase=Phase.INPUT, masked=True, masked_by="not selected by mask"),
        "a tensor of the batch came in as −inf at [0, 1] of [2, 3] at a token that the loss does not count (not selected by mask), "
        "read at loss.py:12.",
    ),
    "came in, under a name that tells nothing": (
        seen("input", -INF, phase=Phase.INPUT, variable="tensor", role="old_log_probs"),
        "tensor (old_log_probs) came in as −inf at [0, 1] of [2, 3], read at loss.py:12.",
    ),
    "came in, under a name that tells": (
        seen("input", -INF, phase=Phase.INPUT, variable="old_logps", role="old_log_probs"),
        "old_logps came in as −inf at [0, 1] of [2, 3], read at loss.py:12.",
    ),
    "of memory that was never written it matters not how much is bad": (
        seen("input", NAN, phase=Phase.INPUT, variable="buffer", unwritten=True, extent="3 of 6 elements"),
        "buffer came in as NaN at [0, 1] of [2, 3], read at loss.py:12.",
    ),
    # weights
    "a weight that was bad before": (
        seen("parameter", NAN, phase=Phase.WEIGHTS, variable="lm_head.weight"),
        "the weight lm_head.weight was already NaN at [0, 1] of [2, 3] before the step.",
    ),
    "a weight that an earlier step of this run wrote": (
        seen("parameter", NAN, phase=Phase.WEIGHTS, variable="lm_head.weight", poisoned_at=6),
        "the weight lm_head.weight was already NaN at [0, 1] of [2, 3]: the update of step 6 wrote it there.",
    ),
    "a weight that was finite once": (
        seen("parameter", NAN, phase=Phase.WEIGHTS, variable="q.weight", past=Past(2)),
        "the weight q.weight was already NaN at [0, 1] of [2, 3] before the step: it was finite in step 2, and what wrote it since was not seen.",
    ),
    "a weight that a line has written to": (
        seen("parameter", NAN, phase=Phase.WEIGHTS, variable="q.weight", past=Past(2, "m.load(x)", "/home/x/loop.py", 7)),
        "the weight q.weight was already NaN at [0, 1] of [2, 3] before the step: m.load(x) wrote it there, loop.py:7, "
        "and it was finite in step 2.",
    ),
    "a weight that is found later": (
        seen("parameter", NAN, phase=Phase.WEIGHTS, variable="q.weight", past=Past(found="when the block ended")),
        "the weight q.weight is NaN at [0, 1] of [2, 3] when the block ended.",
    ),
    "a weight without a name": (
        seen("parameter", NAN, phase=Phase.WEIGHTS), "a weight was already NaN at [0, 1] of [2, 3] before the step.",
    ),
    "a weight that is called weight": (
        seen("parameter", NAN, phase=Phase.WEIGHTS, variable="weight"), "a weight was already NaN at [0, 1] of [2, 3] before the step.",
    ),
    "a flipped bit": (
        seen("parameter", 1.5e38, phase=Phase.WEIGHTS, variable="q.weight", poisoned_at=6),
        "the weight q.weight is 1.5e+38 at [0, 1] of [2, 3], many orders of magnitude beyond every other element of it.",
    ),
    # the optimizer
    "an update that was made again": (
        seen("div", NAN, 0.0, 0.0, weight="q.weight", masked=True, **UPDATE),
        "the update of AdamW made q.weight non-finite: div gave NaN at [0, 1] of [2, 3], loss.py:12: div(0, 0) = NaN.",
    ),
    "an update of a scalar": (
        seen("div", NAN, 0.0, 0.0, weight="scale", index=(), shape=(), **UPDATE),
        "the update of AdamW made scale non-finite: div gave NaN, loss.py:12: div(0, 0) = NaN.",
    ),
    "an update of which nothing but the result was seen": (
        seen("addcdiv", NAN, variable="q.weight", **UPDATE), "the update of AdamW made q.weight NaN at [0, 1] of [2, 3].",
    ),
    "an update by an unknown op": (
        seen("unknown", NAN, 1.0, weight="w", phase=Phase.OPTIMIZER), "the update of the optimizer made w NaN at [0, 1] of [2, 3], loss.py:12.",
    ),
    "an update of a weight that was not named": (
        seen("addcdiv", NAN, 1.0, **UPDATE), "the update of AdamW made a weight NaN at [0, 1] of [2, 3].",
    ),
    # the model
    "out of the model": (seen("module", NAN, variable="logits"), "logits came out of the model as NaN at [0, 1] of [2, 3]."),
    "out of the model, a nameless scalar": (seen("unknown", NAN, index=(), shape=()), "a value came out of the model as NaN."),
    # code that is no model, and was not recorded
    "out of what was not recorded": (
        seen("opaque", NAN, variable="h"), "h was NaN at [0, 1] of [2, 3] when it came out of code that was not recorded, read at loss.py:12.",
    ),
    "out of what was not recorded, and nobody knows where": (
        seen("cut", -INF, file=None), "a value was −inf at [0, 1] of [2, 3] when it came out of calls that were not kept.",
    ),
    # another rank
    "arrived": (
        seen("all_reduce", NAN, variable="q.weight", source="rank 1: it overflowed.", **ARRIVED),
        "the gradient of q.weight is NaN at [0, 1] of [2, 3], while this rank's own backward gives finite numbers: "
        "it came by all-reduce. rank 1: it overflowed.",
    ),
    "arrived from who knows where": (
        seen("all_reduce", NAN, **ARRIVED),
        "the gradient of a weight is NaN at [0, 1] of [2, 3], while this rank's own backward gives finite numbers: it came by all-reduce.",
    ),
}  # fmt: skip

END = {  # how far it got: reached -> end of the sentence
    "nothing is known": (Reached(), ""),
    "the loss is bad": (Reached(NAN), " The loss is NaN."),
    "the loss is finite": (Reached(0.25), " The loss stays finite (0.25)."),
    "nothing but the loss": (Reached(INF, 3, 0, 3, 0), " The loss is +inf, weights and gradients stayed clean."),
    "nobody counted gradients": (Reached(0.25, None, None, 3, 0), " The loss stays finite (0.25)."),
    "there were no gradients": (Reached(0.25, 0, 0), " The loss stays finite (0.25)."),
    "one gradient of one": (Reached(0.25, 1, 1), " The loss stays finite (0.25), its gradient is non-finite."),
    "all gradients": (Reached(0.25, 3, 3), " The loss stays finite (0.25), all 3 gradients are non-finite."),
    "some gradients": (Reached(0.25, 3, 2), " The loss stays finite (0.25), 2 of 3 gradients are non-finite."),
    "one weight": (Reached(None, 3, 3, 3, 1), " All 3 gradients are non-finite, the update wrote it into 1 weight."),
    "two weights": (Reached(0.25, 3, 0, 3, 2), " The loss stays finite (0.25), the update wrote it into 2 weights."),
    "skipped": (
        Reached(0.25, 3, 1, 3, 0, "skipped"),
        " The loss stays finite (0.25), 1 of 3 gradients are non-finite, the optimizer step was skipped and the weights stayed clean.",
    ),
    "stopped": (Reached(0.25, 3, 1, stepped="stopped"), " The loss stays finite (0.25), 1 of 3 gradients are non-finite."),
}  # fmt: skip

ODD = {  # steps that are ruined with finite numbers: observation, what it reached -> sentence
    "a clip": (
        seen("linalg_vector_norm", 1e30, 1e30, variable="w", phase=Phase.BACKWARD, kind=Kind.CLIP), Reached(0.5, 2, 0),
        "the gradient of w is 1e+30 at [0, 1] of [2, 3], and the norm of all gradients overflows, loss.py:12. "
        "The clip made every gradient exactly 0: nothing is non-finite any more, and the step is lost.",
    ),
    "a clip that left NaN": (
        seen("linalg_vector_norm", 1e30, 1e30, variable="w", phase=Phase.BACKWARD, kind=Kind.CLIP), Reached(0.5, 2, 1),
        "the gradient of w is 1e+30 at [0, 1] of [2, 3], and the norm of all gradients overflows, loss.py:12. "
        "The loss stays finite (0.5), 1 of 2 gradients are non-finite.",
    ),
    "swallowed": (
        ratio(kind=Kind.SWALLOWED), Reached(0.5, 2, 0),
        f"{RATIO}, {EXP} The kernel drops it: the loss stays finite (0.5), and the step learnt from the wrong ratio.",
    ),
    "a spike": (
        seen("div", 1e12, 1.0, 1e-12, kind=Kind.SPIKE, scale="1e9 times the largest loss of the 4 steps before"), Reached(1e12, 2, 0),
        "div became 1e+12 at [0, 1] of [2, 3], loss.py:12: div(1, 1e−12) = 1e+12. "
        "Everything is finite, but the loss is 1e+12 and the step is 1e9 times the largest loss of the 4 steps before.",
    ),
    "a spike of which no scale is known": (
        seen("div", 1e12, 1.0, 1e-12, kind=Kind.SPIKE), Reached(None),
        "div became 1e+12 at [0, 1] of [2, 3], loss.py:12: div(1, 1e−12) = 1e+12. "
        "Everything is finite, but the loss is – and the step is out of scale.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHAT)
def test_what_happened(name: str) -> None:
    """Every branch, with the numbers of the step."""
    observation, expected = WHAT[name]
    assert told(observation) == expected


@pytest.mark.parametrize("name", END)
def test_how_far_it_got(name: str) -> None:
    """Loss, gradients, weights, and what became of the step; nothing is said of what nobody looked at."""
    reached, expected = END[name]
    assert told(ratio(), reached=reached) == f"{RATIO}, {EXP}{expected}"


@pytest.mark.parametrize("name", ODD)
def test_a_step_that_is_ruined_with_finite_numbers(name: str) -> None:
    """It is not said that something is clean where the step is lost."""
    observation, reached, expected = ODD[name]
    assert told(observation, reached=reached) == expected


@pytest.mark.parametrize("cause", Cause)
def test_the_cause_stands_between(cause: Cause) -> None:
    """As a sentence of its own, and of an unknown one nothing."""
    titles = ("",) if cause is Cause.UNKNOWN else (CAUSES[cause].title, *CAUSES[cause].varieties)
    between = [f" {title[0].upper()}{title[1:]}." if title else "" for title in titles]
    assert told(ratio(), cause, Reached(NAN)) in [f"{RATIO}, {EXP}{words} The loss is NaN." for words in between]


VARIETIES = (
    (Cause.LOG_ZERO, seen("log", -INF, 0.0), "The logarithm of 0."),
    (Cause.LOG_ZERO, seen("log1p", NAN, -2.0), "The logarithm of a negative number."),
    (Cause.LOG_ZERO, seen("log", -96.0, 1e-42, phase=Phase.BACKWARD), "The logarithm of a number so small that its gradient overflows."),
    (Cause.EXP_OVERFLOW, seen("exp", INF, 99.0, masked=True), "Exp overflows, where the loss does not count it."),
    (Cause.SQRT_ZERO_GRAD, seen("acos", 0.0, 1.0, phase=Phase.BACKWARD), "A gradient that is infinite at the end of a domain."),
    (Cause.SQRT_ZERO_GRAD, seen("sqrt", 0.0, 0.0, phase=Phase.BACKWARD), "The gradient of a square root at 0."),
    (Cause.MAGNITUDE_OVERFLOW, seen("div", -INF, -0.3, 1e-41), "A quotient of finite numbers leaves the dtype's range."),
    (Cause.MAGNITUDE_OVERFLOW, seen("mm", INF, 3e38, 0.9), "A huge finite value is squared or summed beyond the dtype's range."),
    (Cause.MAGNITUDE_OVERFLOW, seen("_to_copy", INF, 7e39), "A finite value leaves the dtype's range."),
)


@pytest.mark.parametrize(("cause", "observation", "words"), VARIETIES)
def test_the_cause_is_told_as_its_numbers_ask_for(cause: Cause, observation: Observation, words: str) -> None:
    """No logarithm of 0 over a tiny number, no square over a quotient."""
    assert f" {words} The loss is NaN." in told(observation, cause, Reached(NAN))


@pytest.mark.parametrize("phase", [Phase.INPUT, Phase.WEIGHTS, Phase.OPTIMIZER])
def test_a_scalar_is_told_without_an_index(phase: Phase) -> None:
    """A temperature that came in as NaN, a scale that was NaN before the step."""
    words = told(seen("input", NAN, phase=phase, index=(), shape=()))
    assert " at ," not in words and " at ." not in words and " at  " not in words


def named(x: Tensor) -> Tensor:
    scale = torch.exp(x.detach())
    return scale.clamp(max=2.0).mean() * x.mean()


def other(x: Tensor) -> Tensor:
    return torch.where(x > 50, x, torch.exp(x.detach())).mean()


def masked(x: Tensor) -> Tensor:
    return torch.where(x > 50, 0.0, torch.exp(x.detach())).mean() * x.mean()


@pytest.mark.parametrize(("loss", "name"), [(named, "scale"), (other, "torch.exp(x.detach())"), (masked, "torch.exp(x.detach())")])
def test_what_was_absorbed_is_said_with_its_line(loss: Any, name: str) -> None:
    """Which value, where, and that nothing came of it."""
    recorded = record(loss, torch.tensor([[1.0, 99.0]], requires_grad=True))
    location = spotted(recorded.trace)
    assert location is not None
    line = location.origin.site.line if location.origin.site else 0
    counted = ", for which the loss counts another number" if loss is not masked else " at a position that the loss does not count"
    assert absorbed(location, 3) == (
        f"{name} was +inf at [0, 1]{counted} (test_sentence.py:{line}, step 3), and it was absorbed: "
        "loss is finite, weights and gradients stayed clean"
    )


@pytest.mark.parametrize(
    ("program", "notes", "expected"),
    [
        (Program((), (), -1), (), "nobody saw where it went bad: the loss was not recorded."),
        (
            RECORDED,
            (),
            "nobody saw where it went bad: what was recorded of the loss is fine when it is run again: "
            "numpy or another process may have written to what it read.",
        ),
        (RECORDED, (("not_looked_into", "it failed"),), "it is not known where it went bad: looking into what was recorded failed."),
        (RECORDED, (("not_replayed", "it failed"),), "it is not known where it went bad: looking into what was recorded failed."),
    ],
    ids=["not recorded", "fine again", "not looked into", "not replayed"],
)
def test_why_nobody_knows_where_it_went_bad(program: Program, notes: tuple[tuple[str, str], ...], expected: str) -> None:
    """Nothing is said of a recording that the step itself contradicts."""
    snapshot = Snapshot(7, 0, program, {}, None, {}, Reached(NAN), notes=notes)
    assert sentence(snapshot, Observation(phase=Phase.FORWARD), Cause.UNKNOWN) == f"{expected} The loss is NaN."


def test_a_mean_of_a_row_that_is_masked_whole_is_itself_counted(tmp_path: Path) -> None:
    """Its tokens are not; the loss is NaN since it counts the mean."""
    log_probs, mask = torch.full((4, 5), -1.0, requires_grad=True), torch.ones(4, 5)
    mask[2] = 0
    with nanscope.watch(out=tmp_path) as scope:
        per_row = (log_probs * mask).sum(-1) / mask.sum(-1)
        per_row.mean().backward()
    assert (
        "gave NaN at [2] of [4], made of tokens that the loss does not count (multiplied by mask = 0), test_sentence.py"
        in scope.verdict.sentence
    )
