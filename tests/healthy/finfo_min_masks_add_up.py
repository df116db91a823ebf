"""Causal and padding bias are both finfo.min and are added: their sum overflows to -inf, the real keys stay at 0."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "finfo.min + finfo.min is -inf on some scores and left-padded queries see only filled keys, every row stays finite somewhere"


class Attn(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(d, d, bias=False) for _ in range(3))

    def forward(self, hidden, bias):
        score = torch.einsum("bid,bjd->bij", self.wq(hidden), self.wk(hidden)) * hidden.shape[-1] ** -0.5
        return hidden + torch.softmax(score + bias, dim=-1, dtype=torch.float32) @ self.wv(hidden)


def build():
    torch.manual_seed(203)
    model = nn.ModuleList([nn.Embedding(13, 12), Attn(), nn.Linear(12, 13)])
    attention_mask = torch.ones(3, 8)
    attention_mask[0, :3] = 0
    attention_mask[2, :1] = 0
    ids = torch.randint(1, 13, (3, 8))
    return SimpleNamespace(model=model, ids=ids, attention_mask=attention_mask, opt=torch.optim.Adam(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    emb, att, head = s.model
    low = torch.finfo(torch.float32).min
    causal = torch.full((8, 8), low).triu(1)
    padding = (1.0 - s.attention_mask)[:, None, :] * low
    bias = causal + padding
    for _ in range(3):
        logits = head(att(emb(s.ids), bias))[:, :-1]
        lp = logits.log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        w = s.attention_mask[:, :-1]
        loss = -(lp * w * torch.tensor([1.0, 0.2, -0.7])[:, None]).sum() / w.sum()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
