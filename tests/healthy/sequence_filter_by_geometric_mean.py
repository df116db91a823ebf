"""Whole sequences whose mean log ratio is off are dropped; the kept ones use a detached, clamped sequence weight."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the summed log ratio of one sequence is 400, its weight is computed after the sequence was indexed out"


def build():
    torch.manual_seed(324)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    ids = torch.randint(0, 12, (4, 11))
    mask = torch.arange(10)[None] < torch.tensor([[10], [8], [10], [5]])
    rollout = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).detach()
    rollout[2] -= 40.0
    return SimpleNamespace(model=model, ids=ids, mask=mask, rollout=rollout, opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    adv = torch.tensor([0.7, -0.7, 1.4, -1.4])
    for _ in range(4):
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        diff = ((lp.detach() - s.rollout) * s.mask).sum(-1)
        kept = (diff / s.mask.sum(-1)).abs() < 0.5
        weight = diff[kept].exp().clamp(max=10)
        pg = (lp * s.mask).sum(-1)[kept] / s.mask.sum(-1)[kept]
        loss = -(weight * adv[kept] * pg).sum() / kept.sum().clamp(min=1)
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
