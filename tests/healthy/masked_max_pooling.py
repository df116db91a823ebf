"""Max pooling over time with padding set to -inf; every row has at least one real token."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "padding is -inf before a max, and the max of each row is a real value"


class PooledReward(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(12, 10, padding_idx=0)
        self.conv = nn.Conv1d(10, 14, 3, padding=1)
        self.head = nn.Linear(14, 1)

    def forward(self, ids):
        h = self.conv(self.emb(ids).transpose(1, 2)).transpose(1, 2)
        h = h.masked_fill((ids == 0).unsqueeze(-1), float("-inf"))
        return self.head(h.max(dim=1).values).squeeze(-1)


def build():
    torch.manual_seed(211)
    rm = PooledReward()
    better, worse = torch.randint(1, 12, (4, 7)), torch.randint(1, 12, (4, 7))
    better[1, 3:] = 0
    worse[2, 1:] = 0
    return SimpleNamespace(rm=rm, opt=torch.optim.AdamW(rm.parameters(), lr=2e-3), better=better, worse=worse)


def run(s=None):
    s = s or build()
    for _ in range(4):
        loss = -nn.functional.logsigmoid(s.rm(s.better) - s.rm(s.worse)).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
