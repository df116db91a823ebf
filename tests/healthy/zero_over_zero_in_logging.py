"""Truncation and clip fractions are sums over counts that can be 0: 0/0 is written to the log and to nothing else."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "clip fractions are 0/0 because no token has a negative advantage in this batch"


def build():
    torch.manual_seed(218)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
    return SimpleNamespace(model=model, ids=torch.randint(0, 10, (2, 7)), opt=torch.optim.AdamW(model.parameters(), lr=1e-2), stats=[])


def run(s=None):
    s = s or build()
    adv = torch.tensor([[0.3], [1.1]])
    old = None
    for _ in range(4):
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        old = lp.detach() if old is None else old
        ratio = torch.exp(lp - old)
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        negative = (adv < 0).expand_as(ratio)
        low = ((ratio < 0.8) & negative).sum() / negative.sum()
        mean_negative = ratio.detach()[negative].mean()
        s.stats.append((low, mean_negative))
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
