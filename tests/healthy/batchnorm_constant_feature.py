"""Batch normalisation of a feature that is constant in the batch: its variance is 0 and eps keeps the division alive."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a feature with variance exactly 0 is normalised, the inverse deviation is 1/sqrt(eps)"


def build():
    torch.manual_seed(232)
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1))
    x = torch.randn(10, 4)
    x[:, 2] = 7.0
    return SimpleNamespace(net=net, x=x, y=x[:, 0] * 2 - 1, opt=torch.optim.AdamW(net.parameters(), lr=1e-2))


def run(s=None):
    s = s or build()
    s.net.train()
    for _ in range(5):
        loss = (s.net(s.x).squeeze(-1) - s.y).pow(2).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    s.net.eval()
    with torch.no_grad():
        s.validation = (s.net(s.x).squeeze(-1) - s.y).pow(2).mean()
    return loss
