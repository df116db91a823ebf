"""What does no harm is told once, and no more."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import nanscope


def test_a_gradient_that_vanishes_by_itself_is_worth_a_word(tmp_path: Path) -> None:
    """It is NaN where it leaves the loss, nobody hides it, and no weight gets it: the run is healthy, and it is said once."""
    weight, given = nn.Parameter(torch.ones(2)), torch.zeros(2, requires_grad=True)

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self) -> torch.Tensor:
            return torch.cat([self.weight, given.detach().requires_grad_()])

    model = Drops()
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            out = model()
            (out[:2].sum() + out[2:].sqrt().sum() * 0).backward()
    assert scope.verdict.healthy and [note.slug for note in scope.notes] == ["nonfinite_absorbed"]
    assert "the gradient of out was not finite" in scope.notes[0].text
