"""Gradient accumulation where one micro-batch has no trainable token: its sum is 0 over clamp(min=1) and it adds nothing."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a micro-batch whose mask is empty, with a loss of exactly 0 and a gradient of exactly 0"


def build():
    torch.manual_seed(220)
    model = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13))
    ids = torch.randint(0, 13, (6, 7))
    mask = torch.ones(6, 6)
    mask[2:4] = 0
    mask[5, 1:] = 0
    return SimpleNamespace(model=model, ids=ids, mask=mask, opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None, micro=2):
    s = s or build()
    adv = torch.randn(6, 1, generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        s.opt.zero_grad()
        total = 0.0
        for ids, mask, a in zip(s.ids.split(micro), s.mask.split(micro), adv.split(micro), strict=True):
            lp = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            micro_loss = -(lp * a * mask).sum() / mask.sum().clamp(min=1.0) / 3
            micro_loss.backward()
            total = total + micro_loss.detach()
        s.opt.step()
    return total
