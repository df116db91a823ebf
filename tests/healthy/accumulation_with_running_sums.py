"""Gradient accumulation over eight micro-batches, the token count of the whole batch as the divisor, step every fourth one."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "backward is called several times between optimizer steps, some micro-losses are exactly 0"


def build():
    torch.manual_seed(312)
    model = nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 20))
    ids = torch.randint(0, 20, (12, 2, 6))
    adv = torch.randn(12, 2, 1)
    adv[1] = adv[6] = 0.0
    return SimpleNamespace(model=model, ids=ids, adv=adv, opt=torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True))


def run(s=None, every=4):
    s = s or build()
    n_tokens = every * 2 * 5
    running = torch.zeros(())
    for i, (ids, adv) in enumerate(zip(s.ids, s.adv, strict=True), start=1):
        nll = nn.functional.cross_entropy(s.model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (nll * adv).sum() / n_tokens
        loss.backward()
        running += loss.detach()
        if i % every == 0:
            nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
            s.opt.step()
            s.opt.zero_grad()
            total, running = running, torch.zeros(())
    return total
