"""What float64 gives: overflows that became finite and wrong are told from those that became what they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recorded import leaf, record
from torch import Tensor
from torch.nn import functional

from nanscope.locate.twin import absorbed, residue

Loss = Callable[[Tensor], Tensor]
COUNTS = torch.tensor([[1.0], [0.0], [1.0]])


def rows(dtype: torch.dtype, outlier: float) -> Tensor:
    """Three rows of four, of which the second has an element that is far out."""
    torch.manual_seed(4)
    x = torch.randn(3, 4)
    x[1, 2] = outlier
    return x.to(dtype).requires_grad_()


def squared(x: Tensor) -> Tensor:
    """A loss that tells rows apart."""
    return ((x.float() - torch.linspace(0.1, 0.9, x.numel()).view(x.shape)) ** 2).mean()


def by_hand(x: Tensor) -> Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


WRONG: dict[str, tuple[Loss, Tensor, str, tuple[int, ...]]] = {
    # the loss, what goes in, the call that overflows, where
    "the root of a mean of squares": (
        lambda x: squared(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)), rows(torch.float16, 400.0), "pow", (1, 2),
    ),
    "in single precision": (
        lambda x: squared(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)), rows(torch.float32, 1e20), "pow", (1, 2),
    ),
    "in bfloat16": (
        lambda x: squared(x / (x * x).sum(-1, keepdim=True).sqrt()), rows(torch.bfloat16, 1e20), "mul", (1, 2),
    ),
    "a length that alone overflows": (
        lambda x: squared(x / x.norm(dim=-1, keepdim=True)), torch.full((3, 4), 5e4).half().requires_grad_(), "linalg_vector_norm", (0, 0),
    ),
    "in all of many rows": (
        lambda x: squared(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))), torch.randn(40, 32).mul(1e20).requires_grad_(), "pow", (0, 0),
    ),
    "in two places beside each other": (
        lambda x: squared(torch.cat([half / (half * half).sum(-1, keepdim=True).sqrt() for half in x.chunk(2)])),
        torch.full((6, 4), 1e20).requires_grad_(), "mul", (0, 0),
    ),
    "a softmax by hand": (lambda x: squared(by_hand(x)), torch.full((3, 8), 10.0).half().requires_grad_(), "sum", (0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_overflow_that_became_a_wrong_number_is_found(name: str) -> None:
    """By the call that overflowed and its element; everything else in the step is finite."""
    loss, x, op, index = WRONG[name]
    recorded = record(loss, x)
    assert bool(torch.isfinite(recorded.loss)) and recorded.location is None
    found = absorbed(recorded.trace)
    assert found is not None and (found.location.origin.op, found.location.origin.index) == (op, index)
    assert "float64 gives" in found.words


def masked(x: Tensor) -> Tensor:
    """The row that overflows is not taken."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return squared(torch.where(COUNTS > 0, normed, 0.0))


def routed(x: Tensor) -> Tensor:
    """The best two of four, weighed by a softmax over them."""
    best = x.topk(2, dim=-1)
    gates = torch.full_like(x, -math.inf).scatter(-1, best.indices, best.values).softmax(-1)
    return squared(gates)


def weighed(x: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows weigh e to their sum, as numbers without a gradient; of an infinite weight the code says what becomes."""
    return squared(x * answer(torch.exp(x.detach().sum(-1, keepdim=True))))


RIGHT: dict[str, tuple[Loss, Tensor]] = {
    "a weight that is said to be 0 where it is infinite": (
        lambda x: weighed(x, lambda w: torch.nan_to_num(w, nan=0.0, posinf=0.0, neginf=0.0)), rows(torch.float32, 120.0),
    ),
    "a weight that is said to be 1 there": (lambda x: weighed(x, lambda w: w.nan_to_num(posinf=1.0)), rows(torch.float32, 120.0)),
    "a weight that is asked whether it is infinite": (
        lambda x: weighed(x, lambda w: torch.where(torch.isinf(w), 0.0, w)), rows(torch.float32, 120.0),
    ),
    "a weight that is asked whether it is finite": (
        lambda x: weighed(x, lambda w: torch.where(torch.isfinite(w), w, 0.0)), rows(torch.float32, 120.0),
    ),
    "a soft cap": (lambda x: squared(30 * torch.tanh(x * 300 / 30)), rows(torch.float16, 400.0)),
    "a cap": (lambda x: squared((x * x).clamp(max=100.0)), rows(torch.float16, 400.0)),
    "the smaller of two": (lambda x: squared(torch.minimum(x * x, torch.tensor(100.0).half())), rows(torch.float16, 400.0)),
    "gelu by tanh": (lambda x: squared(0.5 * x * (1 + torch.tanh(0.8 * (x + 0.0447 * x.pow(3))))), rows(torch.float16, 60.0)),
    "a sigmoid by hand": (lambda x: squared(1 / (1 + torch.exp(-x))), rows(torch.float32, -100.0)),
    "softplus by hand": (lambda x: squared(torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))), rows(torch.float32, 100.0)),
    "a branch that is not taken": (lambda x: squared(torch.where(x > 20, 20.0, x.exp().reciprocal())), rows(torch.float32, 100.0)),
    "an honest zero": (lambda x: squared(torch.exp(-x.detach().square())) + squared(x.clamp(-1, 1)), rows(torch.float32, 1e20)),
    "a weight of almost nothing": (lambda x: squared(1 / (1 + x.detach().pow(2))) + squared(x.clamp(-1, 1)), rows(torch.float32, 1e20)),
    "a row that does not count": (masked, rows(torch.float16, 400.0)),
    "a loss whose gradient is 0": (
        lambda x: squared(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)) * 0.0, rows(torch.float16, 400.0),
    ),
    "masks that add up": (lambda x: squared((x.clamp(-1, 1) - 65504.0 - 65504.0 * (COUNTS == 0)).softmax(0)), rows(torch.float16, 1.0)),
    "a mask of minus infinity": (lambda x: squared(x.masked_fill(x < 0, -math.inf).softmax(-1)), rows(torch.float32, 1.0)),
    "the logarithm of a mask": (lambda x: squared((x + COUNTS.log()).softmax(0)), rows(torch.float32, 1.0)),
    "the best of several": (routed, rows(torch.float16, 400.0)),
    "rows of padding": (lambda x: squared(functional.normalize(x * COUNTS, dim=-1)), rows(torch.float32, 1.0)),
    "zeros of relu": (lambda x: squared(functional.relu(x - 10)), rows(torch.float32, 400.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_an_overflow_that_became_what_it_stands_for_is_none(name: str) -> None:
    """So is what is infinite or 0 on purpose, and what the loss does not depend on."""
    loss, x = RIGHT[name]
    recorded = record(loss, x)
    assert bool(torch.isfinite(recorded.loss))
    assert absorbed(recorded.trace) is None and residue(recorded.trace) is None


def one_out(rewards: Tensor, log_probs: Tensor) -> Tensor:
    """Advantages over the mean and deviation of all others."""
    n = len(rewards)
    others = (1.0 - torch.eye(n)) / (n - 1)
    mean = others @ rewards
    std = (others @ rewards.square() - mean.square()).sqrt().nan_to_num(0)
    advantages = torch.where(std > 0, (rewards - mean) / (std + 1e-6), rewards - mean)
    return -(advantages[:, None] * (log_probs - log_probs.detach()).exp()).mean()


def test_a_quotient_of_nothing_but_rounding_is_found() -> None:
    """The variance of equal numbers, taken as a difference of squares, leaves a denominator of 1e-5: float64 gives another loss."""
    rewards = [torch.tensor([0.0, *[value / 100] * 7]) for value in range(1, 100)]
    losses = [record(one_out, one, leaf(8, 5)) for one in rewards]
    huge = [recorded for recorded in losses if abs(float(recorded.loss)) > 10]
    assert huge and len(huge) < len(losses)  # which ones is a matter of the machine's sums
    for recorded in losses:
        found = residue(recorded.trace)
        assert (found is not None) == (abs(float(recorded.loss)) > 10)
        assert found is None or (found.location.origin.op == "div" and "in float64" in found.words)
