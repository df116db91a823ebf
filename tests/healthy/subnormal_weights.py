"""Some weights and inputs are subnormal (1e-41): their products vanish to 0, nothing divides by them."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "weights below the smallest normal float and squared gradients that underflow to 0"


def build():
    torch.manual_seed(303)
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
    with torch.no_grad():
        net[0].weight[4] = 1e-41
        net[0].bias[4] = 3e-42
        net[2].weight[:, 7] *= 1e-39
    x = torch.randn(8, 6)
    x[5] = 1e-40
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return SimpleNamespace(net=net, x=x, y=torch.randint(0, 2, (8,)), opt=opt)


def run(s=None):
    s = s or build()
    for _ in range(5):
        loss = nn.functional.cross_entropy(s.net(s.x), s.y)
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
