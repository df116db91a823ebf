"""Behaviour cloning from teleoperation with a tanh-squashed Gaussian: the demonstrations contain actions at the bound.

The log-likelihood of a given action needs the value before the tanh. For the gripper command of exactly 1 that is atanh(1): log1p(-1) = -inf. The likelihood of the pair is -inf and its
Jacobian +inf, and one gradient update makes every parameter NaN.
Source: https://github.com/rail-berkeley/hil-serl/issues/6 ("numerical stability for actions close to +-1 when using the tanh_squash_distribution. I've implemented an action clipping function")
Heals: clipping the actions of the data set to +-(1 - 1e-6) before the inverse.
Does not: eps in log(1 - a^2 + eps) alone, a clamp of log_std, clipping the gradients, float64.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log1p",),
    index=(5, 2),
    masked=None,
    role=("hidden", "log_probs"),
    fix=("clamp_input", "fix_upstream", "representable_eps"),
    variable=(None,),
    line=("return 0.5 * (actions.log1p() - (-actions).log1p())",),
)


def inverse_tanh(actions):
    return 0.5 * (actions.log1p() - (-actions).log1p())


class Actor(nn.Module):
    def __init__(self, obs_dim=7, action_dim=3, std_min=1e-5, std_max=5.0):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.means = nn.Linear(32, action_dim)
        self.log_stds = nn.Linear(32, action_dim)
        self.std_min, self.std_max = std_min, std_max

    def forward(self, observations):
        h = self.network(observations)
        return self.means(h), self.log_stds(h).exp().clamp(self.std_min, self.std_max)

    def log_prob(self, observations, actions, eps=1e-6):
        means, stds = self(observations)
        raw_actions = inverse_tanh(actions)
        log_prob = -0.5 * ((raw_actions - means) / stds) ** 2 - stds.log() - 0.5 * math.log(2 * math.pi)
        log_prob = log_prob - torch.log(1 - actions.pow(2) + eps)
        return log_prob.sum(-1)


def build():
    torch.manual_seed(0)
    model = Actor()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    actions = torch.rand(8, 3) * 1.2 - 0.6
    actions[:, 2] = torch.tensor([0.0, 0.1, -0.2, 0.0, 0.9, 1.0, 0.95, 0.3])  # gripper
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"observations": torch.randn(8, 7), "actions": actions})


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        log_probs = s.model.log_prob(s.batch["observations"], s.batch["actions"])
        actor_loss = -log_probs.mean()
        s.optimizer.zero_grad()
        actor_loss.backward()
        s.optimizer.step()
        losses.append(actor_loss.item())
    return losses


if __name__ == "__main__":
    print(run())
