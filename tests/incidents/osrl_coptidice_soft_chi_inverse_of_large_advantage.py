"""liuzuxin/OSRL, osrl/algorithms/coptidice.py: the inverse derivative of the soft-chi divergence is exp(x) below 0 and x + 1 above. The published
lambda clamps x at 0 inside the exponential; here the clamp is gone. One transition with a goal bonus has e / alpha = 140: the forward takes x + 1
and the loss is fine, the backward of torch.where sends 0 * inf = NaN through the exponential that was not taken.

https://github.com/liuzuxin/OSRL/blob/main/osrl/algorithms/coptidice.py
Clamping the exponent (as published) heals. nan_to_num of the weights, or clipping the gradient norm, does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap",),
    op=("exp",),
    index=(5,),
    masked=True,
    role=("is_weight", "ratio", "advantages"),
    fix=("clamp_exponent", "mask_before_op", "clamp_input", "stable_function"),
    variable=(None,),
    line=("return torch.where(x < 0, torch.exp(x), x + 1)",),
)


def f_soft_chi(w):
    return torch.where(w < 1, w * (torch.log(w + 1e-10) - 1) + 1, 0.5 * (w - 1) ** 2)


def f_prime_inv_soft_chi(x):
    return torch.where(x < 0, torch.exp(x), x + 1)


class COptiDICE(nn.Module):
    def __init__(self, state_dim=6, action_dim=2, hidden=16, alpha=0.5, gamma=0.99):
        super().__init__()
        self.alpha, self.gamma = alpha, gamma
        self.nu_network = nn.Sequential(nn.Linear(state_dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.actor = nn.Sequential(nn.Linear(state_dim, hidden), nn.ReLU(), nn.Linear(hidden, action_dim))
        self.lmbda = nn.Parameter(torch.ones(1))

    def optimal_w(self, batch):
        nu_s = self.nu_network(batch["observations"]).squeeze(-1)
        nu_s_next = self.nu_network(batch["next_observations"]).squeeze(-1)
        e_nu_lambda = batch["rewards"] - F.softplus(self.lmbda).detach() * batch["costs"]
        e_nu_lambda = e_nu_lambda + self.gamma * (1.0 - batch["done"]) * nu_s_next - nu_s
        w_sa = F.relu(f_prime_inv_soft_chi(e_nu_lambda / self.alpha))
        return nu_s, e_nu_lambda, w_sa


def build():
    torch.manual_seed(17)
    model = COptiDICE()
    rewards = torch.randn(8) * 0.5
    rewards[5] = 70.0  # the goal is reached
    batch = dict(
        observations=torch.randn(8, 6),
        next_observations=torch.randn(8, 6),
        actions=torch.randn(8, 2),
        rewards=rewards,
        costs=(torch.rand(8) < 0.2).float(),
        done=torch.zeros(8),
        is_init=(torch.arange(8) < 2).float(),
    )
    return SimpleNamespace(
        model=model,
        batch=batch,
        init_state_proportion=0.25,
        optimizer=torch.optim.Adam(model.nu_network.parameters(), lr=1e-3),
        actor_optimizer=torch.optim.Adam(model.actor.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    m, batch = s.model, s.batch
    nu_s, e_nu_lambda, w_sa = m.optimal_w(batch)
    nu_init = nu_s * batch["is_init"] / s.init_state_proportion
    nu_loss = (1 - m.gamma) * nu_init.mean() + (w_sa * e_nu_lambda - m.alpha * f_soft_chi(w_sa)).mean()
    s.optimizer.zero_grad()
    nu_loss.backward()
    torch.nn.utils.clip_grad_norm_(m.nu_network.parameters(), 10.0)
    s.optimizer.step()

    log_prob = -0.5 * (batch["actions"] - m.actor(batch["observations"])).pow(2).sum(-1)
    actor_loss = -(w_sa.detach() * log_prob).mean()
    s.actor_optimizer.zero_grad()
    actor_loss.backward()
    s.actor_optimizer.step()
    return nu_loss


if __name__ == "__main__":
    print(run())
