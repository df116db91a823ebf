"""Counting, one-hot tables, boolean gates and int8 codes around a small policy; only two tensors are floating point."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "integer arithmetic that wraps around, integer division and boolean masks used as numbers"


def build():
    torch.manual_seed(329)
    net = nn.Sequential(nn.EmbeddingBag(32, 8, mode="sum"), nn.Linear(8, 4))
    tokens = torch.randint(0, 32, (21,))
    offsets = torch.tensor([0, 4, 4, 9, 15])  # the second bag is empty
    return SimpleNamespace(net=net, tokens=tokens, offsets=offsets, opt=torch.optim.Adagrad(net.parameters(), lr=1e-2))


def run(s=None):
    s = s or build()
    codes = torch.tensor([120, -100, 90, 7, -3], dtype=torch.int8)
    bucket = ((codes + codes).to(torch.int64) // 37) % 4  # int8 sum wraps around on purpose, it is a hash
    gate = (codes > 0) ^ (bucket == 2)
    for _ in range(4):
        logp = s.net[1](s.net[0](s.tokens, s.offsets)).log_softmax(-1)
        table = nn.functional.one_hot(bucket, 4)
        loss = -((logp * table).sum(-1) * gate).sum() / gate.sum().clamp(min=1)
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
