"""A hand-written Adam variant: parameters without any gradient so far have a second moment of 0 and get 0 / (0 + eps)."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "second moments of exactly 0 sit under a square root and in a denominator, protected by eps"


class PlainAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["t"], st["m"], st["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                st["t"] += 1
                st["m"].lerp_(p.grad, 1 - b1)
                st["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                denom = (st["v"] / (1 - b2 ** st["t"])).sqrt_().add_(group["eps"])
                p.addcdiv_(st["m"], denom, value=-group["lr"] / (1 - b1 ** st["t"]))


def build():
    torch.manual_seed(320)
    model = nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 50))
    return SimpleNamespace(model=model, opt=PlainAdam(model.parameters(), lr=2e-3), ids=torch.randint(3, 20, (3, 7)))


def run(s=None):
    s = s or build()
    for _ in range(4):
        loss = nn.functional.cross_entropy(s.model(s.ids[:, :-1]).flatten(0, 1), s.ids[:, 1:].flatten())
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
