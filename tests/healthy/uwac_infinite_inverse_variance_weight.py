"""Healthy. apple/ml-uwac, rlkit/torch/sac/uwac_dropout.py: Bellman errors are weighted by beta / Var[Q'] of dropout samples, clamped to [0, 1.5]. A
terminal-like state whose features are all 0 has Var = 0 and an infinite weight; the clamp under no_grad makes 1.5 of it, and no gradient goes
through the division. Loss, gradients and weights are right.

https://github.com/apple/ml-uwac
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class DropoutCritic(nn.Module):
    def __init__(self, obs_dim=5, act_dim=2, hidden=16):
        super().__init__()
        self.encoder = nn.Linear(obs_dim + act_dim, hidden, bias=False)
        self.head = nn.Linear(hidden, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, obs, actions):
        h = torch.relu(self.encoder(torch.cat([obs, actions], dim=-1)))
        return self.head(self.dropout(h)).squeeze(-1)


def build():
    torch.manual_seed(8140)
    critic, target_critic = DropoutCritic(), DropoutCritic()
    next_obs, next_actions = torch.randn(6, 5), torch.randn(6, 2)
    next_obs[2], next_actions[2] = 0.0, 0.0  # absorbing state, stored as zeros
    batch = dict(
        obs=torch.randn(6, 5),
        actions=torch.randn(6, 2),
        next_obs=next_obs,
        next_actions=next_actions,
        rewards=torch.randn(6),
        dones=torch.zeros(6),
    )
    return SimpleNamespace(
        model=critic,
        target_critic=target_critic,
        batch=batch,
        beta=0.05,
        gamma=0.99,
        optimizer=torch.optim.Adam(critic.parameters(), lr=3e-4),
    )


def run(s=None):
    s = s or build()
    batch = s.batch
    with torch.no_grad():
        samples = torch.stack([s.target_critic(batch["next_obs"], batch["next_actions"]) for _ in range(8)])
        q_var = (samples - samples[:1]).var(dim=0)
        weight = torch.clamp(s.beta / q_var, 0.0, 1.5)
        target = batch["rewards"] + s.gamma * (1 - batch["dones"]) * samples.mean(0)
    loss = (weight * (s.model(batch["obs"], batch["actions"]) - target).pow(2)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
