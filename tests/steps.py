"""Small training steps that go wrong, and one that does not. Golden outputs name the lines of this file: it changes seldom."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def _mask_after(step: int = 0) -> None:
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    mask = torch.ones(2, 3)
    mask[1, 2] = 0.0
    old_logps = torch.zeros(2, 3)
    old_logps[1, 2] = -120.0
    logps = model(x).squeeze(-1)
    log_ratio = logps - old_logps
    ratio = torch.exp(log_ratio)
    loss = -(ratio * mask).sum() / mask.sum()
    loss.backward()


def _finite_loss() -> None:
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[0, 1] = False
    logps = model(x).squeeze(-1)
    log_ratio = torch.where(mask, logps, logps + 150.0)
    ratio = torch.exp(log_ratio)
    loss = -torch.where(mask, ratio, 0.0).mean()
    loss.backward()


def _bad_input() -> None:
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    mask = torch.ones(2, 3)
    mask[0, 2] = 0.0
    old_logps = torch.zeros(2, 3)
    old_logps[0, 2] = math.nan
    ratio = torch.exp(model(x).squeeze(-1) - old_logps)
    loss = -(ratio * mask).mean()
    loss.backward()


def _optimizer() -> None:
    model = _model().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-9, foreach=False)
    loss = model(torch.full((1, 4), 1e-4, dtype=torch.float16)).sum()
    loss.backward()
    optimizer.step()


def _drifting() -> None:
    """Nine healthy steps whose masked exponents grow, and one too many."""
    model, x = _model(), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mask, offset = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 10.0]])
    for step in range(10):
        logps = model(x).squeeze(-1)
        old_logps = logps.detach() - step * offset
        ratio = torch.exp(logps - old_logps)
        loss = -(ratio * mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _healthy() -> None:
    loss = _model()(torch.ones(3, 4)).sum()
    loss.backward()


RUNS: dict[str, Callable[[], None]] = {
    "forward masked": _mask_after,
    "backward, finite loss": _finite_loss,
    "input": _bad_input,
    "optimizer": _optimizer,
    "history": _drifting,
    "healthy": _healthy,
}


def clipped(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A loss of PPO."""
    ratio = torch.exp(log_probs - old_log_probs)
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(surrogate * mask).sum() / mask.sum()
