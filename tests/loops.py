"""Training loops of a tiny GRPO, and what spoils a step of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def policy(vocabulary: int = 20) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary))


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def clipped_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    log_ratio = logps - old_logps
    ratio = torch.exp(log_ratio)
    unclipped = ratio * advantages[:, None]
    clipped = ratio.clamp(0.8, 1.2) * advantages[:, None]
    per_token_loss = -torch.min(unclipped, clipped)
    return (per_token_loss * mask).sum() / mask.sum()


def grpo_steps(model: nn.Module, steps: int, spoil: Callable[[int, dict[str, Tensor]], None] = lambda step, batch: None) -> list[float]:
    """Run a few steps of a tiny GRPO loop; `spoil` may edit the batch. Returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        ids = torch.randint(0, 20, (4, 7))
        with torch.no_grad():
            old = log_probs(model(ids[:, :-1]), ids[:, 1:])
        batch = {"old_logps": old, "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]), "mask": torch.ones(4, 6)}
        batch["mask"][2, 4:] = 0
        spoil(step, batch)
        loss = clipped_loss(log_probs(model(ids[:, :-1]), ids[:, 1:]), **batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def stale_at(row: int, column: int, step: int = 2) -> Callable[[int, dict[str, Tensor]], None]:
    def spoil(now: int, batch: dict[str, Tensor]) -> None:
        if now == step:
            batch["old_logps"][row, column] = -200.0

    return spoil


def finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


def accumulated(steps: int, bad: set[tuple[int, int]]) -> None:
    """A few steps of two micro-batches each; in those of `bad`, (step, micro-batch), one old log-prob is far off."""
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        for micro in (1, 2):
            ids = torch.randint(0, 20, (2, 5))
            logps = log_probs(model(ids[:, :-1]), ids[:, 1:])
            old = logps.detach().clone()
            if (step, micro) in bad:
                old[1, micro] = -200.0
            (clipped_loss(logps, old, torch.tensor([1.0, 0.5]), torch.ones(2, 4)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
