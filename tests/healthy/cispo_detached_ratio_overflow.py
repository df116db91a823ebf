"""CISPO: the importance weight is a detached constant, it overflows on two tokens and the cap brings it back to 5."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "exp overflows to inf on tokens that count, but it carries no gradient and is capped right after"


def build():
    torch.manual_seed(103)
    model = nn.Sequential(nn.Embedding(18, 10), nn.Linear(10, 18))
    seq = torch.randint(0, 18, (3, 9))
    with torch.no_grad():
        sampler = model(seq[:, :-1]).log_softmax(-1).gather(-1, seq[:, 1:, None]).squeeze(-1)
    sampler[1, 5] = -140.0
    sampler[2, 2] = -96.0
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), seq=seq, sampler=sampler)


def cispo_loss(logp, sampler_logp, adv, cap):
    weight = torch.exp(logp.detach() - sampler_logp)
    weight = torch.clamp(weight, max=cap)
    return -(weight * adv.unsqueeze(-1) * logp).mean()


def run(s=None):
    s = s or build()
    adv = torch.tensor([0.7, -0.2, -0.5])
    for _ in range(4):
        logp = s.model(s.seq[:, :-1]).log_softmax(-1).gather(-1, s.seq[:, 1:, None]).squeeze(-1)
        loss = cispo_loss(logp, s.sampler, adv, cap=5.0)
        loss.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
    return loss
