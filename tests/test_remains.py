"""What a run leaves behind: a model that is spoilt without any step being bad is no healthy run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import nanscope
from nanscope.causes import Cause


class Masked(nn.Module):
    """Buffers as models have them: a mask of infinities, a placeholder of NaN that nobody reads, integers, half and empty ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))
        self.register_buffer("placeholder", torch.full((3,), math.nan))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(2).half())
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) @ (x.transpose(-1, -2) @ x + self.mask).softmax(-1)).relu()


def train(spoil: Callable[[nn.Sequential], object] = lambda model: None, steps: int = 4) -> nn.Sequential:
    """spoil: is called after the second step, in training mode nothing reads it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Masked(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()
        if step == 2:
            spoil(model)
    return model


def test_a_model_in_good_order_is_quiet(tmp_path: Path) -> None:
    """Masks, placeholders and counters are what they were."""
    with nanscope.watch(out=tmp_path) as scope:
        train()
    assert scope.verdict.healthy and scope.notes == [] and scope.verdict.gaps == ()


def test_statistics_that_went_bad_while_the_loss_was_fine(tmp_path: Path) -> None:
    """They are read in evaluation only: the next one would be NaN."""
    with nanscope.watch(out=tmp_path) as scope:
        model = train(lambda model: model[1].running_mean[2:].fill_(math.nan))  # type: ignore[operator,union-attr,index]
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.phase, incident.cause) == (3, "weights", Cause.POISONED_WEIGHTS)
    assert "the buffer 1.running_mean was already NaN at [2] of [8]" in scope.verdict.sentence
    assert [note.slug for note in incident.notes] == ["left_behind"] and model is not None
    assert (scope.steps, scope.bad_steps) == (4, 1) and [entry.nonfinite for entry in scope.history.entries] == [False, False, True, False]


def test_statistics_of_a_model_that_nobody_optimizes(tmp_path: Path) -> None:
    """They are found when the block ends."""
    with nanscope.watch(out=tmp_path) as scope:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        for _ in range(2):
            model(torch.randn(6, 4)).sum().backward()
            model[1].running_var[0] = math.inf  # type: ignore[index,operator]
    assert "the buffer 1.running_var was already +inf at [0] of [8]" in scope.verdict.sentence


def test_weights_that_were_spoilt_after_the_last_step(tmp_path: Path) -> None:
    """By hand, and nobody steps any more."""
    with nanscope.watch(out=tmp_path) as scope:
        model = train()
        model[0].weight.data[3, 1] = math.inf
    assert "the weight 0.weight was already +inf at [3, 1] of [8, 4]" in scope.verdict.sentence
    assert (scope.steps, scope.bad_steps) == (4, 1)


def test_what_is_bad_since_a_bad_step_is_not_told_twice(tmp_path: Path) -> None:
    """There is one cause."""
    with nanscope.watch(out=tmp_path) as scope:
        model = train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        (model(torch.randn(6, 4)).sum() * math.nan).backward()
        optimizer.step()
    assert [incident.step for incident in scope.verdict.incidents] == [5]


def test_a_weight_that_is_in_no_model(tmp_path: Path) -> None:
    """It belongs to an optimizer."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        weight.square().sum().backward()
        optimizer.step()
        weight.data[1] = math.nan
    assert not scope.verdict.healthy and scope.verdict.incidents[0].origin.index == (1,)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_weight_may_hold_what_it_wants(tmp_path: Path, frozen: bool) -> None:
    """Nobody trains it."""
    with nanscope.watch(out=tmp_path) as scope:
        model = train()
        model[3].bias.data.fill_(-math.inf)
        model[3].bias.requires_grad_(not frozen)
    assert scope.verdict.healthy == frozen
