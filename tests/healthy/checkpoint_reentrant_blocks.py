"""Reentrant activation checkpointing of residual blocks with a causal -inf mask, recomputed during backward."""

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

HEALTHY = "each block is computed twice, the second time inside backward, and its masked scores contain -inf both times"


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        att = self.q(x) @ self.k(x).mT / math.sqrt(x.shape[-1])
        t = x.shape[1]
        att = att + torch.full((t, t), float("-inf")).triu(1)
        return x + att.softmax(-1) @ self.v(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        h = self.emb(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return self.head(h)


def build():
    torch.manual_seed(122)
    model = Model()
    return SimpleNamespace(model=model, opt=torch.optim.AdamW(model.parameters(), lr=1e-3), ids=torch.randint(0, 11, (2, 7)))


def run(s=None):
    s = s or build()
    adv = torch.tensor([1.0, -0.6])
    for _ in range(3):
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        loss = -((lp - lp.detach()).exp() * adv[:, None]).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
