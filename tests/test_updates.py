"""Updates out of all proportion: those whose state gradients cannot have made, and no others."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import nanscope

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MOMENTS = ("exp_avg", "exp_avg_sq")


def trained(make: Make, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer after some steps, and what makes another; half of its rows are hardly ever seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).to(dtype)
    optimizer = make(list(model.parameters()))

    def step() -> None:
        ids = torch.randint(0, 10, (4, 7))
        loss = 0.01 * nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    for _ in range(20):
        step()
    return model, optimizer, step


def in_half(optimizer: torch.optim.Optimizer) -> None:
    """The state goes through a checkpoint in half precision."""
    for state in optimizer.state.values():
        for name in MOMENTS:
            state[name] = state[name].half().float()


def test_a_second_moment_that_a_checkpoint_has_rounded_to_0_is_found(tmp_path: Path) -> None:
    """Nothing but epsilon is left to divide by: the update is a hundred learning rates and more, and all of it is finite."""
    model, optimizer, step = trained(lambda weights: torch.optim.AdamW(weights, lr=1e-4))
    in_half(optimizer)
    with nanscope.watch(model, out=tmp_path) as scope:
        step()
    assert scope.verdict.status == "suspect"
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.op, incident.origin.role) == ("optimizer", "addcdiv", "optimizer")
    assert incident.origin.variable in dict(model.named_parameters())
    mean, squares = (dict(incident.origin.operands)[name] for name in MOMENTS)
    assert abs(mean) > 100 * math.sqrt(squares) and "times what float64 makes of the optimizer's state" in incident.sentence
    assert abs(incident.origin.value) > 1e-3 and math.isfinite(incident.origin.value)


OPTIMIZERS: dict[str, Make] = {
    "adam": lambda weights: torch.optim.Adam(weights, lr=1e-2),
    "decay": lambda weights: torch.optim.AdamW(weights, lr=1e-3, weight_decay=10.0),
    "amsgrad": lambda weights: torch.optim.AdamW(weights, lr=1e-2, amsgrad=True),
    "no memory": lambda weights: torch.optim.Adam(weights, lr=1e-2, betas=(0.0, 0.0)),
    "a long mean": lambda weights: torch.optim.Adam(weights, lr=1e-2, betas=(0.99, 0.9)),
    "a tensor as rate": lambda weights: torch.optim.Adam(weights, lr=torch.tensor(1e-2), capturable=False, foreach=False),
    "fused": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
    "no rate": lambda weights: torch.optim.AdamW(weights, lr=0.0),
    "uphill": lambda weights: torch.optim.AdamW(weights, lr=1e-2, maximize=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=1e-2),
    "radam": lambda weights: torch.optim.RAdam(weights, lr=1e-2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_gradients_have_made_is_healthy(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also the first one, one after thousands of small gradients, and one that rounding turns into nothing."""
    model, optimizer, step = trained(OPTIMIZERS[name], dtype)
    with nanscope.watch(model, out=tmp_path, deep_every=1) as scope:
        for _ in range(3):
            step()
        for weight in model.parameters():
            weight.grad = 1e2 * torch.randn_like(weight)  # nobody has seen the like
        optimizer.step()
        optimizer.state.clear()
        step()
    assert scope.verdict.status != "suspect", scope.verdict.sentence
    assert not [gap for gap in scope.verdict.gaps if gap.slug == "deep-failed"]


def test_a_state_that_came_whole_through_a_checkpoint_is_healthy(tmp_path: Path) -> None:
    """In single precision, and in bfloat16, which has its range."""
    model, optimizer, step = trained(lambda weights: torch.optim.AdamW(weights, lr=1e-4))
    for state in optimizer.state.values():
        for name in MOMENTS:
            state[name] = state[name].bfloat16().float()
    with nanscope.watch(model, out=tmp_path, deep_every=1) as scope:
        for _ in range(5):
            step()
    assert scope.verdict.healthy
