"""A value head that starts 100 away from its targets: squared error of 1e4 at the first step, smaller at each later one."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the first loss is 1e4 because targets are near 100, nothing else is unusual"


def build():
    torch.manual_seed(305)
    v = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))
    return SimpleNamespace(v=v, states=torch.randn(10, 4), targets=100 + torch.randn(10), opt=torch.optim.SGD(v.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    for _ in range(6):
        s.opt.zero_grad()
        loss = nn.functional.mse_loss(s.v(s.states).flatten(), s.targets)
        loss.backward()
        s.opt.step()
    return loss
