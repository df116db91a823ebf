"""Static loss scaling without a scaler: the loss is multiplied by 2**16, the gradients are divided by it before the step."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the value that backward starts from is above 1e5 and raw gradients are huge until they are unscaled by hand"

LOSS_SCALE = float(2**16)


def build():
    torch.manual_seed(121)
    model = nn.Sequential(nn.Linear(6, 18), nn.Tanh(), nn.Linear(18, 6))
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), x=torch.randn(5, 6), y=torch.randint(0, 6, (5,))
    )


def run(s=None):
    s = s or build()
    for _ in range(4):
        s.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(s.model(s.x), s.y)
        (loss * LOSS_SCALE).backward()
        with torch.no_grad():
            for p in s.model.parameters():
                p.grad.div_(LOSS_SCALE)
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss
