"""Half precision squares overflow to inf and are capped by torch.minimum with a constant; the slope of a square is finite."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "fp16 squares of 300 and more are inf until the cap, and backward sends an exact 0 through them"


def build():
    torch.manual_seed(222)
    net = nn.Linear(6, 3)
    x = torch.randn(7, 6)
    x[2] *= 900.0
    x[5] *= 700.0
    return SimpleNamespace(net=net, x=x, opt=torch.optim.SGD(net.parameters(), lr=1e-4), cap=torch.tensor(1000.0, dtype=torch.float16))


def run(s=None):
    s = s or build()
    for _ in range(4):
        err = s.net(s.x).half() - 1.0
        sq = torch.minimum(err * err, s.cap)
        loss = sq.float().mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
