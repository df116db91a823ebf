"""Normalised advantages of a tied group are 0/0 = NaN; nan_to_num turns them into 0 before they meet anything differentiable."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "NaN advantages exist for a moment; they are constants and become 0 before the loss sees them"


def build():
    torch.manual_seed(107)
    lm = nn.Sequential(nn.Embedding(16, 8), nn.ReLU(), nn.Linear(8, 16))
    ids = torch.randint(0, 16, (6, 6))
    score = torch.tensor([0.2, 0.8, 0.5, 0.5, 1.0, 0.0])
    return SimpleNamespace(lm=lm, ids=ids, score=score, optimizer=torch.optim.AdamW(lm.parameters(), lr=1e-3))


def normalise(score, group_size):
    g = score.reshape(-1, group_size)
    z = (g - g.mean(-1, keepdim=True)).div(g.std(-1, keepdim=True))
    return z.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).reshape(-1)


def run(s=None):
    s = s or build()
    for _ in range(3):
        adv = normalise(s.score, 2)
        picked = s.lm(s.ids[:, :-1]).log_softmax(-1).gather(2, s.ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        ratio = torch.exp(picked - picked.detach())
        loss = -(ratio * adv.unsqueeze(1)).mean(1).sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss
