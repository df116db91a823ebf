"""A preallocated work buffer starts as NaN so that a missed write would show; every row is written before it is read."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a buffer full of NaN goes into in-place copies, all of its rows are overwritten before the loss"


def build():
    torch.manual_seed(333)
    enc = nn.ModuleList([nn.Linear(3, 5), nn.Linear(4, 5), nn.Linear(2, 5)])
    v = nn.Linear(5, 1)
    xs = [torch.randn(4, 3), torch.randn(2, 4), torch.randn(3, 2)]
    opt = torch.optim.AdamW([*enc.parameters(), *v.parameters()], lr=5e-3)
    return SimpleNamespace(enc=enc, v=v, xs=xs, y=torch.randn(9), opt=opt)


def run(s=None):
    s = s or build()
    for _ in range(4):
        buffer = torch.full((9, 5), float("nan"))
        start = 0
        for layer, x in zip(s.enc, s.xs, strict=True):
            buffer[start : start + len(x)] = torch.tanh(layer(x))
            start += len(x)
        loss = (s.v(buffer).squeeze(-1) - s.y).abs().mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
