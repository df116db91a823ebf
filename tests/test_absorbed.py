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


def clamped(tmp_path: Path, *, counts: bool) -> tuple[str, ...]:
    """What is said of a run whose old log-probs hold a −inf that a clamp bounds."""
    log_probs = nn.Parameter(torch.linspace(-0.3, 0.3, 6).reshape(2, 3))
    optimizer = torch.optim.SGD([log_probs], lr=0.1)
    mask = torch.ones(2, 3)
    mask[1, 2] = float(counts)
    with nanscope.watch(out=tmp_path) as scope:
        old = log_probs.detach().clone()
        old[1, 2] = -torch.inf
        ratio = torch.exp((log_probs * 1.0 - old).clamp(-20, 20))
        ((ratio * mask).sum() / mask.sum()).backward()
        optimizer.step()
    assert scope.verdict.status == "healthy"
    return tuple(note.text for note in scope.verdict.notes if note.slug == "nonfinite_absorbed")


def test_an_infinity_that_a_clamp_bounds_is_worth_a_word_if_it_counts(tmp_path: Path) -> None:
    """The loss is finite and far too large: of whom it came is told, with the number that the token trains with."""
    (text,) = clamped(tmp_path, counts=True)
    assert text.startswith("old came in as −inf at [1, 2]")
    assert "a clamp made 20 of it" in text
    assert clamped(tmp_path, counts=False) == ()


def test_a_ratio_that_a_cap_bounds_is_one_that_counts(tmp_path: Path) -> None:
    """Its token trains with the cap, as CISPO has it: it is not outside of the loss."""
    log_probs = nn.Parameter(torch.linspace(-0.3, 0.3, 6).reshape(2, 3))
    old = log_probs.detach().clone()
    old[1, 2] = -200.0
    with nanscope.watch(out=tmp_path) as scope:
        ratio = torch.exp(log_probs.detach() - old)
        (-(ratio.clamp(max=5.0) * log_probs).mean()).backward()
    (text,) = (note.text for note in scope.verdict.notes if note.slug == "nonfinite_absorbed")
    assert "ratio was +inf at [1, 2], for which the loss counts another number" in text
