"""The objective is maximised: AdamW with maximize=True, fused and foreach variants, a growing negative 'loss'."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the value that backward starts from rises from step to step, since it is a return and not a loss"


def build():
    torch.manual_seed(331)
    policy, temper = nn.Linear(5, 6), nn.Parameter(torch.tensor(0.3))
    opts = [
        torch.optim.AdamW(policy.parameters(), lr=3e-2, maximize=True, fused=True),
        torch.optim.SGD([temper], lr=1e-2, maximize=True, foreach=True),
    ]
    return SimpleNamespace(policy=policy, temper=temper, opts=opts, obs=torch.randn(8, 5), reward=torch.arange(6.0) * 20)


def run(s=None):
    s = s or build()
    for _ in range(5):
        p = torch.softmax(s.policy(s.obs) / s.temper.exp(), -1)
        objective = (p * s.reward).sum(-1).mean()
        for opt in s.opts:
            opt.zero_grad(set_to_none=False)
        objective.backward()
        for opt in s.opts:
            opt.step()
    return objective
