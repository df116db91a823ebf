"""Entropy bonus of a half-precision Gaussian actor: eps 1e-8 vanishes and the squared small scale rounds to 0 before the log."""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "log_zero"),
    op=("log",),
    index=(3,),
    masked=False,
    role=("entropy",),
    fix=("upcast_fp32", "representable_eps", "stable_function"),
    variable=("log_variance",),
    line=("log_variance = torch.log(2 * math.pi * (std + eps) ** 2)",),
)


class GaussianActor(nn.Module):
    def __init__(self, obs_dim=9, joints=5):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(obs_dim, 16), nn.Tanh(), nn.Linear(16, joints))
        self.log_std = nn.Parameter(torch.tensor([-0.6, -1.4, -0.9, -9.0, -1.1]))

    def forward(self, obs):
        return self.layers(obs), self.log_std.exp()


def gaussian_entropy(std, eps=1e-8):
    log_variance = torch.log(2 * math.pi * (std + eps) ** 2)
    return 0.5 * (log_variance + 1)


def ppo_objective(actor, obs, action, old_log_prob, advantage, entropy_coef=0.01):
    mean, std = actor(obs)
    wide_std = std.float()
    log_prob = (-0.5 * ((action - mean.float()) / wide_std) ** 2 - wide_std.log()).sum(-1)
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(0.8, 1.2)
    actor_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    bonus = gaussian_entropy(std).mean()
    return actor_loss - entropy_coef * bonus


def build():
    torch.manual_seed(19)
    actor = GaussianActor().half()
    obs = torch.randn(6, 9).half()
    with torch.no_grad():
        mean, std = actor(obs)
        noise = torch.randn(6, 5)
        action = mean.float() + noise * std.float()
        old_log_prob = (-0.5 * ((action - mean.float()) / std.float()) ** 2 - std.float().log()).sum(-1)
    batch = dict(obs=obs, action=action, old_log_prob=old_log_prob, advantage=0.01 * torch.randn(6))
    return SimpleNamespace(model=actor, optimizer=torch.optim.SGD(actor.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    loss = ppo_objective(s.model, **s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
