"""MSG / SAC-N style lower confidence bound - all critics of the ensemble start with the same zero head, so their std is exactly 0.

torch.std has a zero derivative where it is 0 (unlike var().sqrt()), so the actor gets the gradient of the mean alone. Form of
https://github.com/google-research/google-research/tree/master/jrl (MSG: mean minus beta std). Healthy: everything stays finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class EnsembleCritic(nn.Module):
    def __init__(self, obs_dim=6, act_dim=2, n=4, hidden=24):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs_dim + act_dim, hidden), nn.SiLU())
        self.shared = nn.Linear(hidden, 1)
        self.heads = nn.Parameter(torch.zeros(n, hidden))  # residual heads, zero at the start

    def forward(self, obs, act):
        h = self.trunk(torch.cat([obs, act], -1))
        return self.shared(h).T + self.heads @ h.T


def build():
    torch.manual_seed(11)
    actor = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 2), nn.Tanh())
    critic = EnsembleCritic()
    return SimpleNamespace(
        model=actor,
        critic=critic,
        obs=torch.randn(8, 6),
        target=torch.randn(8),
        act=torch.rand(8, 2),
        beta=4.0,
        optimizer=torch.optim.Adam(actor.parameters(), lr=3e-4),
        critic_optimizer=torch.optim.Adam(critic.parameters(), lr=3e-4),
    )


def run(s=None):
    s = s or build()
    q = s.critic(s.obs, s.model(s.obs))
    lcb = q.mean(0) - s.beta * q.std(0)
    actor_loss = -lcb.mean()
    s.optimizer.zero_grad()
    actor_loss.backward()
    s.optimizer.step()
    critic_loss = (s.critic(s.obs, s.act) - s.target).pow(2).mean()
    s.critic_optimizer.zero_grad()
    critic_loss.backward()
    s.critic_optimizer.step()
    with torch.no_grad():
        snr = q.mean(0).abs() / q.std(0)  # inf at the first step, a metric
        s.metrics = {"q_snr": snr.mean().item()}
    return actor_loss
