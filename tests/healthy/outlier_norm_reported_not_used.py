"""The float16 copy of a gradient norm overflows in the dashboard; clipping uses the float32 value."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the reported norm is inf because the dashboard stores half precision, the real norm is about 1e5"


def build():
    torch.manual_seed(334)
    net = nn.Linear(6, 2)
    return SimpleNamespace(
        net=net, x=200 * torch.randn(12, 6), y=300 * torch.randn(12, 2), opt=torch.optim.SGD(net.parameters(), lr=1e-2), board=[]
    )


def run(s=None):
    s = s or build()
    for _ in range(4):
        loss = (s.net(s.x) - s.y).pow(2).sum(1).mean()
        s.opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(s.net.parameters(), 1.0)
        s.board.append(norm.half())
        s.opt.step()
    return loss
