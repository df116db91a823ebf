"""Projection-based constrained policy optimisation: the closed-form step holds sqrt(2 * target_kl / q) * r with q = g^T H^-1 g. In an
early epoch no episode of the batch earned any reward: all reward advantages are equal, the normalised ones are 0, the reward gradient is
exactly 0 and so are q and r. 2 * target_kl / q is infinite, infinite times r = 0 is NaN, and the step is written to the actor. Losses
and gradients were finite.

Source: update_policy_net of https://github.com/PKU-Alignment/omnisafe/blob/main/omnisafe/algorithms/on_policy/second_order/pcpo.py (one
of the two divisions by q has an epsilon, the other has none); applied without a line search, as in the paper's algorithm.
Heals: the same epsilon in both divisions. clamp_min around the projection does not: it passes NaN on.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Independent, Normal, kl_divergence

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_denominator", "inf_times_zero_coef", "zero_div_zero"),
    op=("reciprocal", "div", "rdiv"),
    index=(),
    masked=None,
    role=("optimizer", "grad"),
    fix=("clamp_denominator", "representable_eps", "avoid_singular_op", "skip_bad_step", "skip_disabled_term"),
    variable=(None,),
    line=("violation = (torch.sqrt(2 * target_kl / q) * r + cost) / (s + 1e-8)",),
)


class GaussianActor(nn.Module):
    def __init__(self, obs_dim=6, act_dim=2, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, act_dim))
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

    def forward(self, obs):
        return Independent(Normal(self.net(obs), self.log_std.exp()), 1)


def flat_grad(outputs, params, **kwargs):
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(outputs, params, **kwargs)])


def set_param_values(params, flat):
    offset = 0
    with torch.no_grad():
        for p in params:
            p.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


def conjugate_gradients(fvp, b, num_steps=10, residual_tol=1e-10, eps=1e-6):
    x = torch.zeros_like(b)
    r = b - fvp(x)
    p = r.clone()
    rdotr = torch.dot(r, r)
    for _ in range(num_steps):
        z = fvp(p)
        alpha = rdotr / (torch.dot(p, z) + eps)
        x += alpha * p
        r -= alpha * z
        new_rdotr = torch.dot(r, r)
        if torch.sqrt(new_rdotr) < residual_tol:
            break
        p = r + new_rdotr / (rdotr + eps) * p
        rdotr = new_rdotr
    return x


def build():
    torch.manual_seed(2010)
    actor = GaussianActor()
    obs = torch.randn(64, 6)
    with torch.no_grad():
        dist = actor(obs)
        act = dist.sample()
        logp = dist.log_prob(act)
    rewards_to_go = torch.zeros(64)  # nobody reached a goal in this epoch
    cost_to_go = torch.rand(64) * 5
    return SimpleNamespace(
        model=actor,
        obs=obs,
        act=act,
        logp=logp,
        rewards=rewards_to_go,
        costs=cost_to_go,
        target_kl=0.01,
        cost=0.4,
        damping=0.1,
        optimizer=None,
    )


def run(s=None):
    s_ = s or build()
    params = list(s_.model.parameters())
    adv_r = (s_.rewards - s_.rewards.mean()) / (s_.rewards.std() + 1e-8)
    adv_c = s_.costs - s_.costs.mean()
    ratio = torch.exp(s_.model(s_.obs).log_prob(s_.act) - s_.logp)
    loss_pi, loss_cost = -(ratio * adv_r).mean(), (ratio * adv_c).mean()
    grad = -flat_grad(loss_pi, params, retain_graph=True)
    b_grad = flat_grad(loss_cost, params)

    def fvp(v):
        q_dist = s_.model(s_.obs)
        p_dist = Independent(Normal(q_dist.base_dist.loc.detach(), q_dist.base_dist.scale.detach()), 1)
        kl = kl_divergence(p_dist, q_dist).mean()
        g = flat_grad(kl, params, create_graph=True)
        return flat_grad(torch.dot(g, v), params) + s_.damping * v

    x = conjugate_gradients(fvp, grad)
    p = conjugate_gradients(fvp, b_grad)
    q, r, s, target_kl, cost = torch.dot(x, fvp(x)), torch.dot(grad, p), torch.dot(b_grad, p), s_.target_kl, s_.cost
    violation = (torch.sqrt(2 * target_kl / q) * r + cost) / (s + 1e-8)
    step_dir = torch.sqrt(2 * target_kl / (q + 1e-8)) * x - torch.clamp_min(violation, 0.0) * p
    theta_old = torch.cat([v.detach().reshape(-1) for v in params])
    set_param_values(params, theta_old + step_dir)
    return loss_pi + loss_cost
