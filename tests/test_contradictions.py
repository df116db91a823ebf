"""No sentence contradicts its own origin, operands, mask or phase: on planted programs of every kind, under every cause whose facts hold."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from contradictions import contradictions
from recorded import Recorded, record
from seen import INF, NAN, seen
from test_planted import planted_program
from torch import Tensor
from torch.nn import functional

from nanscope.causes import Cause
from nanscope.locate.observe import observe
from nanscope.snapshot.observation import Observation
from nanscope.verdict.rules import causes_of
from nanscope.verdict.sentence import sentence

PLANTED = 700  # random programs
FIRST = 50_000  # their seeds: others than those of test_planted
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")


def said_of(recorded: Recorded) -> list[str]:
    """What is said of a step and is not so, under each cause that it may get."""
    location = recorded.location
    if location is None:
        return []
    found, snapshot = observe(location, recorded.trace), recorded.snapshot()
    return [
        words
        for cause in {*causes_of(found), Cause.UNKNOWN}
        for words in contradictions(found.origin, str(found.phase), cause, sentence(snapshot, found, cause), found.blame)
    ]


@pytest.mark.parametrize("block", range(10))
def test_no_sentence_about_a_planted_program_contradicts_it(block: int) -> None:
    """Random losses with random faults: a tenth of them each."""
    wrong = {}
    for seed in range(FIRST + block * PLANTED // 10, FIRST + (block + 1) * PLANTED // 10):
        planted = planted_program(seed)
        if told := said_of(record(planted.function(), *planted.arguments(planted.leaves))):
            wrong[str(planted)] = told
    assert wrong == {}


@dataclass(frozen=True)
class Fault:
    """An op on `x`, and the number in x that makes it bad. y: harmless data, except at the same element, where it is `other`."""

    name: str
    op: Callable[[Tensor, Tensor], Tensor]
    number: dict[torch.dtype, float]
    other: float = 0.5


def always(number: float) -> dict[torch.dtype, float]:
    return dict.fromkeys(DTYPES, number)


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EXPONENT = {torch.float32: 120.0, torch.bfloat16: 120.0, torch.float16: 15.0, torch.float64: 900.0}
FACTOR = {torch.float32: 1e25, torch.bfloat16: 1e25, torch.float16: 900.0, torch.float64: 1e200}
TERM = {torch.float32: 3e38, torch.bfloat16: 3e38, torch.float16: 6e4, torch.float64: 1.7e308}
TINY = {torch.float32: 1e-42, torch.bfloat16: 1e-39, torch.float16: 1e-6, torch.float64: 1e-310}

FAULTS = (
    Fault("exp", lambda x, y: x.exp(), EXPONENT),
    Fault("exp of a difference", lambda x, y: (x - y).exp(), EXPONENT),
    Fault("expm1", lambda x, y: torch.expm1(x), EXPONENT),
    Fault("square", lambda x, y: x.square(), FACTOR),
    Fault("x times x", lambda x, y: x * x, FACTOR),
    Fault("times a number", lambda x, y: x * 2.5, TERM),
    Fault("a number times", lambda x, y: 4.0 * x, TERM),
    Fault("times nan", lambda x, y: torch.where(x > 1, x, 1.0) * float("nan"), always(2.0)),
    Fault("scaled sum", lambda x, y: torch.add(y, x, alpha=3), TERM),
    Fault("scaled difference", lambda x, y: torch.sub(y, x, alpha=3), TERM),
    Fault("a number less", lambda x, y: -6e4 - x * 1.0, TERM),
    Fault("addcmul", lambda x, y: torch.addcmul(y, x, x, value=0.5), FACTOR),
    Fault("addcdiv", lambda x, y: torch.addcdiv(y, y, x, value=-0.5), always(0.0)),
    Fault("lerp", lambda x, y: torch.lerp(y, x, 9.0), TERM),
    Fault("by a tiny number", lambda x, y: y / x, TINY, other=1.0),
    Fault("by zero", lambda x, y: y / x, always(0.0)),
    Fault("zero by zero", lambda x, y: y / x, always(0.0), other=0.0),
    Fault("by a number of zero", lambda x, y: x / 0.0, always(2.0)),
    Fault("reciprocal", lambda x, y: 1 / x, always(0.0)),
    Fault("log", lambda x, y: x.log(), always(0.0)),
    Fault("log of less", lambda x, y: x.log(), always(-1.0)),
    Fault("log1p", lambda x, y: torch.log1p(x), always(-1.0)),
    Fault("p log p", lambda x, y: x * x.log(), always(0.0)),
    Fault("xlogy", lambda x, y: torch.xlogy(y, x), always(0.0)),
    Fault("sqrt", lambda x, y: x.sqrt(), always(-1.0)),
    Fault("sqrt at zero", lambda x, y: x.sqrt(), always(0.0)),
    Fault("rsqrt", lambda x, y: x.rsqrt(), always(0.0)),
    Fault("power", lambda x, y: x**3, FACTOR),
    Fault("power of two numbers", lambda x, y: torch.pow(x, y), FACTOR, other=3.0),
    Fault("number to the power", lambda x, y: torch.pow(3.0, x), EXPONENT),
    Fault("acos", lambda x, y: x.clamp(-1, 1).acos(), always(1.0)),
    Fault("acosh", lambda x, y: torch.acosh(x), always(0.5)),
    Fault("atanh", lambda x, y: torch.atanh(x), always(1.0)),
    Fault("inf less inf", lambda x, y: torch.where(x > 1, math.inf, x) - torch.where(x > 1, math.inf, y), always(2.0)),
    Fault("softmax of nothing", lambda x, y: torch.where(x > 1, -math.inf, 0.0).to(x.dtype).amin(-1, keepdim=True).expand_as(x).add(x * 0).softmax(-1), always(2.0)),
    Fault("logsumexp of infinities", lambda x, y: (x * 0 + torch.where(x > 1, math.inf, -math.inf).to(x.dtype)).logsumexp(-1, keepdim=True).expand_as(x) * 0.5, always(2.0)),
    Fault("matrix product", lambda x, y: x @ y.transpose(-1, -2) @ y, TERM, other=9.0),
    Fault("whole sum", lambda x, y: x.sum(-1, keepdim=True) + y, TERM),
    Fault("running sum", lambda x, y: (x.cumsum(-1) + x.cumsum(-1)) * 0.5, TERM),
    Fault("deviation", lambda x, y: x[..., :1].std(-1, keepdim=True) + y, always(1.0)),
    Fault("mean loss", lambda x, y: functional.mse_loss(x, y) + y, FACTOR),
    Fault("loss of each", lambda x, y: functional.mse_loss(x, y, reduction="none"), FACTOR),
    Fault("norm", lambda x, y: torch.linalg.vector_norm(x, dim=-1, keepdim=True) + y, FACTOR),
    Fault("came in", lambda x, y: x * y, always(NAN)),
    Fault("came in as infinite", lambda x, y: x * y, always(INF)),
    Fault("cast", lambda x, y: (x.float() * 1e30).half().to(x.dtype) + y, always(2.0)),
    Fault("steep logarithm", lambda x, y: (x * 1.0).log(), TINY),
    Fault("gelu", lambda x, y: functional.gelu(x) * 3, TERM),
    Fault("softplus", lambda x, y: functional.softplus(x, beta=3.0) * 3, TERM),
    Fault("hypot", lambda x, y: torch.hypot(x, x), TERM),
    Fault("sinh", lambda x, y: torch.sinh(x), EXPONENT),
)  # fmt: skip

TEMPLATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda v, mask: v.mean(),
    "sum of a mask": lambda v, mask: (v * mask).sum() / mask.sum(),
    "where": lambda v, mask: torch.where(mask > 0, v, torch.zeros_like(v)).mean(),
    "index": lambda v, mask: v[mask > 0].mean(),
    "minimum": lambda v, mask: torch.minimum(v, torch.ones_like(v)).mean(),
    "a coefficient of 0": lambda v, mask: (v * 0.0).sum() + v.detach().clamp(0, 1).nan_to_num().sum(),
    "rows": lambda v, mask: ((v * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean(),
}


def programs() -> Iterator[tuple[str, Recorded]]:
    """Every fault in every dtype, under every template, at an element that counts and at one that does not."""
    rng = random.Random(7)
    for fault, dtype, (name, template) in itertools.product(FAULTS, DTYPES, TEMPLATES.items()):
        row, column = rng.randrange(3), rng.choice((0, 3))  # the last two columns do not count
        x = torch.tensor([[rng.uniform(0.2, 0.9) for _ in range(5)] for _ in range(3)]).to(dtype)
        y = torch.tensor([[rng.uniform(0.2, 0.9) for _ in range(5)] for _ in range(3)]).to(dtype)
        x[row, column], y[row, column] = fault.number[dtype], fault.other
        mask = torch.ones(3, 5, dtype=dtype)
        mask[:, 3:] = 0
        x.requires_grad_(rng.random() < 0.9)
        weight = torch.ones(1, dtype=dtype, requires_grad=True)

        def loss(
            x: Tensor, y: Tensor, mask: Tensor, weight: Tensor, fault: Fault = fault, template: Callable[..., Tensor] = template
        ) -> Tensor:
            return template(fault.op(x, y).to(mask.dtype) * weight, mask)

        try:
            yield f"{fault.name}, {dtype}, {name}", record(loss, x, y, mask, weight)
        except RuntimeError as error:
            assert "not implemented" in str(error)  # torch has no such op for this dtype


def test_no_sentence_about_a_fault_contradicts_it() -> None:
    """Every op that goes bad, in each dtype, masked by each means, and not masked."""
    asked, wrong = 0, {}
    for name, recorded in programs():
        asked += recorded.location is not None
        if told := said_of(recorded):
            wrong[name] = told
    assert wrong == {}
    assert asked > 1000


CONTRADICTED = (
    ("of nothing bad", seen("exp", 3.0, 1.0), Cause.UNKNOWN, "exp overflowed to +inf at [0, 1] of [2, 3]."),
    ("an infinite operand", seen("mul", INF, 2.0, INF), Cause.UNKNOWN, "x overflowed to +inf at [0, 1] of [2, 3]."),
    ("no mask", seen("exp", INF, 99.0, masked=False), Cause.UNKNOWN, "exp gave +inf at a token that the loss does not count."),
    ("a mask that is kept silent", seen("exp", INF, 99.0, masked=True), Cause.UNKNOWN, "exp gave +inf at [0, 1] of [2, 3]."),
    ("not masked, and by something", seen("exp", INF, 99.0, masked=False, masked_by="an index"), Cause.UNKNOWN, "exp gave +inf at [0, 1]."),
    ("arithmetic", seen("mul", INF, 0.9, 2.0), Cause.UNKNOWN, "x gave +inf at [0, 1]: mul(0.9, 2) = +inf."),
    ("a missing operand", seen("mul", NAN, 0.9), Cause.UNKNOWN, "x gave NaN at [0, 1]: mul(0.9) = NaN."),
    ("came in", seen("mul", NAN, 0.9, NAN), Cause.UNKNOWN, "x came in as NaN at [0, 1] of [2, 3]."),
    ("a logarithm", seen("log", -INF, 1e-40), Cause.LOG_ZERO, "x gave −inf at [0, 1]. The logarithm of 0."),
    ("zero by zero", seen("div", INF, 1.0, 0.0), Cause.ZERO_DIV_ZERO, "x gave +inf at [0, 1]. 0 divided by 0."),
    ("a quotient", seen("div", INF, 1.0, 1e-42), Cause.MAGNITUDE_OVERFLOW, "x gave +inf at [0, 1]. A huge finite value is squared or summed beyond the dtype's range."),
    ("a cause that is not told", seen("exp", INF, 99.0), Cause.EXP_OVERFLOW, "x gave +inf at [0, 1]."),
)  # fmt: skip


@pytest.mark.parametrize(("observation", "cause", "words"), [row[1:] for row in CONTRADICTED], ids=[row[0] for row in CONTRADICTED])
def test_a_contradiction_is_seen(observation: Observation, cause: Cause, words: str) -> None:
    """The property would fail."""
    assert contradictions(observation.origin, str(observation.phase), cause, words) != []


def test_what_holds_is_let_through() -> None:
    """And only then."""
    found = replace(seen("exp", INF, 99.0, masked=True), facts=seen("exp", INF, multiplied=True).facts)
    words = "exp overflowed to +inf at [0, 1] of [2, 3] outside the loss: exp(99) = +inf. A masked token overflows, and the mask multiplies inf by 0."
    assert contradictions(found.origin, str(found.phase), Cause.INF_TIMES_ZERO_MASK, words) == []
