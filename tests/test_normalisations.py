"""Where a normalisation divides by 0 it is told, and with the usual eps it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recorded import record
from torch import Tensor
from torch.nn import functional as F

from nanscope.causes import Cause
from nanscope.verdict.diagnose import diagnose


def rows() -> Tensor:
    """Features of which those of one row are alike; of another one they are large, and nothing is wrong with it."""
    torch.manual_seed(0)
    found = torch.randn(3, 4)
    found[1], found[2] = 0.0, 1e6
    return found + torch.tensor([[0.0], [0.0], [1.0]]) * torch.randn(4) * 1e5


def weight_norm(v: Tensor) -> Tensor:
    return torch._weight_norm(v, torch.ones(3, 1), 0)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "layer norm": (lambda x: F.layer_norm(x, (4,), eps=0.0), "avoid_singular_op"),
    "layer norm, scaled": (lambda x: F.layer_norm(x, (4,), torch.full((4,), 2.0), torch.ones(4), eps=0.0), "avoid_singular_op"),
    "group norm": (lambda x: F.group_norm(x, 1, eps=0.0), "avoid_singular_op"),
    "weight norm": (weight_norm, ""),
}


@pytest.mark.parametrize(("norm", "fix"), CASES.values(), ids=CASES)
def test_what_divides_by_0_is_told_and_mended(norm: Callable[[Tensor], Tensor], fix: str) -> None:
    """The cause is the division; an eps heals what takes one."""
    incident = diagnose(record(lambda x: torch.tanh(norm(x)).square().mean(), rows().requires_grad_()).snapshot())
    assert incident.cause is Cause.ZERO_DIV_ZERO
    assert "normalisation divides by" in incident.sentence
    assert [(one.id, one.works) for one in incident.fixes if one.executed] == [(fix, True)][: len(fix)]


def test_an_overflow_is_no_division_by_0() -> None:
    """Numbers that are too far apart for their variance have one that is not 0."""
    x = torch.tensor([[3e38, -3e38, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    incident = diagnose(record(lambda x: F.layer_norm(x, (4,), eps=0.0).square().mean(), x).snapshot())
    assert incident.cause is not Cause.ZERO_DIV_ZERO
