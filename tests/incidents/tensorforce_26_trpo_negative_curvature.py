"""TRPO scales its step by sqrt(s'Hs / max_kl); away from the rollout policy the KL Hessian is indefinite, s'Hs is negative, sqrt is NaN.
https://github.com/tensorforce/tensorforce/issues/26

The rollouts serve two epochs. In the first one the Hessian is the Fisher matrix, in the second one the policy has moved. Loss and gradients
stay finite; the back-tracking test `kl > max_kl` is false for NaN, so the step is taken.
Heals: leave the policy alone when s'Hs <= 0. Does not: a larger number of back-tracking steps, or clipping the surrogate gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("sqrt_negative",),
    op=("sqrt",),
    index=(),
    masked=None,
    role=("optimizer", "kl", "grad"),
    fix=("skip_bad_step", "clamp_input", "avoid_singular_op"),
    variable=("lagrange_multiplier",),
    line=("lagrange_multiplier = torch.sqrt(shs / self.max_kl)",),
)


class CategoricalPolicy(nn.Module):
    def __init__(self, obs_dim=4, actions=5, hidden=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, actions))

    def forward(self, obs):
        return self.net(obs).log_softmax(-1)


class TRPO:
    def __init__(self, policy, max_kl=0.01, cg_iterations=10, backtracks=10):
        self.policy, self.max_kl = policy, max_kl
        self.cg_iterations, self.backtracks = cg_iterations, backtracks

    def kl(self, batch):
        old, new = batch["old_log_probs"], self.policy(batch["obs"])
        return (old.exp() * (old - new)).sum(-1).mean()

    def surrogate(self, batch):
        logp = self.policy(batch["obs"]).gather(-1, batch["actions"][:, None]).squeeze(-1)
        old = batch["old_log_probs"].gather(-1, batch["actions"][:, None]).squeeze(-1)
        return -(torch.exp(logp - old) * batch["advantages"]).mean()

    def hessian_vector_product(self, batch, vector):
        params = list(self.policy.parameters())
        grads = torch.autograd.grad(self.kl(batch), params, create_graph=True)
        flat = torch.cat([g.reshape(-1) for g in grads])
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(flat @ vector, params)])

    def conjugate_gradient(self, batch, b):
        x, r, p = torch.zeros_like(b), b.clone(), b.clone()
        rr = r @ r
        for _ in range(self.cg_iterations):
            hp = self.hessian_vector_product(batch, p)
            alpha = rr / (p @ hp)
            x, r = x + alpha * p, r - alpha * hp
            rr_new = r @ r
            if rr_new < 1e-10:
                break
            p, rr = r + (rr_new / rr) * p, rr_new
        return x

    def step(self, batch):
        params = list(self.policy.parameters())
        self.policy.zero_grad()
        loss = self.surrogate(batch)
        loss.backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in params])
        direction = self.conjugate_gradient(batch, -gradient)
        shs = 0.5 * (direction @ self.hessian_vector_product(batch, direction))
        lagrange_multiplier = torch.sqrt(shs / self.max_kl)
        full_step = direction / lagrange_multiplier
        old = parameters_to_vector(params).detach()
        with torch.no_grad():
            for k in range(self.backtracks):
                vector_to_parameters(old + 0.5**k * full_step, params)
                if self.kl(batch) > self.max_kl:
                    continue
                break
        return loss.detach()


def build():
    torch.manual_seed(42)
    policy = CategoricalPolicy()
    obs = torch.randn(24, 4)
    with torch.no_grad():
        policy.net[2].weight.mul_(3.0)
        old_log_probs = policy(obs)
        actions = torch.multinomial(old_log_probs.exp(), 1).squeeze(-1)
    advantages = torch.randn(24)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    batch = dict(obs=obs, actions=actions, advantages=advantages, old_log_probs=old_log_probs)
    return SimpleNamespace(model=policy, agent=TRPO(policy), batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        loss = s.agent.step(s.batch)
    return loss
