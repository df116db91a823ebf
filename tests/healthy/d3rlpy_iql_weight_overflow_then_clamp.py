"""d3rlpy IQL - the advantage weight overflows to inf and is clamped to its maximum, without gradient.

On a dataset with unscaled rewards the advantage of a lucky transition times the temperature of 3 is beyond 88, so exp gives inf. The weight is made
under no_grad and clamped to max_weight, inf becomes exactly 100: that is what the algorithm wants. It then multiplies a finite log-probability.
Actor, value and critic losses, all gradients and weights are finite and right.
Source: functions compute_actor_loss and _compute_weight of https://github.com/takuseno/d3rlpy/blob/master/d3rlpy/algos/qlearning/torch/iql_impl.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal


def mlp(inputs, outputs, hidden=24):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class IQLModules(nn.Module):
    def __init__(self, obs_dim=5, act_dim=2):
        super().__init__()
        self.policy = mlp(obs_dim, act_dim)
        self.log_std = nn.Parameter(torch.zeros(act_dim))
        self.q_funcs = nn.ModuleList([mlp(obs_dim + act_dim, 1), mlp(obs_dim + act_dim, 1)])
        self.value_func = mlp(obs_dim, 1)

    def q(self, x, a):
        return torch.stack([f(torch.cat([x, a], -1)).squeeze(-1) for f in self.q_funcs])


def build():
    torch.manual_seed(2021)
    model = IQLModules()
    targ_q_funcs = nn.ModuleList([mlp(7, 1), mlp(7, 1)])
    for target, source in zip(targ_q_funcs, model.q_funcs):
        target.load_state_dict(source.state_dict())
    n = 16
    batch = SimpleNamespace(
        observations=torch.randn(n, 5),
        actions=torch.tanh(torch.randn(n, 2)),
        rewards=10.0 * torch.randn(n),
        next_observations=torch.randn(n, 5),
        terminals=(torch.rand(n) < 0.1).float(),
    )
    with torch.no_grad():
        for target in targ_q_funcs:  # the critics have seen returns of dozens on transitions like number 3
            h = target[0](torch.cat([batch.observations, batch.actions], -1)[3]).relu()
            target[2].weight[0] += 60.0 * h / h.pow(2).sum()
    return SimpleNamespace(
        model=model,
        targ_q_funcs=targ_q_funcs,
        batch=batch,
        expectile=0.7,
        weight_temp=3.0,
        max_weight=100.0,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-4),
    )


def compute_weight(s, batch):
    with torch.no_grad():
        xa = torch.cat([batch.observations, batch.actions], -1)
        q_t = torch.stack([f(xa).squeeze(-1) for f in s.targ_q_funcs]).min(dim=0).values
        v_t = s.model.value_func(batch.observations).squeeze(-1)
        adv = q_t - v_t
        return (s.weight_temp * adv).exp().clamp(max=s.max_weight)


def run(s=None):
    s = s or build()
    b = s.batch
    xa = torch.cat([b.observations, b.actions], -1)
    weight = compute_weight(s, b)
    log_probs = Normal(torch.tanh(s.model.policy(b.observations)), s.model.log_std.exp()).log_prob(b.actions).sum(-1)
    actor_loss = -(weight * log_probs).mean()
    with torch.no_grad():
        q_t = torch.stack([f(xa).squeeze(-1) for f in s.targ_q_funcs]).min(dim=0).values
        target = b.rewards + 0.99 * (1.0 - b.terminals) * s.model.value_func(b.next_observations).squeeze(-1)
    diff = q_t - s.model.value_func(b.observations).squeeze(-1)
    value_loss = ((s.expectile - (diff < 0.0).float()).abs() * diff.pow(2)).mean()
    critic_loss = F.mse_loss(s.model.q(b.observations, b.actions), target.expand(2, -1))
    loss = actor_loss + value_loss + critic_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
