"""What a sentence may not say of its own origin, whatever the step: each thing that it says is held against the recorded facts.

masked ⇔ the words for it        overflowed ⇒ infinite, of finite operands        came in ⇔ input
op(a, b) = r ⇒ torch says so     the logarithm of 0 ⇒ an operand of 0             0 divided by 0 ⇒ both are
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nanscope.causes import CAUSES, Cause
from nanscope.program.ops import DIVISIONS, EXPONENTIALS, LOGARITHMS, QUOTIENTS, ROOTS, SCALED, SPREADS, TAKEN_OF
from nanscope.report.origin import mask_words
from nanscope.snapshot.observation import STOOD_IN, Blame, Origin
from nanscope.text import number

MASKED = ("that the loss does not count", "outside the loss", "picked the other side", "counts with another number")
NOT_IN_A_LOSS = ("weights", "optimizer")
DOUBLE = torch.float64
WIDE = 67  # elements: a kernel computes many at a time, and the last ones one by one, and not always the same way


def contradictions(origin: Origin, phase: str, cause: Cause, sentence: str, blame: Blame | None = None) -> list[str]:
    """Return what a sentence says that its origin, its operands, the mask or the phase contradicts."""
    said = sentence[:1].lower() + sentence[1:]
    told = [*_of_masks(origin, phase, cause, said), *_of_the_value(origin, phase, said), *_of_the_cause(origin, phase, cause, said)]
    return [f"{words}: {origin}" for words in (*told, *_arithmetic(origin, said), *_of_blame(origin, blame, said))]


def _of_masks(origin: Origin, phase: str, cause: Cause, said: str) -> Iterator[str]:
    says = any(words in said for words in MASKED)
    if says and origin.masked is not True:
        yield f"said to be masked, and masked is {origin.masked}"
    if origin.masked and not says and phase not in NOT_IN_A_LOSS and origin.op not in ("module", "unknown") and _is_element(said):
        yield "masked, and not said to be"
    if origin.masked_by and not origin.masked:
        yield f"not masked, and by {origin.masked_by}"
    if "a masked token" in said and origin.masked is not True:
        yield f"told of as a masked token, and masked is {origin.masked}"
    if "on a token that counts" in said and origin.masked and not (origin.masked_by or "").endswith("other side"):
        yield "told of as a token that counts, and it is masked"
    if phase == "weights" and origin.op in ("parameter", "buffer") and mask_words(origin):
        yield f"a weight, and {mask_words(origin)}"
    if origin.masked is False and cause in (Cause.INF_TIMES_ZERO_MASK, Cause.NAN_TIMES_ZERO_MASK):
        yield f"{cause} of what counts"


def _is_element(said: str) -> bool:
    """Is an element of a tensor told of, and not a norm, or an update?"""
    return " at [" in said and not said.startswith(("the update of", "the gradient of a weight"))


def _of_the_value(origin: Origin, phase: str, said: str) -> Iterator[str]:
    operands = [value for _, value in origin.operands]
    if " overflowed to +inf" in said and (origin.value != math.inf or not all(map(math.isfinite, operands)) or origin.divided == 0):
        yield "nothing overflowed"
    if " gave " in said and math.isfinite(origin.value):
        yield "a finite value is said to have been given"
    if (" came in as " in said or " was set to " in said) != (phase == "input"):
        yield f"came in or not: phase {phase}"
    if " ends at exp(" in said and not (origin.op in EXPONENTIALS and math.isinf(origin.value) and f"{origin.dtype} ends at" in said):
        yield "the limit is another's"
    if any(not 0 <= at < length for at, length in zip(origin.index, origin.shape, strict=True)):
        yield "the index lies outside"


def _of_the_cause(origin: Origin, phase: str, cause: Cause, said: str) -> Iterator[str]:
    """Is the cause, in words, one of these numbers?"""
    first, second = origin.number(0), origin.number(1)
    divisor, taken = origin.number(DIVISIONS.get(origin.op, 0)), origin.number(TAKEN_OF.get(origin.op, 0))
    held: dict[str, bool] = {
        "the logarithm of 0": origin.op in LOGARITHMS and taken == (-1 if origin.op == "log1p" else 0),
        "the logarithm of a negative number": taken < (-1 if origin.op == "log1p" else 0),
        "the product p · log p": origin.op in LOGARITHMS or (0 in (first, second) and -math.inf in (first, second)),
        "0 divided by 0": origin.op in QUOTIENTS and divisor == 0 and origin.number(DIVISIONS[origin.op] - 1) == 0,
        "a division by a setting, a scale or a norm that is 0": 0 in (origin.divided, divisor),
        "two infinities are subtracted": origin.op == "logsumexp" or origin.is_pole or (math.isinf(first) and math.isinf(second)),
        "the standard deviation of a single element": origin.op in SPREADS and math.isnan(origin.value),
        "the gradient of a square root at 0": origin.op in ROOTS and not abs(origin.value) > 1e-3,
        "the root of a negative number": first < 0,
        "the root of a small negative number": first < 0,
        "softmax over a row that is entirely −inf": first == -math.inf,
        "a value leaves the range of half precision": origin.dtype == "float16" and math.isinf(origin.value),
        "a gradient leaves the range of half precision": phase == "backward" and math.isfinite(origin.value),
        "a huge finite value is squared or summed": math.isinf(origin.value) and not abs(divisor) < 1e-3 if origin.op in DIVISIONS else math.isinf(origin.value),
        "exp overflows": math.isinf(origin.value) and origin.op in EXPONENTIALS,
        "a power overflows": math.isinf(origin.value) and origin.op == "pow",
        "non-finite data came with the batch": phase == "input",
        "an overflow meets a factor that is exactly 0": math.isinf(origin.value) or (0 in (first, second) and math.inf in map(abs, (first, second))),
        "forward drops the bad value": phase == "backward" and not math.isfinite(origin.value),
        "a masked token is nan": math.isnan(origin.value),
    }  # fmt: skip
    lower = said.lower()
    for words, holds in held.items():
        if f". {words}" in lower and not holds:
            yield words
    titles = [title for title in (CAUSES[cause].title, *CAUSES[cause].varieties) if title]
    if cause is not Cause.UNKNOWN and not any(title.lower() in lower for title in titles) and "no backward pass" not in lower:
        yield f"{cause} is not told"


STATED = re.compile(r": (\w+)\(([^()…]*)\) = ([^\s,.;:]+(?:\.\d+)?(?:e[+−-]?\d+)?)")


def _arithmetic(origin: Origin, said: str) -> Iterator[str]:
    """Is what stands there as a calculation what torch makes of these operands?"""
    found = STATED.search(said)
    if found is None or found[1] != origin.op:
        return
    plain = SCALED.get(origin.op, len(origin.operands))
    wanted = [
        name if name == STOOD_IN else number(value) if at < plain else f"{name} {number(value)}"
        for at, (name, value) in enumerate(origin.operands)
    ]
    if found[2].split(", ") != wanted or found[3] != number(origin.value):
        yield f"{found[0]}: not all of its operands, or another result"
        return
    made = list(results(origin))
    if not any(_alike(value, origin.value, origin.dtype) for value in made):
        yield f"{found[0]}: torch says {made}"


def results(origin: Origin) -> Iterator[float]:
    """Yield what torch makes of the operands: in float64, that in the recorded dtype, and all of it in that dtype; numbers as numbers, too."""
    plain = SCALED.get(origin.op, len(origin.operands))
    numbers, named = [value for _, value in origin.operands[:plain]], dict(origin.operands[plain:])
    dtype = getattr(torch, origin.dtype, DOUBLE)
    call = CALLS.get(origin.op) or getattr(torch, origin.op, None) or getattr(torch.special, origin.op.removeprefix("special_"), None)
    assert call is not None, f"torch has no {origin.op}"
    for kind in (DOUBLE, torch.float32, dtype):
        for count in range(len(numbers)):  # the last ones may be numbers of the code
            args = [torch.tensor([value] * WIDE, dtype=kind) if at < len(numbers) - count else value for at, value in enumerate(numbers)]
            try:
                result = (call(*args, dtype) if origin.op == "_to_copy" else call(*args, **named)).to(dtype)
            except (RuntimeError, TypeError):
                continue
            result = result.real if result.is_complex() else result
            yield from (float(result[0]), float(result[-1]))


def _infinite_log_sigmoid(x: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(x)


CALLS: dict[str, Callable[..., Tensor]] = {
    "_to_copy": lambda x, dtype: x.to(dtype),
    "rsub": lambda x, y, alpha=1: y - alpha * x,
    "log_sigmoid_forward": _infinite_log_sigmoid,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "elu": torch.nn.functional.elu,
    "mish": torch.nn.functional.mish,
}


def _alike(value: float, told: float, dtype: str) -> bool:
    if math.isnan(told) or math.isinf(told):
        return value == told or (math.isnan(value) and math.isnan(told))
    tolerance = {"float16": 1e-2, "bfloat16": 5e-2}.get(dtype, 1e-3)
    return math.isclose(value, told, rel_tol=tolerance, abs_tol=1e-6)


def _of_blame(origin: Origin, blame: Blame | None, said: str) -> Iterator[str]:
    if ("behind it: " in said.lower()) != (blame is not None):
        yield "what is behind it"
    if blame is not None and not (blame.low <= blame.median <= blame.high and math.isfinite(blame.value) and math.isfinite(blame.median)):
        yield f"out of order: {blame}"
    if blame is not None and not (abs(origin.value) > 1e3 and all(math.isfinite(value) for _, value in origin.operands)):
        yield "blamed for what did not overflow"
