"""Sharpness-aware minimisation: weights are pushed uphill, a second backward is taken there, the weights return and are updated."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "weights are changed in place before the step in the direction that makes the loss worse, and are put back"


def build():
    torch.manual_seed(408)
    net = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3))
    return SimpleNamespace(
        net=net, opt=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), x=torch.randn(8, 5), y=torch.randint(0, 3, (8,))
    )


def run(s=None, rho=0.05):
    s = s or build()
    params = list(s.net.parameters())
    for _ in range(4):
        s.opt.zero_grad()
        nn.functional.cross_entropy(s.net(s.x), s.y).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            push = [rho * p.grad / (norm + 1e-12) for p in params]
            for p, e in zip(params, push, strict=True):
                p.add_(e)
        s.opt.zero_grad()
        loss = nn.functional.cross_entropy(s.net(s.x), s.y)
        loss.backward()
        with torch.no_grad():
            for p, e in zip(params, push, strict=True):
                p.sub_(e)
        s.opt.step()
    return loss
