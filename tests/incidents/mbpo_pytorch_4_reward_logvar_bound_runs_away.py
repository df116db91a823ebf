"""jiangsy/mbpo_pytorch #4 - the bounds of the log-variance are parameters of the loss; the one of the reward is added with the wrong sign.

Minimising "... + sum(min_reward_logvar)" pushes the lower bound down for ever; in a task with a constant survival reward nothing else holds
the predicted log-variance of the reward, and exp(-logvar) overflows once it passes -88. The squared error is small and not 0: inf.
Heals: a floor for logvar before exp, or bounds that are put back (the sign mended and the parameter restored).
Does not: clamping inv_vars after exp (the backward of exp is then 0 * inf), nan_to_num of the weighted error.
Source: https://github.com/jiangsy/mbpo_pytorch/issues/4, mbpo_pytorch/algos/mbrl/mbpo.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(1, 0, 3),
    masked=False,
    role=("hidden", "loss", "logits", "is_weight"),
    fix=("clamp_exponent", "clamp_input", "fix_upstream"),
    variable=("inv_vars",),
    line=("inv_vars = torch.exp(-logvars)",),
)


class EnsembleDynamics(nn.Module):
    def __init__(self, state_dim=3, action_dim=2, hidden=16, num_networks=2):
        super().__init__()
        out = state_dim + 1
        self.trunks = nn.ModuleList(nn.Linear(state_dim + action_dim, hidden) for _ in range(num_networks))
        self.mean_heads = nn.ModuleList(nn.Linear(hidden, out) for _ in range(num_networks))
        self.logvar_heads = nn.ModuleList(nn.Linear(hidden, out) for _ in range(num_networks))
        self.max_state_logvar = nn.Parameter(torch.full((state_dim,), 0.5))
        self.min_state_logvar = nn.Parameter(torch.full((state_dim,), -10.0))
        self.max_reward_logvar = nn.Parameter(torch.full((1,), 0.5))
        self.min_reward_logvar = nn.Parameter(torch.full((1,), -10.0))

    def forward(self, states, actions):
        x = torch.cat([states, actions], dim=-1)
        means, logvars = [], []
        upper = torch.cat([self.max_state_logvar, self.max_reward_logvar])
        lower = torch.cat([self.min_state_logvar, self.min_reward_logvar])
        for trunk, mean_head, logvar_head in zip(self.trunks, self.mean_heads, self.logvar_heads):
            h = F.silu(trunk(x))
            means.append(mean_head(h))
            logvar = upper - F.softplus(upper - logvar_head(h))
            logvars.append(lower + F.softplus(logvar - lower))
        return torch.stack(means), torch.stack(logvars)


def build():
    torch.manual_seed(4)
    dynamics = EnsembleDynamics()
    with torch.no_grad():  # where the loss below has driven it after some ten thousand epochs
        dynamics.min_reward_logvar.fill_(-97.0)
        dynamics.logvar_heads[1].bias[3] = -130.0
        dynamics.logvar_heads[0].bias[3] = -12.0
    states = torch.randn(6, 3)
    samples = dict(
        states=states,
        actions=torch.randn(6, 2),
        next_states=states + 0.1 * torch.randn(6, 3),
        rewards=torch.ones(6, 1),
        masks=torch.ones(6, 1),
    )
    return SimpleNamespace(model=dynamics, samples=samples, optimizer=torch.optim.Adam(dynamics.parameters(), lr=1e-3))


def compute_loss(dynamics, samples):
    means, logvars = dynamics(samples["states"], samples["actions"])
    targets = torch.cat([samples["next_states"] - samples["states"], samples["rewards"]], dim=-1)
    targets, masks = targets.repeat(means.shape[0], 1, 1), samples["masks"].repeat(means.shape[0], 1, 1)
    inv_vars = torch.exp(-logvars)
    mse_losses = torch.mean((means - targets) ** 2 * inv_vars * masks, dim=[-2, -1])
    var_losses = torch.mean(logvars * masks, dim=[-2, -1])
    return mse_losses + var_losses


def run(s=None):
    s = s or build()
    d = s.model
    loss = compute_loss(d, s.samples).sum()
    loss = loss + 0.01 * (d.max_state_logvar.sum() + d.max_reward_logvar.sum() - d.min_state_logvar.sum() + d.min_reward_logvar.sum())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
