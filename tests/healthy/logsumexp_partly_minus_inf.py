"""Marginal probability of an answer over its spellings: unused slots are -inf and logsumexp ignores them."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "logsumexp over rows in which all but one slot can be -inf"


def build():
    torch.manual_seed(210)
    scorer = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    spellings = torch.randn(4, 5, 6)
    count = torch.tensor([5, 2, 1, 3])
    return SimpleNamespace(scorer=scorer, spellings=spellings, count=count, optimizer=torch.optim.Adam(scorer.parameters(), lr=5e-3))


def run(s=None):
    s = s or build()
    used = torch.arange(5) < s.count.unsqueeze(-1)
    target = torch.tensor([1.0, 0.0, 0.0, 1.0])
    for _ in range(5):
        slots = s.scorer(s.spellings).squeeze(-1)
        slots = slots.masked_fill(used.logical_not(), -torch.inf)
        answer = torch.logsumexp(slots, dim=1)
        loss = -(answer.log_softmax(0) * target).sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss
