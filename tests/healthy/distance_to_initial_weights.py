"""An L2 distance to the initial weights as a penalty: the distance is 0 at the first step and the norm's slope is defined as 0 there."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a vector norm of exactly 0 is differentiated at the first step, torch uses the subgradient 0"


def build():
    torch.manual_seed(318)
    policy = nn.Linear(6, 5)
    initial = [p.detach().clone() for p in policy.parameters()]
    return SimpleNamespace(
        policy=policy, initial=initial, x=torch.randn(7, 6), a=torch.randint(0, 5, (7,)), opt=torch.optim.SGD(policy.parameters(), lr=0.1)
    )


def run(s=None, coef=0.2):
    s = s or build()
    for _ in range(4):
        drift = sum(torch.linalg.vector_norm(p - p0) for p, p0 in zip(s.policy.parameters(), s.initial, strict=True))
        loss = nn.functional.cross_entropy(s.policy(s.x), s.a) + coef * drift
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
