"""Behaviour cloning with a tanh-squashed Gaussian on demonstrations that hold actions of exactly 1 and -1. Healthy.

atanh(1) is inf, and 0.99999997 looks as if fp32 rounded it to 1. It does not: the nearest fp32 below 1 is 1 - 2^-24 = 0.99999994, the midpoint is
0.9999999702, and the bound lies under it. The inverse is at most 8.7, its log probability finite (a few hundreds), and no gradient goes through the data.
Source: https://github.com/HorizonRobotics/alf/pull/463 (StableTanh: 0.99999997 "is the maximum value such that atanh(x) is valid").
Heals: nothing to heal. Does not: -
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal


class StableTanh:
    @staticmethod
    def inverse(y):
        y = torch.where(y.abs() <= 1.0, torch.clamp(y, -0.99999997, 0.99999997), y)
        return 0.5 * torch.log((1 + y) / (1 - y))

    @staticmethod
    def log_abs_det_jacobian(x):
        return 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))


class Actor(nn.Module):
    def __init__(self, obs_dim=5, act_dim=2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim, 16), nn.ReLU(), nn.Linear(16, 2 * act_dim))

    def log_prob(self, obs, action):
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        log_std = -1.0 + torch.tanh(log_std)
        x = StableTanh.inverse(action)
        return (Normal(mean, log_std.exp()).log_prob(x) - StableTanh.log_abs_det_jacobian(x)).sum(-1)


def build():
    torch.manual_seed(463)
    actor = Actor()
    actions = torch.tensor([[0.3, -0.1], [1.0, -1.0], [-0.7, 1.0], [-1.0, 0.2], [0.9, 0.5], [1.0, 1.0]])
    batch = dict(obs=torch.randn(6, 5), actions=actions)
    return SimpleNamespace(model=actor, optimizer=torch.optim.Adam(actor.parameters(), lr=3e-4), batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(3):
        loss = -s.model.log_prob(s.batch["obs"], s.batch["actions"]).mean()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
        s.optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(run())
