"""REDQ takes the minimum over a random subset of its critics. This vectorised form fills the critics that were not drawn with +inf
before amin: the infinities lose every comparison, and in the policy's pass their gradient is exactly 0.

    https://github.com/watchernyu/REDQ/blob/main/redq/algos/redq_sac.py

Healthy: target, loss, gradients and weights are finite and right.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class Ensemble(nn.Module):
    def __init__(self, n, dim, hidden=16):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(n, dim, hidden) / dim**0.5)
        self.b1 = nn.Parameter(torch.zeros(n, 1, hidden))
        self.w2 = nn.Parameter(torch.randn(n, hidden, 1) / hidden**0.5)

    def forward(self, obs, act):
        x = torch.cat([obs, act], dim=-1).unsqueeze(0)
        return torch.bmm(F.relu(x @ self.w1 + self.b1), self.w2).squeeze(-1)


class Policy(nn.Module):
    def __init__(self, obs_dim, act_dim, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, 2 * act_dim))

    def forward(self, obs):
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        std = log_std.clamp(-20, 2).exp()
        pre = mean + std * torch.randn_like(std)
        log_prob = torch.distributions.Normal(mean, std).log_prob(pre)
        log_prob = log_prob - 2 * (0.6931472 - pre - F.softplus(-2 * pre))
        return torch.tanh(pre), log_prob.sum(-1)


def subset_min(q, chosen):
    filled = q.masked_fill(~chosen.unsqueeze(-1), float("inf"))
    return filled.amin(dim=0)


def build():
    torch.manual_seed(17)
    model = nn.ModuleDict({"policy": Policy(5, 2), "critics": Ensemble(10, 7)})
    batch = {
        "obs": torch.randn(6, 5),
        "act": torch.rand(6, 2) * 2 - 1,
        "rew": torch.randn(6),
        "next_obs": torch.randn(6, 5),
        "done": torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
    }
    return SimpleNamespace(model=model, batch=batch, optimizer=torch.optim.Adam(model.parameters(), lr=3e-4))


def run(s=None):
    s = s or build()
    torch.manual_seed(18)
    policy, critics, b = s.model["policy"], s.model["critics"], s.batch
    chosen = torch.zeros(10, dtype=torch.bool)
    chosen[torch.randperm(10)[:2]] = True
    with torch.no_grad():
        next_act, next_logp = policy(b["next_obs"])
        next_q = subset_min(critics(b["next_obs"], next_act), chosen)
        y = b["rew"] + 0.99 * (1 - b["done"]) * (next_q - 0.2 * next_logp)
    critic_loss = F.mse_loss(critics(b["obs"], b["act"]), y.expand(10, -1))
    act, logp = policy(b["obs"])
    policy_loss = (0.2 * logp - subset_min(critics(b["obs"], act), chosen)).mean()
    loss = critic_loss + policy_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
