"""A micro-batch without any target has a NaN mean loss; the loop notices and never runs its backward pass."""

from types import SimpleNamespace

import torch
import torch.nn as nn


def build():
    torch.manual_seed(623)
    model = nn.Sequential(nn.Embedding(32, 12), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 32))
    micro_batches = []
    for first_target in (4, 10, 2, 6):  # the second conversation was cut inside the user turn
        x = torch.randint(0, 32, (2, 10))
        y = torch.randint(0, 32, (2, 10))
        y[:, :first_target] = -1
        micro_batches.append((x, y))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=micro_batches)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad(set_to_none=True)
    used, shown = [], []
    for x, y in s.batch:
        logits = s.model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
        shown.append(loss.item())
        if not (y != -1).any():
            continue
        (loss / len(s.batch)).backward()
        used.append(loss.detach())
    s.history = shown
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return torch.stack(used).mean()
