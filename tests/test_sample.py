"""Which sample an origin belongs to: its prompt is told where the program groups by it, or where setting and advantages agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import record
from torch import Tensor

from nanscope.verdict.diagnose import diagnose
from nanscope.verdict.incident import Incident
from nanscope.verdict.sample import BatchRow

ROWS, TOKENS, SIZE = 12, 5, 4


def clipped(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old_logps)
    return -(ratio * advantages.unsqueeze(1) * mask).sum() / mask.sum()


def by_group(logps: Tensor, old_logps: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    grouped = rewards.view(-1, SIZE)
    advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1)
    return clipped(logps, old_logps, advantages, mask)


def strided(logps: Tensor, old_logps: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    grouped = rewards.reshape(SIZE, -1)
    return clipped(logps, old_logps, (grouped - grouped.mean(0)).reshape(-1), mask)


def in_chunks(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old_logps)
    per_row = -(ratio * advantages.unsqueeze(1) * mask).sum(-1)
    return per_row.view(-1, SIZE).mean(1).mean()


def told(loss: Callable[..., Tensor], scores: Tensor, **settings: Any) -> Incident:
    torch.manual_seed(0)
    logps, mask = -torch.rand(ROWS, TOKENS), torch.ones(ROWS, TOKENS)
    old = logps.clone()
    old[6, 3], mask[6, 3:] = -200.0, 0.0
    recorded = record(loss, logps.requires_grad_(), old, scores, mask)
    return diagnose(recorded.snapshot(settings=settings))


REWARDS = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 0])
CENTRED = (REWARDS.view(-1, SIZE) - REWARDS.view(-1, SIZE).mean(1, keepdim=True)).view(-1)
SHUFFLED = CENTRED[torch.tensor([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11])]


@pytest.mark.parametrize(
    ("loss", "scores", "settings", "sample"),
    [
        (by_group, REWARDS, {}, BatchRow(6, 3, 1, 2)),
        (strided, REWARDS, {}, BatchRow(6, 3, 0, 2)),
        (clipped, CENTRED, {}, BatchRow(6, 3)),
        (clipped, CENTRED, {"num_generations": SIZE}, BatchRow(6, 3, 1, 2)),
        (clipped, SHUFFLED, {"num_generations": SIZE}, BatchRow(6, 3)),
        (in_chunks, SHUFFLED, {}, BatchRow(6, 3)),
        (clipped, CENTRED, {"num_generations": 5}, BatchRow(6, 3)),
        (clipped, torch.zeros(ROWS), {"num_generations": SIZE}, BatchRow(6, 3)),
    ],
)
def test_a_completion_is_told_of_its_prompt(loss: Callable[..., Tensor], scores: Tensor, settings: Any, sample: BatchRow) -> None:
    """By the grouping that the program computes; a setting has to agree with the advantages, which a shuffled batch does not."""
    incident = told(loss, scores, **settings)
    assert incident.sample == sample
    words = f", completion {sample.completion} of prompt {sample.prompt}" if sample.prompt is not None else ""
    assert f" at row 6, token 3{words}   loss" in incident.headline


def test_one_number_a_row_has_no_token() -> None:
    """What is divided by the tokens of an empty row is told by that row, and so is its headline."""

    def empty(logps: Tensor, mask: Tensor) -> Tensor:
        per_row = (logps * mask).sum(-1) / mask.sum(-1)
        return per_row.mean()

    mask = torch.ones(ROWS, TOKENS)
    mask[7] = 0.0
    incident = diagnose(record(empty, torch.randn(ROWS, TOKENS).requires_grad_(), mask).snapshot())
    assert incident.sample == BatchRow(7) and " at row 7" in incident.headline and "token" not in incident.headline


def test_what_lies_in_no_batch_is_no_sample() -> None:
    """An element of a vector belongs to nobody."""

    def scaled(rewards: Tensor, baseline: Tensor) -> Tensor:
        return (rewards / baseline).mean()

    incident = diagnose(record(scaled, torch.ones(ROWS).requires_grad_(), torch.zeros(ROWS)).snapshot())
    assert incident.sample is None and " at row" not in incident.headline
