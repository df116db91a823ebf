"""A gradient is told to leave half precision only where float32, given the same, holds it: every other reason is another one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recorded import record
from torch import Tensor
from torch.nn import functional

from nanscope.causes import Cause
from nanscope.locate.half import leaves_half
from nanscope.locate.observe import observe
from nanscope.snapshot.observation import Phase
from nanscope.verdict.diagnose import diagnose
from nanscope.verdict.rules import cause_of

Loss = Callable[[Tensor], Tensor]

LEAVES: dict[str, Loss] = {
    "a large factor": lambda x: ((x.half() * 300.0).float() * 300.0).sum(),
    "a square": lambda x: (x.half() * 200).square().float().mul(500.0).sum(),
    "a small divisor": lambda x: (x.half() / 1e-3).float().mul(100.0).sum(),
    "a product of matrices": lambda x: (x.half() @ torch.full((4, 4), 200.0).half()).float().mul(100.0).sum(),
    "a sum over the batch": lambda x: (x.half() * 1.0).sum() * 0.0 + (x[:1].half() * 1.0).expand(4, 4).float().mul(3e4).sum(),
    "branches": lambda x: (lambda h: (h * 200).float().sum() * 200 + (h * 150).float().sum() * 200)(x.half() * 1.0),
    "a cast": lambda x: (x.half() * 0.5).float().mul(1e5).sum(),
    "a derivative on the way": lambda x: (x.half() * 1e-4).rsqrt().float().mul(1e-3).sum(),  # 1e6 times 1e-3
    "a power on the way": lambda x: (x.half() * 1e-2).pow(-2).float().mul(1e-3).sum(),
    "a factor of a derivative": lambda x: (x.half() * 0.0 + 5e-4).rsqrt().float().mul(1e-3).sum(),  # 9e4 times 5e-4
    "a root": lambda x: (x.half() * 1e-4).sqrt().float().mul(1e4).sum(),
}
STAYS: dict[str, Loss] = {
    "bfloat16": lambda x: ((x.bfloat16() * 300.0).float() * 1e38).mul(1e3).sum(),
    "float32": lambda x: ((x * 1e30) * 1e30 * 1e-30).sum(),
    "too large for float32": lambda x: (x.half() * 0.5).float().mul(1e38).mul(1e3).sum(),
    "a root of 0": lambda x: (x.half() * 0).sqrt().float().sum(),
    "a derivative that has nothing to divide by": lambda x: (x.half() * 1e-4).norm(p=3).float().mul(1e-3).sum(),
    "healthy": lambda x: (x.half() * 2).float().sum(),
    "an infinity of forward": lambda x: torch.minimum((x.half() * 6e4 * 3), torch.ones(4, 4).half()).float().sum() * 0.0,
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_gradient_beyond_half_precision_is_told_as_that(name: str) -> None:
    """The fact, the cause with its own title, and the fix that was run: the origin itself is finite."""
    recorded = record(LEAVES[name], torch.linspace(0.5, 1.0, 16).view(4, 4).requires_grad_())
    location = recorded.location
    assert location is not None and math.isfinite(location.origin.value)
    assert leaves_half(location.origin, location.phase, recorded.trace)
    assert leaves_half(location.origin, location.phase, recorded.trace.forward_only())
    incident = diagnose(recorded.snapshot())
    assert incident.cause is Cause.FP16_OVERFLOW, incident.sentence
    assert "A gradient leaves the range of half precision (65504)" in incident.sentence
    fix = next(fix for fix in incident.fixes if fix.executed)
    assert fix.id == "upcast_fp32" and fix.works


@pytest.mark.parametrize("name", STAYS)
def test_what_is_bad_for_another_reason_is_not(name: str) -> None:
    """Another dtype, what float32 cannot hold either, what is no number there, and what is not bad."""
    recorded = record(STAYS[name], torch.linspace(0.5, 1.0, 16).view(4, 4).requires_grad_())
    location = recorded.location
    if location is not None:
        assert not leaves_half(location.origin, location.phase, recorded.trace)
        assert not observe(location, recorded.trace).facts.leaves_half
        assert cause_of(observe(location, recorded.trace)) is not Cause.FP16_OVERFLOW or location.phase is not Phase.BACKWARD


def test_what_many_rows_of_an_embedding_give_one_is_a_sum() -> None:
    """Each gradient is small, and their sum in one row is not."""
    table = torch.randn(3, 2).requires_grad_()
    recorded = record(lambda t: functional.embedding(torch.zeros(300, dtype=torch.long), t.half()).float().mul(300.0).sum(), table)
    location = recorded.location
    assert location is not None and leaves_half(location.origin, location.phase, recorded.trace)
