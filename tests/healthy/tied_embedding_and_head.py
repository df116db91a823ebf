"""Input embedding and output head are one tensor, its gradient is the sum of a dense and a lookup contribution."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "one parameter is reached twice in a backward pass and stands under two names"


class TiedLM(nn.Module):
    def __init__(self, vocab=22, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim, padding_idx=0)
        self.block = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        h = self.wte(ids) * 4.0
        return self.lm_head(h + self.block(h))


def build():
    torch.manual_seed(126)
    model = TiedLM()
    ids = torch.randint(1, 22, (3, 9))
    ids[1, 6:] = 0
    return SimpleNamespace(model=model, ids=ids, opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    targets = s.ids[:, 1:].masked_fill(s.ids[:, 1:] == 0, -100)
    for _ in range(4):
        logits = s.model(s.ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        s.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.opt.step()
    return loss
