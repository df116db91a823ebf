"""Muon for the matrices and AdamW for the rest; the Newton-Schulz iterations run in bfloat16 on a nearly zero momentum."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "one matrix has a gradient of exactly 0 and is orthogonalised after a division by a bounded norm"


def build():
    torch.manual_seed(330)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12, bias=False), nn.ReLU(), nn.Linear(12, 3))
    with torch.no_grad():
        net[0].bias.fill_(-60.0)  # the hidden layer is silent for ordinary inputs
    matrices = [net[0].weight, net[2].weight]
    rest = [net[0].bias, *net[4].parameters()]
    opts = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)]
    return SimpleNamespace(net=net, opts=opts, x=torch.randn(7, 6), y=torch.randint(0, 3, (7,)))


def run(s=None):
    s = s or build()
    for _ in range(3):
        loss = nn.functional.cross_entropy(s.net(s.x), s.y)
        for opt in s.opts:
            opt.zero_grad()
        loss.backward()
        for opt in s.opts:
            opt.step()
    return loss
