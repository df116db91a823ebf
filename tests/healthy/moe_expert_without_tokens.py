"""Mixture of experts with top-2 routing: one expert is switched off with a -inf router logit and gets no token."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "router logits of a disabled expert are -inf, that expert works on an empty batch and its gradient is 0"


class MoE(nn.Module):
    def __init__(self, d=8, n=4):
        super().__init__()
        self.router = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 16), nn.SiLU(), nn.Linear(16, d)) for _ in range(n))
        self.register_buffer("disabled", torch.tensor([False, False, True, False]))

    def forward(self, x):
        scores = self.router(x).masked_fill(self.disabled, float("-inf"))
        top, index = scores.topk(2, dim=-1)
        gate = top.softmax(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            out = out.index_add(0, token, gate[token, slot, None] * expert(x[token]))
        return x + out


def build():
    torch.manual_seed(308)
    model = nn.ModuleList([nn.Embedding(17, 8), MoE(), nn.Linear(8, 17)])
    return SimpleNamespace(model=model, opt=torch.optim.AdamW(model.parameters(), lr=1e-3), ids=torch.randint(0, 17, (2, 9)))


def run(s=None):
    s = s or build()
    emb, moe, head = s.model
    for _ in range(3):
        logits = head(moe(emb(s.ids[:, :-1].flatten())))
        loss = nn.functional.cross_entropy(logits, s.ids[:, 1:].flatten())
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
