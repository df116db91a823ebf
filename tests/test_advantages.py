"""Advantages: against a loop over groups, and the facts that losses depend on."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nanscope
from nanscope.errors import NanscopeError
from nanscope.objective.advantages import RELATIVE, Baseline, Relative, Spread, gae, relative, returns_to_go, whiten


def by_loop(rewards: list[float], groups: list[int], how: Relative) -> list[float]:
    """A row at a time."""
    found = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        mates = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        if len(mates) == 1 and how.baseline is not Baseline.BATCH:
            found.append((reward if how.spread is Spread.ONE else reward / (1 + how.epsilon)) if how.keep_alone else 0.0)
            continue
        pools = {"group": mates, "others": others, "batch": rewards, "zero": [0.0], "one": []}
        difference = reward - statistics.fmean(pools[how.baseline])
        pool = pools[how.spread]
        spread = statistics.stdev(pool) if len(pool) > 1 else 0.0
        divide = how.spread is not Spread.ONE and (spread > 0 or not how.where_spread)
        found.append(difference / (spread + how.epsilon) if divide else difference)
    return found


@given(
    name=st.sampled_from(sorted(RELATIVE)),
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(-4, 4)), min_size=1, max_size=9),
)
@settings(max_examples=200, deadline=None)
def test_relative_advantages_equal_a_loop(name: str, rows: list[tuple[int, int]]) -> None:
    """Every row of the table, over groups of any size."""
    groups, rewards = [g for g, _ in rows], [float(r) for _, r in rows]
    found = relative(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), RELATIVE[name])
    assert found.tolist() == pytest.approx(by_loop(rewards, groups, RELATIVE[name]), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_without_variance_gets_exactly_zero(name: str) -> None:
    """Equal rewards tell nothing, at any scale of the reward; flash_reinforce compares with the batch instead."""
    rewards = torch.full((8,), 0.5)
    assert relative(rewards, torch.arange(8) // 4, RELATIVE[name]).eq(0).all()


def test_a_reward_that_is_missing_counts_for_nobody() -> None:
    """NaN: its own advantage is 0, and the others are those of a group without it."""
    group = torch.zeros(4, dtype=torch.long)
    found = relative(torch.tensor([1.0, math.nan, 0.0, 2.0]), group, RELATIVE["trl.group"])
    without = relative(torch.tensor([1.0, 0.0, 2.0]), group[:3], RELATIVE["trl.group"])
    assert found.tolist() == pytest.approx([without[0].item(), 0.0, without[1].item(), without[2].item()])


def test_wrong_shapes_are_one_clear_error() -> None:
    """One reward and one group per row."""
    with pytest.raises(NanscopeError, match="one number per row"):
        relative(torch.zeros(4, 2), torch.zeros(4), RELATIVE["trl.group"])


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(3, 6, generator=generator) < 0.7).double()
    mask[:, 0] = 1
    return torch.randn(3, 6, generator=generator).double(), torch.randn(3, 6, generator=generator).double(), mask


@pytest.mark.parametrize("seed", range(4))
def test_whitening_centres_and_scales_the_valid_tokens(seed: int) -> None:
    """Mean 0 and variance 1 over valid tokens, whatever is masked; twice is once."""
    x, _, mask = batch(seed)
    x[mask == 0] = math.nan
    valid = whiten(x, mask)[mask > 0]
    assert valid.mean().item() == pytest.approx(0, abs=1e-9) and valid.std().item() == pytest.approx(1, rel=1e-6)
    torch.testing.assert_close(whiten(whiten(x, mask), mask)[mask > 0], valid, rtol=1e-6, atol=1e-6)
    kept = whiten(x, mask, shift_mean=False)[mask > 0]
    assert kept.mean().item() == pytest.approx(x[mask > 0].mean().item())


@pytest.mark.parametrize("seed", range(4))
def test_masked_tokens_are_stepped_over(seed: int) -> None:
    """Returns and GAE of a row are those of its valid tokens alone."""
    rewards, values, mask = batch(seed)
    rewards = rewards * mask
    returns, (advantages, targets) = returns_to_go(rewards, mask, 0.9), gae(rewards, values, mask, 0.9, 0.8)
    torch.testing.assert_close(targets, advantages + values)
    for i in range(3):
        at = mask[i] > 0
        expected, following, previous, value = [], 0.0, 0.0, 0.0
        for r, v in reversed(list(zip(rewards[i][at].tolist(), values[i][at].tolist(), strict=True))):
            following = r + 0.9 * following
            previous = r + 0.9 * value - v + 0.9 * 0.8 * previous
            value = v
            expected.append((following, previous))
        assert returns[i][at].tolist() == pytest.approx([pair[0] for pair in reversed(expected)])
        assert advantages[i][at].tolist() == pytest.approx([pair[1] for pair in reversed(expected)])
        assert returns[i][~at].eq(0).all()


def test_gae_with_lambda_one_is_the_return_minus_the_value() -> None:
    """λ = 1: no bootstrapping is left."""
    rewards, values, mask = batch(1)
    mask = torch.ones_like(mask)
    torch.testing.assert_close(gae(rewards, values, mask, 0.9, 1.0)[0], returns_to_go(rewards, mask, 0.9) - values)


def test_the_estimators_have_a_door() -> None:
    """`nanscope.advantages` is the module with all of them, in an interpreter that has imported nothing else."""
    code = "import nanscope; a = nanscope.advantages; print(a.__name__, *(callable(getattr(a, n)) for n in ('relative', 'whiten', 'gae', 'returns_to_go')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["nanscope.objective.advantages", *["True"] * 4]
    assert nanscope.advantages.relative is relative
