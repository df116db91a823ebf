"""mjrl's natural policy gradient solves F x = g by conjugate gradients and steps with a normalised length.

None of the trajectories of this iteration reached the goal: every return is 0, the whitened advantages are 0, loss and gradient are an exact
0. The first step length of the solver is r.r / p.Fp = 0/0, the direction is NaN, and so are all weights after the update, although loss
and gradients were finite.

Source: https://github.com/aravindr93/mjrl/blob/master/mjrl/utils/cg_solve.py and mjrl/algos/npg_cg.py
Heals: testing r.r against the tolerance before the first iteration instead of after it (no step), or a guarded denominator. Does not: the
damping of the Fisher matrix (there is some), nor the 1e-20 in the step size.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected
from torch.distributions import Normal, kl_divergence

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(),
    masked=None,
    role=("optimizer", "grad"),
    fix=("clamp_denominator", "skip_bad_step", "avoid_singular_op"),
    variable=("v",),
    line=("v = rdotr / p.dot(z)",),
)


class LinearGaussianPolicy(nn.Module):
    def __init__(self, obs_dim=6, act_dim=2):
        super().__init__()
        self.fc = nn.Linear(obs_dim, act_dim)
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

    def forward(self, obs):
        return Normal(self.fc(obs), self.log_std.exp())


def cg_solve(f_Ax, b, cg_iters=10, residual_tol=1e-10):
    x = torch.zeros_like(b)
    r = b.clone()
    p = r.clone()
    rdotr = r.dot(r)
    for _ in range(cg_iters):
        z = f_Ax(p)
        v = rdotr / p.dot(z)
        x = x + v * p
        r = r - v * z
        newrdotr = r.dot(r)
        mu = newrdotr / rdotr
        p = r + mu * p
        rdotr = newrdotr
        if rdotr < residual_tol:
            break
    return x


class NPG(torch.optim.Optimizer):
    """Natural gradient step of a given KL size; `kl` recomputes the divergence to the policy that sampled."""

    def __init__(self, params, normalized_step_size=0.05, damping=1e-4):
        super().__init__(params, dict(normalized_step_size=normalized_step_size, damping=damping))

    def step(self, kl):
        group = self.param_groups[0]
        params = group["params"]

        def hvp(vector):
            with torch.enable_grad():
                grads = torch.autograd.grad(kl(), params, create_graph=True)
                flat = torch.cat([g.reshape(-1) for g in grads])
                hv = torch.autograd.grad(flat.dot(vector), params)
            return torch.cat([h.reshape(-1) for h in hv]) + group["damping"] * vector

        with torch.no_grad():
            vpg_grad = torch.cat([-p.grad.reshape(-1) for p in params])
            npg_grad = cg_solve(hvp, vpg_grad)
            alpha = torch.sqrt(torch.abs(group["normalized_step_size"] / (vpg_grad.dot(npg_grad) + 1e-20)))
            offset = 0
            for param in params:
                update = npg_grad[offset : offset + param.numel()].view_as(param)
                param.add_(alpha * update)
                offset += param.numel()


def build():
    torch.manual_seed(2105)
    policy = LinearGaussianPolicy()
    observations = torch.randn(40, 6)
    with torch.no_grad():
        actions = policy(observations).sample()
    rewards = torch.zeros(4, 10)  # sparse task: nobody reached the goal
    return SimpleNamespace(
        model=policy, policy=policy, observations=observations, actions=actions, rewards=rewards, optimizer=NPG(policy.parameters())
    )


def run(s=None):
    s = s or build()
    returns = s.rewards.flip(1).cumsum(1).flip(1).reshape(-1)
    advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
    with torch.no_grad():
        old_dist = s.policy(s.observations)
        old_log_probs = old_dist.log_prob(s.actions).sum(-1)
    log_probs = s.policy(s.observations).log_prob(s.actions).sum(-1)
    surrogate = (torch.exp(log_probs - old_log_probs) * advantages).mean()
    loss = -surrogate
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step(kl=lambda: kl_divergence(old_dist, s.policy(s.observations)).sum(-1).mean())
    return loss
