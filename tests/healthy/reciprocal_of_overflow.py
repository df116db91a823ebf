"""An inverse-magnitude weight of a detached feature: the magnitude overflows to inf, its reciprocal is an honest 0."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a detached squared norm is inf for one sample, so the weight of that sample is 1/inf = 0"


def build():
    torch.manual_seed(224)
    head = nn.Linear(4, 1)
    feats = torch.randn(6, 4)
    scale = torch.ones(6, 1)
    scale[4] = 1e21
    return SimpleNamespace(head=head, feats=feats, raw=feats * scale, y=torch.randn(6), opt=torch.optim.Adam(head.parameters(), lr=1e-2))


def run(s=None):
    s = s or build()
    for _ in range(4):
        weight = 1.0 / (1.0 + s.raw.pow(2).sum(-1))
        pred = s.head(s.feats).squeeze(-1)
        loss = (weight * (pred - s.y) ** 2).sum() / weight.sum()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
