"""PETS / MPPI planning, then cloning of the plan - some imagined rollouts blow up to inf and NaN.

Their scores become -inf, their softmax weight is exactly 0 and the zeroed actions of a diverged rollout take no part in the plan; the
policy is trained on the plan. Form of https://github.com/facebookresearch/mbrl-lib (planning/trajectory_opt.py, where NaN values are set to
-1e-10 before the elites are taken) and of TD-MPC2's planner. Healthy: target, loss, gradients and weights are finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


def build():
    torch.manual_seed(18)
    policy = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 2))
    dynamics = nn.Linear(6, 4)
    with torch.no_grad():
        dynamics.weight.mul_(0.3)
    return SimpleNamespace(
        model=policy,
        dynamics=dynamics,
        obs=torch.randn(3, 4),
        horizon=6,
        samples=16,
        temperature=0.5,
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-3),
    )


@torch.no_grad()
def plan(s, obs):
    actions = torch.randn(s.horizon, s.samples, 2)
    actions[:, 5] *= 1e25  # two proposals of the sampler are absurd
    actions[:, 9] *= -1e30
    state = obs.expand(s.samples, 4)
    returns = torch.zeros(s.samples)
    for t in range(s.horizon):
        state = state + s.dynamics(torch.cat([state, actions[t]], -1))
        returns = returns - state.square().sum(-1) + state[:, 0].square()  # inf - inf for a diverged state
    scores = torch.where(torch.isfinite(returns), returns, torch.full_like(returns, float("-inf")))
    weights = torch.softmax(scores / s.temperature, dim=0)
    first = torch.where(torch.isfinite(returns)[:, None], actions[0], torch.zeros_like(actions[0]))
    return (weights[:, None] * first).sum(0)


def run(s=None):
    s = s or build()
    target = torch.stack([plan(s, obs) for obs in s.obs])
    loss = (s.model(s.obs) - target).pow(2).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
