"""Observations mark a missing sensor with NaN; the policy replaces those entries by a learned token before the first layer."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the batch itself contains NaN, as a code for missing, and torch.where replaces it before any arithmetic"


class Imputing(nn.Module):
    def __init__(self, n=6, a=3):
        super().__init__()
        self.missing = nn.Parameter(torch.zeros(n))
        self.net = nn.Sequential(nn.Linear(n, 12), nn.Tanh(), nn.Linear(12, a))

    def forward(self, obs):
        return self.net(torch.where(torch.isnan(obs), self.missing.expand_as(obs), obs))


def build():
    torch.manual_seed(401)
    policy = Imputing()
    obs = torch.randn(8, 6)
    obs[1, 4] = obs[3, 0] = obs[3, 5] = float("nan")
    return SimpleNamespace(policy=policy, obs=obs, act=torch.randint(0, 3, (8,)), opt=torch.optim.AdamW(policy.parameters(), lr=3e-3))


def run(s=None):
    s = s or build()
    adv = torch.linspace(-1.2, 1.2, 8)
    for _ in range(4):
        nll = nn.functional.cross_entropy(s.policy(s.obs), s.act, reduction="none")
        loss = (nll * adv).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
