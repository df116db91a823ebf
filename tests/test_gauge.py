"""The gauge of a step: extremes on counted and masked tokens, headroom, clip fraction, and nothing where nothing is held."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import leaf, record
from torch import Tensor

from nanscope.capture.gauge import Dials, Reading, read_gauge
from nanscope.program.numbers import exponent_limit


def ppo(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    return (torch.min(ratio, clipped) * mask).sum() / mask.sum()


@given(st.lists(st.floats(-5, 5, width=32), min_size=12, max_size=12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_extremes_match_a_loop(log_ratios: list[float], counted: list[bool]) -> None:
    """Largest exponent and clip fraction are those of a plain loop over the tokens."""
    delta = torch.tensor(log_ratios).reshape(3, 4)
    mask = torch.tensor(counted, dtype=torch.float32).reshape(3, 4)
    old = leaf(3, 4).detach()
    recorded = record(ppo, (old + delta).requires_grad_(), old, mask)
    values = recorded.run.values
    reading = read_gauge(Dials.of(recorded.program), recorded.program, values)
    exponents = (old + delta) - old
    inside = [float(x) for x, c in zip(exponents.flatten(), counted, strict=True) if c]
    outside = [float(x) for x, c in zip(exponents.flatten(), counted, strict=True) if not c]
    if all(counted):
        assert reading.highest_masked is None
    elif outside:
        assert reading.highest_masked == max(outside)
    assert reading.highest == (max(inside) if inside else -math.inf)
    assert reading.headroom == pytest.approx(exponent_limit(torch.float32) - max(inside + outside))
    if inside:
        ratios = torch.tensor(inside).exp()
        assert reading.clipped == pytest.approx(float(((ratios < 0.8) | (ratios > 1.2)).float().mean()), abs=0.1)


def test_headroom_goes_below_zero_when_exp_overflows() -> None:
    """The limits are those of the dtype: 88.72 nats in float32 and bfloat16, 11.09 in float16."""
    assert exponent_limit(torch.float32) == pytest.approx(88.72, abs=0.01)
    assert exponent_limit(torch.bfloat16) == pytest.approx(88.72, abs=0.01)
    assert exponent_limit(torch.float16) == pytest.approx(11.09, abs=0.01)
    old = leaf(2, 3).detach()
    recorded = record(ppo, (old + 100).requires_grad_(), old, torch.ones(2, 3))
    reading = read_gauge(Dials.of(recorded.program), recorded.program, recorded.run.values)
    assert reading.headroom is not None and reading.headroom < -11


def test_what_is_not_held_is_not_seen() -> None:
    """Without tensors there is nothing to read, and two readings join to the worse of each."""
    recorded = record(ppo, leaf(2, 3), leaf(2, 3).detach(), torch.ones(2, 3))
    assert read_gauge(Dials.of(recorded.program), recorded.program, {}) == Reading()
    joined = Reading(1.0, None, 50.0, 0.1).joined(Reading(3.0, 2.0, 20.0, None))
    assert joined == Reading(3.0, 2.0, 20.0, 0.1)
