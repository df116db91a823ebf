"""Hand-written dynamic loss scaling: the first tries overflow in half precision and are dropped until a smaller scale fits."""

from types import SimpleNamespace

import torch
import torch.nn as nn


class DynamicScaler:
    def __init__(self, scale):
        self.scale = scale
        self.skipped = 0

    def overflowed(self, params):
        return any(not torch.isfinite(p.grad).all() for p in params if p.grad is not None)

    def shrink(self):
        self.scale /= 4.0
        self.skipped += 1


class MasterAdam:
    """float32 master copies, half-precision model weights."""

    def __init__(self, params, lr):
        self.half = list(params)
        self.master = [p.detach().clone().float().requires_grad_() for p in self.half]
        self.inner = torch.optim.Adam(self.master, lr=lr)

    def zero_grad(self):
        for p in self.half:
            p.grad = None

    @torch.no_grad()
    def step(self, scale=1.0):
        for m, p in zip(self.master, self.half):
            m.grad = p.grad.float() / scale
        nn.utils.clip_grad_norm_(self.master, 1.0)
        self.inner.step()
        for m, p in zip(self.master, self.half):
            p.copy_(m)


def build():
    torch.manual_seed(931)
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 6)).half()
    batch = {"x": torch.randn(12, 10).half(), "label": torch.randint(0, 6, (12,))}
    return SimpleNamespace(model=model, optimizer=MasterAdam(model.parameters(), lr=1e-3), batch=batch, scaler=DynamicScaler(2.0**22))


def run(s=None):
    s = s or build()
    for _ in range(12):
        loss = nn.functional.cross_entropy(s.model(s.batch["x"]).float(), s.batch["label"])
        s.optimizer.zero_grad()
        (loss * s.scaler.scale).backward()
        if s.scaler.overflowed(s.optimizer.half):
            s.scaler.shrink()
            continue
        s.optimizer.step(s.scaler.scale)
        break
    return loss
