"""omnisafe #384 - PPO-Lagrangian: the cost that drives the multiplier is NaN, and with the multiplier every advantage.

No episode ended in this short epoch (the robot is safe and the time limit is longer than the rollout), so the mean over the costs of finished
episodes is a mean over nothing. In omnisafe an assertion stops here ("cost for updating lagrange multiplier is nan"); this loop has none: the
gradient of the multiplier is NaN, Adam writes it, and the penalised advantage destroys actor and critic.
The thread leaves open where the NaN cost comes from; an epoch without a finished episode is the usual way.
Source: https://github.com/PKU-Alignment/omnisafe/issues/384 (and the assertion in omnisafe/algorithms/on_policy/naive_lagrange/ppo_lag.py)

Heals: skip the multiplier's update when no episode ended (or divide by max(count, 1), or keep the last known cost).
Does not: clamp the multiplier at 0 after its step (it is done, a NaN stays NaN), or a larger cost limit.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("mean",),
    index=(),
    masked=None,
    role=("rewards", "loss"),
    fix=("guard_empty", "clamp_denominator"),
    variable=("Jc",),
    line=("Jc = s.buffer.episode_cost[s.buffer.episode_end].mean()",),
)


class ConstraintActorCritic(nn.Module):
    def __init__(self, obs_dim=6, act_dim=2):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh(), nn.Linear(32, act_dim))
        self.log_std = nn.Parameter(-0.5 * torch.ones(act_dim))
        self.reward_critic = nn.Linear(obs_dim, 1)

    def log_prob(self, obs, act):
        return Normal(self.actor(obs), self.log_std.exp()).log_prob(act).sum(-1)


class Lagrange:
    def __init__(self, cost_limit, init=0.1, lr=0.035):
        self.cost_limit = cost_limit
        self.lagrangian_multiplier = nn.Parameter(torch.tensor(init))
        self.lambda_optimizer = torch.optim.Adam([self.lagrangian_multiplier], lr=lr)

    def update_lagrange_multiplier(self, Jc):
        self.lambda_optimizer.zero_grad()
        lambda_loss = -self.lagrangian_multiplier * (Jc - self.cost_limit)
        lambda_loss.backward()
        self.lambda_optimizer.step()
        self.lagrangian_multiplier.data.clamp_(min=0.0)
        return lambda_loss


def collect(model, steps=24, envs=2):
    obs = torch.randn(steps * envs, 6)
    with torch.no_grad():
        act = model.actor(obs) + 0.6 * torch.randn(steps * envs, 2)
        logp = model.log_prob(obs, act)
    cost = torch.zeros(steps, envs)  # nothing was hit
    return SimpleNamespace(
        obs=obs,
        act=act,
        logp=logp,
        adv_r=torch.randn(steps * envs),
        adv_c=0.1 * torch.randn(steps * envs),
        target_value_r=torch.randn(steps * envs),
        episode_cost=cost.cumsum(0).flatten(),
        episode_end=torch.zeros(steps * envs, dtype=torch.bool),  # time limit 1000, rollout 24
    )


def build():
    torch.manual_seed(384)
    model = ConstraintActorCritic()
    return SimpleNamespace(
        model=model, buffer=collect(model), lagrange=Lagrange(cost_limit=0.0), optimizer=torch.optim.Adam(model.parameters(), lr=3e-4)
    )


def run(s=None):
    s = s or build()
    Jc = s.buffer.episode_cost[s.buffer.episode_end].mean()
    s.lagrange.update_lagrange_multiplier(Jc)
    penalty = s.lagrange.lagrangian_multiplier.item()
    adv = (s.buffer.adv_r - penalty * s.buffer.adv_c) / (1.0 + penalty)
    ratio = torch.exp(s.model.log_prob(s.buffer.obs, s.buffer.act) - s.buffer.logp)
    loss_pi = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    loss_v = (s.model.reward_critic(s.buffer.obs).squeeze(-1) - s.buffer.target_value_r).pow(2).mean()
    loss = loss_pi + 0.5 * loss_v
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 40.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
