"""A tanh-squashed action saturates to exactly 1, log(1 - a^2) is -inf, and torch.where swaps in a floor that hides it
from the loss only."""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("where_grad_trap", "log_zero"),
    op=("log",),
    index=(3, 1),
    masked=True,
    role=("log_probs",),
    fix=("clamp_input", "stable_function"),
    variable=("correction",),
    line=("correction = torch.log(slack)",),
)


class SquashedGaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu = nn.Linear(4, 2)
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def rsample(self, obs, noise):
        base = Normal(self.mu(obs), self.log_std.exp())
        u = base.loc + base.scale * noise
        action = torch.tanh(u)
        slack = 1 - action**2
        correction = torch.log(slack)
        correction = torch.where(slack > 1e-6, correction, torch.full_like(correction, -13.8))
        return action, (base.log_prob(u) - correction).sum(-1)


def build():
    torch.manual_seed(2718)
    model = SquashedGaussian()
    obs = 0.5 * torch.randn(5, 4)
    with torch.no_grad():
        model.mu.weight[1] = torch.tensor([3.0, 0.0, 0.0, 0.0])
        obs[3, 0] = 5.0
    batch = dict(obs=obs, noise=0.3 * torch.randn(5, 2), goal=torch.zeros(5, 2))
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-4), batch=batch)


def run(s=None):
    s = s or build()
    action, lp = s.model.rsample(s.batch["obs"], s.batch["noise"])
    loss = ((action - s.batch["goal"]) ** 2).sum(-1).mean() + 0.05 * lp.mean()
    loss.backward()
    s.optimizer.step()
    return loss
