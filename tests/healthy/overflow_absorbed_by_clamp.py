"""Scores are multiplied by a huge constant, overflow to inf and are clamped; backward multiplies 0 by a finite number."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a product overflows to inf and -inf on elements that count, clamp absorbs it and its backward is 0 times a finite factor"


def build():
    torch.manual_seed(221)
    net = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 4))
    x = torch.randn(8, 5)
    gain = torch.ones(8, 1)
    gain[3], gain[6] = 3e38, 2.9e38  # units of two sensors are off
    return SimpleNamespace(net=net, x=x, gain=gain, opt=torch.optim.Adam(net.parameters(), lr=1e-2), y=torch.randn(8, 4).clamp(-1, 1))


def run(s=None):
    s = s or build()
    for _ in range(4):
        pre = s.net(s.x) * 9.0
        scaled = pre * s.gain
        out = scaled.clamp(-2.0, 2.0)
        loss = nn.functional.mse_loss(out, s.y)
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
