"""Advantage-weighted cloning of clipped expert actions: an action sits exactly on the bound, so its inverse tanh is infinite."""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log1p",),
    index=(4, 2),
    masked=False,
    role=("log_probs",),
    fix=("clamp_input", "drop_invalid_sample"),
    variable=("upper",),
    line=("upper = torch.log1p(-action)",),
)


class SquashedGaussian:
    def __init__(self, mean, log_scale):
        self.mean, self.log_scale = mean, log_scale

    def unsquash(self, action):
        lower = torch.log1p(action)
        upper = torch.log1p(-action)
        return 0.5 * (lower - upper)

    def log_prob(self, action):
        raw = self.unsquash(action)
        z = (raw - self.mean) * torch.exp(-self.log_scale)
        gaussian = -0.5 * z.square() - self.log_scale - 0.5 * math.log(2 * math.pi)
        log_det = torch.log(1 - action.square())
        return (gaussian - log_det).sum(-1)


class Actor(nn.Module):
    def __init__(self, obs_dim=6, act_dim=3):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs_dim, 24), nn.ReLU())
        self.mean = nn.Linear(24, act_dim)
        self.log_scale = nn.Parameter(torch.full((act_dim,), -0.5))

    def forward(self, obs):
        features = self.trunk(obs)
        return SquashedGaussian(self.mean(features), self.log_scale.expand(obs.shape[0], -1))


def build():
    torch.manual_seed(2129)
    actor = Actor()
    expert = torch.tanh(torch.randn(7, 3) * 0.6)
    expert[4, 2] = 1.35  # the expert pushed past the end stop
    batch = {"obs": torch.randn(7, 6), "action": expert.clamp(-1.0, 1.0), "advantage": torch.randn(7)}
    return SimpleNamespace(model=actor, optimizer=torch.optim.Adam(actor.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    weights = torch.softmax(s.batch["advantage"] / 0.3, dim=0)
    log_prob = s.model(s.batch["obs"]).log_prob(s.batch["action"])
    loss = -(weights * log_prob).sum()
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss
