"""Models a part of which torch.jit has scripted, as normalisers of observations are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope


class Normaliser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return (x - self.mean) * self.scale


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normaliser = torch.jit.script(Normaliser())
        self.linear = nn.Linear(3, 1)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        spread = self.linear(self.normaliser(x)) ** 2
        return torch.log(spread * self.gain + 1 - 1 * (self.gain == 0))


def train(policy: Policy, bad: int = 0) -> None:
    optimizer = torch.optim.Adam(policy.parameters())
    for step in range(1, 7):
        policy.gain = float(step != bad)
        optimizer.zero_grad()
        policy(torch.randn(8, 3)).mean().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_is_wrong_with_one_that_is_fine(tmp_path: Path) -> None:
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        policy = Policy()
        if watched:
            with nanscope.watch(policy, out=tmp_path) as scope:
                train(policy)
        else:
            train(policy)
        found.append([*policy.parameters(), *policy.buffers()])
    assert scope.verdict.healthy and not scope.verdict.gaps, scope.verdict.sentence
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_goes_wrong_behind_it_has_its_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = Policy()
    with nanscope.watch(policy, out=tmp_path) as scope:
        train(policy, bad=4)
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.origin.op) == (4, "log")
    assert (incident.origin.file or "").endswith("test_scripted.py") and "torch.log(spread" in (incident.origin.expression or "")
    assert not [note for note in incident.notes if note.slug == "not_run_again"]
