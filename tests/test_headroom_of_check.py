"""How far the steps before were from a hazard, and where they were going, as the history of the saved step tells."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from recorded import record
from torch import Tensor

from nanscope.foresight.hazard import Check
from nanscope.foresight.search import check
from nanscope.report.check import render_check
from nanscope.snapshot.history import Entry

MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])


def loss(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    return (torch.exp(log_probs - old_log_probs) * mask).sum() / mask.sum().clamp(min=1.0)


def checked(*masked: float) -> Check:
    """The check of a step before which the largest exponent at masked tokens was these."""
    history = tuple(Entry(step, 0, 0.0, log_ratio_max=0.1 * (-1) ** step, log_ratio_max_masked=value) for step, value in enumerate(masked))
    log_probs = -torch.rand(2, 3, generator=torch.Generator().manual_seed(0)) - 0.5
    step = record(loss, log_probs.clone().requires_grad_(), log_probs - 0.1, MASK).snapshot()
    return check(replace(step, history=history))


def told(found: Check, masked: bool) -> set[str]:
    """What is said of hazards of exp at one kind of token."""
    return {hazard.headroom for hazard in found.hazards if hazard.origin.op == "exp" and (hazard.trigger.masked is True) is masked}


@pytest.mark.parametrize(
    ("masked", "words"),
    [
        ([2.0 * step for step in range(30)], "30.72 nats left at masked tokens, 2 fewer each step: none in about 15 steps"),
        ([0.01 * step for step in range(30)], "88.43 nats left at masked tokens, 0.01 fewer each step"),
        ([40 - 0.5 * step for step in range(30)], "63.22 nats left at masked tokens, 0.5 more each step"),
        ([5.0 + (-1) ** step for step in range(30)], "84.72 nats left at masked tokens, and no trend over 30 steps"),
        ([2.0 * step for step in range(5)], ""),
        ([math.nan] * 30, ""),
    ],
)
def test_where_the_exponents_of_masked_tokens_go(masked: list[float], words: str) -> None:
    """Towards the edge, so slowly that nobody can say when, away from it, or nowhere; of too few steps nothing is said."""
    assert told(checked(*masked), masked=True) == {words}


def test_masked_and_counted_tokens_are_told_apart() -> None:
    """And it stands beside the trigger, and in JSON."""
    found = checked(*(2.0 * step for step in range(30)))
    assert told(found, masked=False) == {"88.82 nats left at counted tokens, and no trend over 30 steps"}
    text = " ".join(render_check(found).split())
    assert "now: 30.72 nats left at masked tokens, 2 fewer each step: none in about 15 steps" in text
    assert any(hazard["headroom"] for hazard in found.to_json()["hazards"])


def test_of_a_line_without_an_exponent_the_history_says_nothing() -> None:
    """It has the exponents only."""
    found = checked(*(2.0 * step for step in range(30)))
    assert {hazard.headroom for hazard in found.hazards if hazard.origin.op != "exp"} == {""}
