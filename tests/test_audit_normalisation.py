"""How advantages were normalised, told from their numbers."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanscope.audit.normalisation import Twice, normalised
from nanscope.objective.advantages import RELATIVE, relative, whiten

GROUPS, SIZE, T = 5, 4, 9


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards [B], advantages relative to the group [B, 1], and a mask of unlike rows [B, T]."""
    torch.manual_seed(seed)
    rewards = 3 * torch.rand(GROUPS * SIZE)
    advantages = relative(rewards, torch.arange(GROUPS).repeat_interleave(SIZE), RELATIVE["trl.group"])
    mask = (torch.arange(T) < torch.randint(1, T + 1, (GROUPS * SIZE, 1))).float()
    return rewards, advantages[:, None], mask


@given(st.integers(0, 999))
def test_by_group_and_then_over_the_tokens_is_seen(seed: int) -> None:
    """Every group keeps one mean and one deviation, which are no longer 0 and 1; by how much is told."""
    _, advantages, mask = batch(seed)
    hypothesis.assume(abs(advantages.expand(mask.shape)[mask > 0].mean()) > 0.01)  # else the second one moved nothing
    white = whiten(advantages.expand(mask.shape), mask)
    found = normalised(white, mask)
    assert (found.twice, found.size, found.groups) == (Twice.SEEN, SIZE, GROUPS)
    again = (white[mask > 0] - found.group_mean) / found.group_spread  # undone, it is what the groups had
    assert torch.allclose(again, advantages.expand(mask.shape)[mask > 0], atol=2e-3)


@given(st.integers(0, 999))
def test_once_is_not_twice(seed: int) -> None:
    """By group alone, over the batch alone, or not at all: nothing is claimed."""
    rewards, advantages, mask = batch(seed)
    assert normalised(advantages, mask).twice is Twice.NO
    assert normalised(whiten(rewards[:, None].expand(mask.shape), mask), mask).twice is Twice.NO
    assert normalised(rewards[:, None], mask).twice is Twice.NO
    assert normalised((rewards - rewards.mean())[:, None] / rewards.std(), mask).twice is Twice.NO


def test_over_the_rows_is_seen_as_well() -> None:
    """A second normalisation that counts rows, not tokens."""
    _, advantages, mask = batch(0)
    found = normalised((advantages - advantages.mean()) / advantages.std(), mask)
    assert found.twice is Twice.SEEN
    assert found.over_rows


def test_groups_of_the_same_numbers_prove_nothing() -> None:
    """With rewards of 0 and 1, and two of four right in every group, one whitening looks like two."""
    _, _, mask = batch(0)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(GROUPS)
    assert normalised(whiten(rewards[:, None].expand(mask.shape), mask), mask).twice is not Twice.SEEN


def test_two_groups_whose_deviations_are_merely_close_prove_nothing() -> None:
    """1 and 1.005, centred by group: the deviations of two groups may be that close by chance."""
    _, advantages, mask = batch(1)
    two = torch.cat([advantages[:SIZE], 1.005 * advantages[SIZE : 2 * SIZE]])
    mask = mask[: 2 * SIZE]
    assert normalised(whiten(two.expand(mask.shape), mask), mask, SIZE).twice is Twice.NO


def test_what_a_second_one_would_not_change_cannot_be_told() -> None:
    """Mean 0 and deviation 1 in the groups and over the batch: said to be unsure."""
    rewards, _, _ = batch(0)
    groups = rewards.view(GROUPS, SIZE)
    once = (groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True, correction=0)  # divided by the other estimator
    found = normalised(once.view(-1, 1), torch.ones(GROUPS * SIZE, T))
    assert found.twice is Twice.HIDDEN
    assert normalised(once[:1].reshape(-1, 1), torch.ones(SIZE, T)).twice is Twice.NO  # one group is the batch


def critic(seed: int) -> tuple[Tensor, Tensor]:
    """Advantages per token, as a critic gives them."""
    torch.manual_seed(seed)
    return torch.randn(6, T) * 3 + 1, (torch.arange(T) < torch.randint(1, T, (6, 1))).float()


@given(st.integers(0, 99))
def test_a_mean_that_counted_padding_is_seen(seed: int) -> None:
    """Subtract the mean of all positions, zeros of padding included, and divide by the deviation of the valid tokens."""
    advantages, mask = critic(seed)
    advantages = advantages * mask
    mean = advantages.mean()
    hypothesis.assume(abs(advantages[mask > 0].mean() - mean) > 0.1)
    spread = (((advantages - mean).square() * mask).sum() / mask.sum()).sqrt()
    found = normalised((advantages - mean) / spread, mask)
    assert not found.per_row
    assert found.twice is Twice.PADDING


@given(st.integers(0, 99))
def test_whitened_per_token_is_healthy(seed: int) -> None:
    """Once, or twice with the mask, which changes nothing."""
    advantages, mask = critic(seed)
    white = whiten(advantages, mask) * mask
    assert normalised(white, mask).twice is Twice.NO
    assert normalised(whiten(white, mask, unbiased=False) * mask, mask).twice is Twice.NO


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_advantages_that_are_not_finite_say_nothing(bad: float) -> None:
    """One NaN in a valid token is no ground for a claim; one in padding does not matter."""
    _, advantages, mask = batch(0)
    white = whiten(advantages.expand(mask.shape), mask)
    padded = torch.where(mask > 0, white, bad)
    assert normalised(padded, mask).twice is Twice.SEEN
    white[0, 0] = bad
    assert normalised(white, mask).twice is Twice.NO
