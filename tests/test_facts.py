"""What around an origin is worth knowing when its cause is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recorded import record
from torch import Tensor

from nanscope.causes import Cause
from nanscope.locate.location import locate
from nanscope.locate.observe import observe
from nanscope.locate.spike import spike
from nanscope.snapshot.observation import Observation
from nanscope.verdict.rules import cause_of

SAME = torch.tensor([0.85, 0.85, 0.85])
CLOSE = torch.tensor([0.85, 0.85, 0.8500001])


def under_root(x: Tensor, scale: float = 1.0) -> Tensor:
    return (scale * (x.square().mean() - x.mean().square())).sqrt()


ROOTS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, bool]] = {
    "a variance": (under_root, SAME, True),
    "a variance, scaled": (lambda x: under_root(x, 4.0), SAME, True),
    "1 - cos²": (lambda x: (1 - x.square()).sqrt(), torch.tensor([1.0000001]), True),
    "raised to a half": (lambda x: (x - 1).pow(0.5), torch.tensor([1 - 6e-8]), True),
    "a large number": (lambda x: x.sqrt(), torch.tensor([-500.0]), False),
    "a difference that means it": (lambda x: (x - 2.0).sqrt(), torch.tensor([1.5]), False),
    "a small number": (lambda x: (x * 1e-9).sqrt(), torch.tensor([-1.0]), False),
    "a sign": (lambda x: (-x.square().mean()).sqrt(), SAME, False),
}


def seen_in(loss: Callable[[Tensor], Tensor], x: Tensor) -> Observation:
    found = record(loss, x.clone().requires_grad_())
    location = locate(found.trace)
    assert location is not None
    return observe(location, found.trace)


@pytest.mark.parametrize("name", ROOTS)
def test_cancellation_is_seen_in_the_numbers(name: str) -> None:
    """What a root is taken of is no larger than the rounding errors of what it is the difference of; else it is something else."""
    loss, x, cancelled = ROOTS[name]
    observation = seen_in(lambda x: loss(x).sum(), x)
    assert observation.facts.cancelled is cancelled and observation.origin.op in ("sqrt", "pow")


QUOTIENTS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, bool]] = {
    "1 - p": (lambda x: x / (1 - x), torch.tensor([0.9999999]), True),
    "a deviation": (lambda x: (x - 0.8) / x.std(), CLOSE, True),
    "a deviation, by hand": (lambda x: (x - 0.8) / ((x - x.mean()).square().mean().sqrt() + 1e-9), CLOSE, True),
    "a small number": (lambda x: 1 / x, torch.tensor([1e-7]), False),
    "a small product": (lambda x: 1 / (x * 1e-7), torch.tensor([1.0]), False),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_a_tiny_denominator_is_left_by_cancellation_or_is_not(name: str) -> None:
    """That something is divided by a tiny number says nothing of how it came to be tiny."""
    loss, x, cancelled = QUOTIENTS[name]
    found = record(lambda x: loss(x).sum(), x.clone().requires_grad_())
    location = spike(found.trace)
    assert location is not None and location.origin.op in ("div", "reciprocal")
    assert observe(location, found.trace).facts.cancelled is cancelled


def test_a_wide_list_is_looked_through_once() -> None:
    """What a denominator was made of, where every call before it reads one value 300 times: 300^4 ways lead back."""

    def loss(x: Tensor, nothing: Tensor) -> Tensor:
        for _ in range(6):
            nothing = torch.cat([nothing] * 300)
        return x.sum() / nothing.sum()

    recorded = record(loss, torch.ones(2, requires_grad=True), torch.ones(0))
    assert recorded.location is not None
    assert observe(recorded.location, recorded.trace).facts.mask_denominator is True


def test_what_a_linear_layer_gives_is_told_as_the_code_gets_it() -> None:
    """The product of matrices inside has neither its shape nor its name."""

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        patches = torch.nn.functional.linear(x, weight)
        return (patches.tanh() * patches).float().mean()

    x = torch.ones(2, 4, 3).half()
    x[1, 2] = 900.0
    recorded = record(loss, x, torch.full((5, 3), 40.0).half().requires_grad_())
    assert recorded.location is not None
    origin = observe(recorded.location, recorded.trace).origin
    assert (origin.op, origin.variable, origin.shape, origin.index) == ("mm", "patches", (2, 4, 5), (1, 2, 0))


def counted(log_probs: Tensor, hits: Tensor, mask: Tensor) -> Tensor:
    """Rewards that are counts under a mask, of which a group has the same."""
    rewards = ((hits % 3 == 0).float() * mask).sum(1)
    groups = rewards.view(-1, 2)
    advantages = (groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)
    return -(log_probs * advantages.view(-1, 1) * mask).sum() / mask.sum()


def test_how_far_counts_lie_apart_is_no_count() -> None:
    """The mask selects everything: the group has no spread."""
    found = record(counted, torch.randn(4, 6).requires_grad_(), torch.arange(24).view(4, 6), torch.ones(4, 6))
    location = locate(found.trace)
    assert location is not None
    seen = observe(location, found.trace)
    assert (seen.origin.op, seen.facts.mask_denominator, cause_of(seen)) == ("div", False, Cause.ZERO_DIV_ZERO)
