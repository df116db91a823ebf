"""A number that takes the place of one that came in bad is no fix where anything trains with it, nor is a bound that leaves a loss far beyond the usual."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recorded import record
from torch import Tensor

from nanscope.replay.invented import INVENTED
from nanscope.replay.tries import replay
from nanscope.snapshot.observation import Row
from nanscope.verdict.diagnose import diagnose
from nanscope.verdict.incident import Incident

Loss = Callable[[Tensor, Tensor], Tensor]


def weighted(log_probs: Tensor, advantages: Tensor) -> Tensor:
    return -(log_probs * advantages[:, None]).mean() + 0.1 * log_probs.square().mean()


def grouped(log_probs: Tensor, rewards: Tensor) -> Tensor:
    of_group = rewards.view(2, 4)
    advantages = (of_group - of_group.mean(1, keepdim=True)) / (of_group.std(1, keepdim=True) + 1e-4)
    return weighted(log_probs, advantages.view(-1))


def regressed(values: Tensor, returns: Tensor) -> Tensor:
    return (values - returns[:, None]).square().mean()


def averaged(log_probs: Tensor, weights: Tensor) -> Tensor:
    return -(log_probs * weights[:, None]).sum() / weights.sum()


def said(loss: Loss) -> tuple[Incident, dict[str, Row]]:
    """Of a loss of which one number that came in is NaN."""
    torch.manual_seed(0)
    given = -3.0 - torch.rand(8)
    given[5] = math.nan
    snapshot = record(loss, torch.randn(8, 3).requires_grad_(), given).snapshot()
    return diagnose(snapshot), {row.id: row for row in replay(snapshot).rows}


@pytest.mark.parametrize("loss", [weighted, averaged])
def test_a_factor_of_0_takes_its_element_out(loss: Loss) -> None:
    """And nothing else, also where the element has other terms, or is counted."""
    incident, rows = said(loss)
    assert rows["reject_input"].works and not rows["reject_input"].cost
    assert incident.fixes[0].proven or loss is averaged  # of which no element is healthy


@pytest.mark.parametrize("loss", [grouped, regressed])
def test_a_number_that_something_trains_with_is_no_fix(loss: Loss) -> None:
    """A reward of 0 among log-likelihoods is the best of its group, and a return of 0 one that nobody had."""
    _, rows = said(loss)
    assert (rows["reject_input"].works, rows["reject_input"].proven, rows["reject_input"].cost) == (True, False, INVENTED)


def test_what_a_bad_reward_reaches_can_be_left_out() -> None:
    """The advantages of its group, none of which has a gradient: those of the other group stay as they are."""
    incident, _ = said(grouped)
    best = incident.fixes[0]
    assert (best.id, best.proven) == ("drop_invalid_sample", True)
    assert "leave out what the bad entries have spoilt" in best.label


def test_a_bound_leaves_a_gradient_among_the_usual() -> None:
    """e to the 20 heals a step whose other weights are about 1, and ruins it as well."""
    advantages = torch.tensor([0.1, -0.2, 0.3, 0.2, -0.1, 200.0])
    loss: Loss = lambda log_probs, advantages: -(torch.exp(advantages)[:, None] * log_probs).mean()  # noqa: E731
    rows = {row.id: row for row in replay(record(loss, torch.randn(6, 3).requires_grad_(), advantages).snapshot()).rows}
    assert rows["clamp_exponent"].proven and "±2" in rows["clamp_exponent"].label


def test_a_bound_that_no_gradient_crosses_costs_nothing() -> None:
    """A ratio that is clamped trains with nothing, however large it is logged."""
    log_ratio = torch.tensor([[0.1, -0.2, 200.0], [0.3, 0.2, -0.1]], requires_grad=True)
    rows = {row.id: row for row in replay(record(lambda x: torch.exp(x).mean(), log_ratio).snapshot()).rows}
    assert rows["clamp_exponent"].proven and "±20" in rows["clamp_exponent"].label


def test_a_range_of_rewards_is_no_count() -> None:
    """It is whole by chance: rewards of other batches lie between 0 and 1."""
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])

    def loss(log_probs: Tensor, rewards: Tensor) -> Tensor:
        of_group = rewards.view(2, 4)
        ranges = of_group.amax(1, keepdim=True) - of_group.amin(1, keepdim=True)
        return weighted(log_probs, ((of_group - of_group.mean(1, keepdim=True)) / ranges).view(-1))

    rows = {row.id: row for row in replay(record(loss, torch.randn(8, 3).requires_grad_(), rewards).snapshot()).rows}
    assert rows["clamp_denominator"].proven and "1e-08" in rows["clamp_denominator"].label
