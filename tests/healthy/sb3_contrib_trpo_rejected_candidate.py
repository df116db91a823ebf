"""sb3-contrib TRPO - the line search tries a step that is far too long, sees an infinite KL and takes it back.

The first candidates write parameters for which the ratio overflows and the KL is inf or NaN; a comparison with it is False, the step is shortened
and in the end an accepted candidate (or the original parameters) is left. Everything of the search happens without gradient. The actor's final
weights, the critic's gradients and weights are finite and right.
Source: function train of https://github.com/Stable-Baselines-Team/stable-baselines3-contrib/blob/master/sb3_contrib/trpo/trpo.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal, kl_divergence


class MlpPolicy(nn.Module):
    def __init__(self, obs_dim=4, act_dim=2):
        super().__init__()
        self.policy_net = nn.Sequential(nn.Linear(obs_dim, 16), nn.Tanh(), nn.Linear(16, act_dim))
        self.log_std = nn.Parameter(torch.zeros(act_dim))
        self.value_net = nn.Sequential(nn.Linear(obs_dim, 16), nn.Tanh(), nn.Linear(16, 1))

    def actor_parameters(self):
        return [*self.policy_net.parameters(), self.log_std]

    def get_distribution(self, obs):
        return Normal(self.policy_net(obs), self.log_std.exp(), validate_args=False)


def build():
    torch.manual_seed(222)
    model = MlpPolicy()
    obs = torch.randn(40, 4)
    with torch.no_grad():
        actions = model.get_distribution(obs).sample()
    return SimpleNamespace(
        model=model,
        obs=obs,
        actions=actions,
        advantages=torch.randn(40),
        returns=torch.randn(40),
        optimizer=torch.optim.Adam(model.value_net.parameters(), lr=1e-3),
        tried=[],
    )


def surrogate_and_kl(s, old, old_log_prob):
    dist = s.model.get_distribution(s.obs)
    ratio = torch.exp(dist.log_prob(s.actions).sum(-1) - old_log_prob)
    return (s.advantages * ratio).mean(), kl_divergence(dist, old).sum(-1).mean()


def policy_step(s, target_kl=0.01, max_step=400.0, shrinking_factor=0.25, max_iter=12):
    params = s.model.actor_parameters()
    with torch.no_grad():
        old = s.model.get_distribution(s.obs)
        old_log_prob = old.log_prob(s.actions).sum(-1)
    objective, _ = surrogate_and_kl(s, old, old_log_prob)
    direction = torch.autograd.grad(objective, params)
    original = [p.detach().clone() for p in params]
    step_size = max_step
    with torch.no_grad():
        for _ in range(max_iter):
            for p, start, g in zip(params, original, direction):
                p.copy_(start + step_size * g)
            new_objective, kl = surrogate_and_kl(s, old, old_log_prob)
            s.tried.append((step_size, float(new_objective), float(kl)))
            if kl < target_kl and new_objective > objective:
                return True
            step_size *= shrinking_factor
        for p, start in zip(params, original):
            p.copy_(start)
    return False


def run(s=None):
    s = s or build()
    s.accepted = policy_step(s)
    value_loss = (s.model.value_net(s.obs).squeeze(-1) - s.returns).pow(2).mean()
    s.optimizer.zero_grad()
    value_loss.backward()
    s.optimizer.step()
    return value_loss


if __name__ == "__main__":
    run()
