"""omnisafe CPO - the square root of a rounding residue below 0 is NaN, and the comparison with it picks the other multiplier (healthy).

Cost and reward gradients are parallel, A = q - r^2 / s is 0 up to rounding and comes out negative: lambda_a = sqrt(A / B) is NaN. A comparison
with NaN is False, lambda_b is taken, the step is the ordinary trust-region step, the line search accepts it inside the KL ball.
Source: https://github.com/PKU-Alignment/omnisafe omnisafe/algorithms/on_policy/second_order/cpo.py (CPO._update_actor)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal, kl_divergence


class Actor(nn.Module):
    def __init__(self, obs_dim=3, act_dim=2):
        super().__init__()
        self.mean = nn.Linear(obs_dim, act_dim)
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

    def forward(self, obs):
        return Normal(self.mean(obs), self.log_std.exp())


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


@torch.no_grad()
def set_params(model, vector):
    nn.utils.vector_to_parameters(vector, model.parameters())


def fvp(actor, obs, v, damping=0.1):
    dist = actor(obs)
    with torch.no_grad():
        old = actor(obs)
    kl = kl_divergence(old, dist).mean()
    grads = flat(torch.autograd.grad(kl, actor.parameters(), create_graph=True))
    return flat(torch.autograd.grad((grads * v).sum(), actor.parameters())) + damping * v


def conjugate_gradients(product, b, steps=15, tol=1e-10):
    x, r, p = torch.zeros_like(b), b.clone(), b.clone()
    rdotr = r.dot(r)
    for _ in range(steps):
        z = product(p)
        alpha = rdotr / (p.dot(z) + 1e-8)
        x = x + alpha * p
        r = r - alpha * z
        new = r.dot(r)
        if new < tol:
            break
        p = r + new / (rdotr + 1e-8) * p
        rdotr = new
    return x


def project(data, low, high):
    return torch.max(torch.min(data, torch.tensor(high)), torch.tensor(low))


def build():
    torch.manual_seed(7)
    actor = Actor()
    obs = torch.randn(16, 3)
    with torch.no_grad():
        dist = actor(obs)
        act = dist.sample()
        logp = dist.log_prob(act).sum(-1)
    adv_r = torch.randn(16)
    return SimpleNamespace(model=actor, obs=obs, act=act, logp=logp, adv_r=adv_r, adv_c=0.3 * adv_r, ep_cost=-1.0 / 50, optimizer=None)


def run(s=None, target_kl=0.01):
    s = s or build()

    def surrogate(adv):
        return ((s.model(s.obs).log_prob(s.act).sum(-1) - s.logp).exp() * adv).mean()

    theta_old = flat(p.detach() for p in s.model.parameters())
    loss = -surrogate(s.adv_r)
    s.model.zero_grad()
    loss.backward()
    grad = -flat(p.grad for p in s.model.parameters())
    b_grad = flat(torch.autograd.grad(surrogate(s.adv_c), s.model.parameters()))
    x = conjugate_gradients(lambda v: fvp(s.model, s.obs, v), grad)
    p = conjugate_gradients(lambda v: fvp(s.model, s.obs, v), b_grad)
    q, r, sdot, cost = x.dot(fvp(s.model, s.obs, x)), grad.dot(p), b_grad.dot(p), s.ep_cost
    A = q - r**2 / sdot
    B = 2 * target_kl - cost**2 / sdot
    lambda_a = torch.sqrt(A / B)
    lambda_b = torch.sqrt(q / (2 * target_kl))
    lambda_a_star = project(lambda_a, 0.0, (r / cost).item())
    lambda_b_star = project(lambda_b, (r / cost).item(), float("inf"))
    f_a = -0.5 * (A / (lambda_a_star + 1e-8) + B * lambda_a_star) - r * cost / (sdot + 1e-8)
    f_b = -0.5 * (q / (lambda_b_star + 1e-8) + 2 * target_kl * lambda_b_star)
    lambda_star = lambda_a_star if f_a >= f_b else lambda_b_star
    nu_star = torch.clamp(lambda_star * cost - r, min=0) / (sdot + 1e-8)
    step_direction = 1.0 / (lambda_star + 1e-8) * (x - nu_star * p)
    s.stats = dict(A=A.item(), B=B.item(), lambda_a=lambda_a.item(), lambda_star=lambda_star.item())
    with torch.no_grad():
        old, before = s.model(s.obs), surrogate(s.adv_c)
        step_frac = 1.0
        for _ in range(20):
            set_params(s.model, theta_old + step_frac * step_direction)
            kl = kl_divergence(old, s.model(s.obs)).mean()
            if kl <= 1.5 * target_kl and surrogate(s.adv_c) - before <= max(-cost, 0):
                break
            step_frac *= 0.8
        else:
            set_params(s.model, theta_old)
    s.kl = kl.item()
    return loss
