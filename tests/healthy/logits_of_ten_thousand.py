"""Huge but finite logits: exp of them would overflow, log_softmax subtracts the maximum and is exact."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "logits beyond 1e4 in size, log-probs as low as -2e4 and a loss in the thousands"


def build():
    torch.manual_seed(304)
    net = nn.Linear(8, 12)
    x = torch.randn(6, 8)
    x[2] *= 4e4
    x[4] *= 6e4
    return SimpleNamespace(net=net, x=x, y=torch.randint(0, 12, (6,)), opt=torch.optim.SGD(net.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    for _ in range(4):
        logp = torch.log_softmax(s.net(s.x), dim=1)
        loss = -logp[torch.arange(6), s.y].mean()
        s.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.net.parameters(), 1.0)
        s.opt.step()
    return loss
