"""A short run with a loss of GRPO, for what follows a run from outside: healthy, or with one overflow at a masked token in its third step.

weights = train([nanscope.integrations.WandB()], tmp_path, fault=True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nanscope
from nanscope.watching import trackers as following
from nanscope.watching.scope import Scope

following.PATIENCE = 300.0  # seconds: on a machine with much else to do a page takes its time
STEPS = 5
BAD = 3


def loop(fault: bool, after: Callable[[int, Tensor], None] = lambda step, loss: None) -> Tensor:
    """Train, and return the weights. after: is called with each step."""
    torch.manual_seed(3)
    model = nn.Linear(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, advantages, mask = torch.randn(3, 4), torch.tensor([[1.0], [-0.5], [0.3]]), torch.ones(3, 6)
    mask[:, 5] = 0
    for step in range(1, STEPS + 1):
        log_probs = torch.log_softmax(model(batch), dim=-1)
        old_log_probs = log_probs.detach() - 0.01 * step
        if fault and step == BAD:
            old_log_probs[1, 5] -= 200.0
        loss = policy_loss(log_probs, old_log_probs, advantages, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(step, loss)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """One that multiplies by its mask, which is what kills it."""
    ratio = torch.exp(log_probs - old_log_probs)
    return -(ratio * advantages * mask).sum() / mask.sum()


def train(
    trackers: Sequence[Any], out: Path, fault: bool = False, after: Callable[[int, Tensor], None] = lambda step, loss: None
) -> tuple[Tensor, Scope]:
    """Train watched, and return the weights and the scope."""
    with nanscope.watch(out=out / "runs", trackers=trackers) as scope:
        weights = loop(fault, after)
    return weights, scope
