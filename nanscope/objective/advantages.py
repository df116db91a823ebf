"""Advantages from rewards: relative to a group, leave-one-out, whitened, discounted (REINFORCE++), and GAE.

Notable: a group whose rewards are equal gets exactly 0, and 0 does not protect from an overflow later: inf · 0 is NaN. Whitening an
advantage that is normalised already is a second normalisation; nothing here does it unasked.

Shapes: B rows, T response tokens; `_B` is [B], `_BT` is [B, T], `_BB` is [B, B] and true where two rows answer the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.given import an, near

GROUP_SIZES = ("num_generations", "n_samples_per_prompt", "num_generations_per_prompt", "group_size")  # what trainers call it


def group_size(settings: Mapping[str, Any]) -> int | None:
    """Return how many completions a prompt has by the settings of a run, None if they do not tell."""
    return next((value for name in GROUP_SIZES if isinstance(value := settings.get(name), int) and value > 1), None)


class Baseline(StrEnum):
    """What a reward is compared with."""

    GROUP = "group"  # mean of its group: GRPO, arXiv 2402.03300
    OTHERS = "others"  # mean of the others of its group: RLOO, arXiv 2402.14740
    BATCH = "batch"  # mean of all rewards
    ZERO = "zero"  # nothing


class Spread(StrEnum):
    """What divides the difference, an unbiased standard deviation."""

    ONE = "one"  # nothing: Dr. GRPO, arXiv 2503.20783
    GROUP = "group"
    OTHERS = "others"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Relative:
    """How advantages come out of the rewards of a batch.

    epsilon:    added to the spread. where_spread: divide only where the spread is above 0 (NeMo-RL).
    keep_alone: a group of one keeps its reward (verl); otherwise it gets 0.
    """

    baseline: Baseline = Baseline.GROUP
    spread: Spread = Spread.GROUP
    epsilon: float = 1e-4
    where_spread: bool = False
    keep_alone: bool = False


# TRL grpo_trainer.py:2755, verl core_algos.py:267 and :587, NeMo-RL advantage_estimator.py, OpenRLHF experience_maker.py:249
RELATIVE: dict[str, Relative] = {
    "trl.group": Relative(),
    "trl.batch": Relative(spread=Spread.BATCH),
    "trl.none": Relative(spread=Spread.ONE),
    "verl.grpo": Relative(epsilon=1e-6, keep_alone=True),
    "verl.rloo": Relative(Baseline.OTHERS, Spread.ONE, keep_alone=True),
    "nemo_rl.grpo": Relative(Baseline.OTHERS, Spread.OTHERS, epsilon=1e-6, where_spread=True),
    "openrlhf.rloo": Relative(Baseline.OTHERS, Spread.ONE),
    "openrlhf.group_norm": Relative(epsilon=1e-9),
    "openrlhf.dr_grpo": Relative(spread=Spread.ONE),
    "openrlhf.flash_reinforce": Relative(Baseline.BATCH, Spread.ONE),
}


def relative(rewards_B: Tensor, group_B: Tensor, how: Relative) -> Tensor:
    """Return (R − baseline) / (spread + ε) per row, [B].

    rewards_B: NaN is a completion that no reward function scored: it counts for nobody and gets 0.
    group_B:   integers, equal where two rows answer the same prompt.
    Raises NanscopeError if the two are not one number per row.
    """
    _check_tensors(rewards_B=rewards_B, group_B=group_B)
    an("how", how, Relative, "a Relative, as RELATIVE holds them by name", near(how, RELATIVE) and "RELATIVE[…] is what has names")
    if rewards_B.dim() != 1 or rewards_B.shape != group_B.shape:
        message = f"rewards are {tuple(rewards_B.shape)} and groups {tuple(group_B.shape)}: both are one number per row"
        raise NanscopeError(message, slug="shape-mismatch")
    scored_B = ~rewards_B.isnan()
    known_B = torch.where(scored_B, rewards_B, 0.0)
    group_BB = (group_B[:, None] == group_B[None, :]) & scored_B[None, :]
    reference = {
        "group": group_BB,
        "others": group_BB & ~torch.eye(len(group_B), dtype=torch.bool, device=group_B.device),
        "batch": scored_B[None, :].expand_as(group_BB),
    }
    difference_B = known_B
    if how.baseline is not Baseline.ZERO:
        difference_B = known_B - _moments(known_B, reference[how.baseline])[0]
    if how.spread is not Spread.ONE:
        spread_B = _moments(known_B, reference[how.spread])[1]
        divided_B = difference_B / (spread_B + how.epsilon)
        difference_B = torch.where(spread_B > 0, divided_B, difference_B) if how.where_spread else divided_B
    if how.baseline is not Baseline.BATCH:
        own_B = known_B if how.spread is Spread.ONE else known_B / (1 + how.epsilon)
        alone_B = group_BB.sum(1) == 1
        difference_B = torch.where(alone_B, own_B if how.keep_alone else 0.0, difference_B)
    return torch.where(scored_B, difference_B, 0.0)


def whiten(x_BT: Tensor, mask_BT: Tensor, *, shift_mean: bool = True, unbiased: bool = True, epsilon: float = 1e-8) -> Tensor:
    """Return (x − x̄) / √(var + ε) with mean and variance over the valid tokens, [B, T]; verl torch_functional.py, `masked_whiten`.

    shift_mean: False adds the mean again. A batch with one valid token has no unbiased variance: the result is NaN.
    """
    _check_tensors(wide=True, x_BT=x_BT, mask_BT=mask_BT)
    mask_BT = mask_BT.to(x_BT.dtype)
    tokens = mask_BT.sum()
    valid_BT = torch.where(mask_BT > 0, x_BT, 0.0)
    mean = valid_BT.sum() / tokens
    variance = (torch.where(mask_BT > 0, x_BT - mean, 0.0) ** 2).sum() / (tokens - 1 if unbiased else tokens)
    white_BT = (x_BT - mean) * torch.rsqrt(variance + epsilon)
    return white_BT if shift_mean else white_BT + mean


def returns_to_go(rewards_BT: Tensor, mask_BT: Tensor, gamma: float = 1.0) -> Tensor:
    """Return G_t = R_t + γ·G_{t+1} over the valid tokens, 0 elsewhere, [B, T]: REINFORCE++, arXiv 2501.03262 (before its whitening).

    A masked token (a tool's answer) is stepped over: what comes after it reaches what was before it undiscounted.
    """
    _check_tensors(wide=True, rewards_BT=rewards_BT, mask_BT=mask_BT)
    an("gamma", gamma, (int, float), "a number")
    mask_BT = mask_BT.to(rewards_BT.dtype)
    following_B = torch.zeros_like(rewards_BT[:, 0])
    columns: list[Tensor] = []
    for t in reversed(range(rewards_BT.shape[1])):
        here_B = rewards_BT[:, t] + gamma * following_B
        columns.append(here_B * mask_BT[:, t])
        following_B = here_B * mask_BT[:, t] + following_B * (1 - mask_BT[:, t])
    return torch.stack(columns[::-1], dim=1)


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float = 1.0, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), both [B, T], before whitening: arXiv 1506.02438 eq. 16; verl core_algos.py:215.

    A_t = δ_t + γλ·A_{t+1} with δ_t = R_t + γ·V_{t+1} − V_t; a masked token is stepped over.
    """
    _check_tensors(wide=True, rewards_BT=rewards_BT, values_BT=values_BT, mask_BT=mask_BT)
    for name, number in (("gamma", gamma), ("lam", lam)):
        an(name, number, (int, float), "a number")
    mask_BT = mask_BT.to(values_BT.dtype)
    next_value_B = next_advantage_B = torch.zeros_like(values_BT[:, 0])
    columns: list[Tensor] = []
    for t in reversed(range(values_BT.shape[1])):
        valid_B = mask_BT[:, t]
        here_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t] + gamma * lam * next_advantage_B
        next_value_B = values_BT[:, t] * valid_B + (1 - valid_B) * next_value_B
        next_advantage_B = here_B * valid_B + (1 - valid_B) * next_advantage_B
        columns.append(next_advantage_B)
    advantages_BT = torch.stack(columns[::-1], dim=1)
    return advantages_BT, advantages_BT + values_BT


def _check_tensors(*, wide: bool = False, **tensors: Tensor) -> None:
    """Raise NanscopeError for what is no tensor, and, where they are `wide`, for what is not [B, T] like the first."""
    for name, tensor in tensors.items():
        an(name, tensor, Tensor, "a tensor")
    first, shape = next((name, tensor.shape) for name, tensor in tensors.items())
    for name, tensor in tensors.items() if wide else ():
        if tensor.dim() != 2:
            raise NanscopeError(f"{name} is {tuple(tensor.shape)}: it is [B, T], rows by response tokens", slug="shape-mismatch")
        if tensor.shape != shape:
            raise NanscopeError(f"{name} is {tuple(tensor.shape)} and {first} is {tuple(shape)}: they must be alike", slug="shape-mismatch")


def _moments(x_B: Tensor, over_BB: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased standard deviation of x over the rows that each row looks at; 0 where there are too few."""
    weights_BB = over_BB.to(x_B.dtype)
    count_B = weights_BB.sum(1)
    mean_B = (weights_BB * x_B).sum(1) / count_B.clamp(min=1)
    squares_B = (weights_BB * (x_B[None, :] - mean_B[:, None]) ** 2).sum(1)
    return mean_B, (squares_B / (count_B - 1).clamp(min=1)).sqrt()
