"""Reward model with a gradient penalty: torch.autograd.grad with create_graph, the norm has an epsilon under its root."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "second derivatives are taken, and some input gradients are exactly 0 under a square root that has an epsilon"


def build():
    torch.manual_seed(227)
    rm = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    x = torch.randn(5, 6)
    with torch.no_grad():
        rm[0].bias -= 0.4
        x[3] = 0.0
        rm[0].bias[:] = rm[0].bias.clamp(max=-0.01)  # the all-zero input switches every unit off
    return SimpleNamespace(rm=rm, x=x, y=torch.randn(5), opt=torch.optim.Adam(rm.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    for _ in range(4):
        x = s.x.clone().requires_grad_(True)
        score = s.rm(x).squeeze(-1)
        (gx,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        norm = (gx.pow(2).sum(-1) + 1e-8).sqrt()
        loss = (score - s.y).pow(2).mean() + 10.0 * (norm - 1).pow(2).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
