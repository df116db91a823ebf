"""A hand-written fp16 scaler: the first scaled norm is inf, so gradients are dropped, the scale is halved until one fits, then it steps."""

from types import SimpleNamespace

import torch
import torch.nn as nn


class HalvingScaler:
    def __init__(self, start=2.0**22):
        self.scale = start

    def try_step(self, loss, params, optimizer, max_norm=1.0):
        optimizer.zero_grad(set_to_none=True)
        (loss.float() * self.scale).backward()
        total = torch.stack([p.grad.float().norm() for p in params]).norm()
        if not torch.isfinite(total):
            self.scale /= 4
            optimizer.zero_grad(set_to_none=True)
            return False
        for p in params:
            p.grad.mul_((max_norm / (total + 1e-6)).clamp(max=1.0 / self.scale))
        optimizer.step()
        return True


class Scorer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).squeeze(-1)


def build():
    torch.manual_seed(353)
    model = Scorer().to(torch.float16)
    batch = {"x": torch.randn(5, 8, dtype=torch.float16), "y": torch.rand(5)}
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), scaler=HalvingScaler(), batch=batch)


def run(s=None):
    s = s or build()
    params = list(s.model.parameters())
    s.skipped = 0
    for _ in range(12):
        loss = (s.model(s.batch["x"]).float() - s.batch["y"]).square().mean()
        if s.scaler.try_step(loss, params, s.optimizer):
            break
        s.skipped += 1
    return loss
