"""Where a model cannot be run again, what it was given tells."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.verdict.incident import Verdict


class Once(nn.Module):
    """A model that takes no second look: it has a use for each batch, and that is over."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.runs = 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.runs += 1
        if self.runs > 1:
            raise RuntimeError("this batch was used up")
        out: Tensor = self.layer(x.masked_fill(mask < 0, 0.0))
        return out


def watched(out: Path, x: Tensor, mask: Tensor, weight: float = 1.0, factor: float = 1.0) -> Verdict:
    model = Once()
    nn.init.constant_(model.layer.weight, weight)
    with nanscope.watch(out=out) as scope:
        (model(x, mask) * factor).mean().backward()
    return scope.verdict


NAN, INF = math.nan, math.inf

GIVEN = [  # what the batch holds, its mask, every weight -> phase and value of the origin
    (1.0, 0.0, NAN, ("weights", NAN)),
    (NAN, 0.0, 1.0, ("input", NAN)),
    (3e38, 0.0, 3e38, ("forward", INF)),
    (3e38, -INF, NAN, ("weights", NAN)),
]


@pytest.mark.parametrize(("x", "mask", "weight", "expected"), GIVEN)
def test_what_a_model_was_given_tells_where_it_cannot_be_run_again(
    x: float, mask: float, weight: float, expected: tuple[str, float], tmp_path: Path
) -> None:
    """A weight that is NaN, or NaN in an argument; a mask of −inf is none of both, and a model of its own making stays to blame."""
    (incident,) = watched(tmp_path, torch.full((3, 2), x), torch.full((3, 2), mask), weight).incidents
    assert incident.phase == expected[0]
    assert math.isnan(incident.origin.value) if math.isnan(expected[1]) else incident.origin.value == expected[1]


def test_weights_behind_a_jagged_tensor_are_found(tmp_path: Path) -> None:
    """Log-probs that pass through a nested tensor are another tensor to the loss, and the weights are NaN all the same."""
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, NAN)
    with nanscope.watch(out=tmp_path) as scope:
        log_probs = model(torch.randn(6, 4)).squeeze(-1)
        values = torch.nested.nested_tensor_from_jagged(log_probs, torch.tensor([0, 2, 6])).values()
        torch.stack([nn.functional.pad(values[0:2], (0, 2)), values[2:6]]).mean().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.cause, incident.phase) == ("poisoned_weights", "weights") and "weights and gradients stayed" not in incident.sentence
