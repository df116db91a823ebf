"""Flat tokens are selected first and exponentiated after, so the wild padding log-ratio never meets exp."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "padding carries a log ratio of 9999 which would overflow, but it is dropped before exp"


def build():
    torch.manual_seed(213)
    model = nn.Sequential(nn.Embedding(19, 9), nn.Linear(9, 19))
    ids = torch.randint(0, 19, (4, 10))
    loss_mask = torch.arange(9)[None] < torch.tensor([9, 3, 6, 1])[:, None]
    old = torch.full((4, 9), -9999.0)
    with torch.no_grad():
        lp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    old[loss_mask] = lp[loss_mask] + 0.05
    return SimpleNamespace(model=model, ids=ids, loss_mask=loss_mask, old=old, opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    adv = torch.tensor([0.2, -1.0, 1.0, -0.2]).unsqueeze(1).expand(-1, 9)
    for _ in range(4):
        logp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        delta = torch.masked_select(logp - s.old, s.loss_mask)
        ratio = delta.exp()
        a = torch.masked_select(adv, s.loss_mask)
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
