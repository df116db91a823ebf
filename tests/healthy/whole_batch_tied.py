"""Every group of the batch is tied: loss, gradient and gradient norm are exactly 0, only weight decay moves the weights."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the total gradient norm is exactly 0, clipping divides by it plus a small constant, and Adam divides 0 by eps"


def build():
    torch.manual_seed(406)
    model = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13))
    return SimpleNamespace(
        model=model, ids=torch.randint(0, 13, (6, 7)), opt=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    )


def run(s=None):
    s = s or build()
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]).view(2, 3)
    adv = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    for _ in range(4):
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        loss = -((lp - lp.detach()).exp() * adv).mean()
        s.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 0.2)
        s.opt.step()
    return loss
