"""TQC's quantile Huber loss takes torch.where(|delta| > 1, |delta| - 0.5, delta ** 2 / 2) of all pairs of quantiles, here in half.

A few targets lie 300 and more away from the prediction: delta ** 2 is inf in float16. The where takes the linear branch there, and the
derivative of the square is 2 * delta, a finite number that meets a gradient of 0. Loss, gradients and weights are finite, and right.

Source: https://github.com/SamsungLabs/tqc_pytorch/blob/master/tqc/functions.py (quantile_huber_loss_f)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class QuantileCritic(nn.Module):
    def __init__(self, obs_dim=6, action_dim=2, n_quantiles=5, n_nets=2):
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(obs_dim + action_dim, 24), nn.ReLU(), nn.Linear(24, n_quantiles)) for _ in range(n_nets)
        )

    def forward(self, obs, action):
        x = torch.cat([obs, action], -1)
        return torch.stack([net(x) for net in self.nets], dim=1)


def quantile_huber_loss_f(quantiles, samples):
    pairwise_delta = samples[:, None, None, :] - quantiles[:, :, :, None]  # batch x nets x quantiles x samples
    abs_pairwise_delta = torch.abs(pairwise_delta)
    huber_loss = torch.where(abs_pairwise_delta > 1, abs_pairwise_delta - 0.5, pairwise_delta**2 * 0.5)
    n_quantiles = quantiles.shape[2]
    tau = (torch.arange(n_quantiles).to(quantiles.dtype) + 0.5) / n_quantiles
    loss = torch.abs(tau[None, None, :, None] - (pairwise_delta < 0).to(quantiles.dtype)) * huber_loss
    return loss.mean(dim=(1, 2, 3)).mean()


def build():
    torch.manual_seed(2151)
    critic = QuantileCritic().half()
    obs, action = torch.randn(8, 6).half(), torch.rand(8, 2).half()
    target_z = torch.randn(8, 6).half()
    target_z[2] += 310.0  # the episode's bonus
    target_z[5] -= 420.0
    return SimpleNamespace(
        model=critic, critic=critic, obs=obs, action=action, target_z=target_z, optimizer=torch.optim.SGD(critic.parameters(), lr=1e-3)
    )


def run(s=None):
    s = s or build()
    cur_z = s.critic(s.obs, s.action)
    critic_loss = quantile_huber_loss_f(cur_z, s.target_z)
    s.optimizer.zero_grad()
    critic_loss.backward()
    s.optimizer.step()
    return critic_loss
