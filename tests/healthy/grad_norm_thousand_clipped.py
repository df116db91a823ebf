"""A summed (not averaged) policy-gradient loss has gradient norms above 1e3 on every step; clipping to 1 handles it."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the gradient norm is above 1000 each step and is clipped to 1"


def build():
    torch.manual_seed(114)
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 40))
    ids = torch.randint(0, 40, (8, 65))
    adv = 25.0 * torch.randn(8, 1)
    return SimpleNamespace(model=model, ids=ids, adv=adv, opt=torch.optim.SGD(model.parameters(), lr=0.05), norms=[])


def run(s=None):
    s = s or build()
    for _ in range(4):
        logits = s.model(s.ids[:, :-1])
        nll = nn.functional.cross_entropy(logits.flatten(0, 1), s.ids[:, 1:].flatten(), reduction="none").view(8, 64)
        loss = (nll * s.adv).sum()
        s.opt.zero_grad()
        loss.backward()
        total = torch.nn.utils.clip_grad_norm_(s.model.parameters(), max_norm=1.0)
        s.norms.append(total.item())
        s.opt.step()
    return loss
