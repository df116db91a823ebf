"""A skill mixture: the log-probability of an action is logsumexp over skills of gate log-probability + Gaussian log-probability. Skills that a task
does not have are disabled by -inf in the gate's logits; every task keeps one at least. logsumexp and log_softmax absorb -inf forward and backward, and
PPO's ratio uses the same mask for old and new: healthy. The variance explained is NaN in the first rollout (constant returns) and only logged.

Source: formulas of https://github.com/pytorch/rl (MaskedCategorical) and torch.distributions.MixtureSameFamily.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal


class SkillPolicy(nn.Module):
    def __init__(self, obs_dim=5, act_dim=2, n_skills=4):
        super().__init__()
        self.n_skills, self.act_dim = n_skills, act_dim
        self.gate = nn.Linear(obs_dim, n_skills)
        self.mean = nn.Linear(obs_dim, n_skills * act_dim)
        self.log_std = nn.Parameter(torch.zeros(n_skills, act_dim))
        self.value = nn.Linear(obs_dim, 1)

    def forward(self, obs, available):
        logits = self.gate(obs).masked_fill(~available, float("-inf"))
        mean = self.mean(obs).view(-1, self.n_skills, self.act_dim)
        comp = Independent(Normal(mean, self.log_std.exp().expand_as(mean)), 1)
        mix = Categorical(logits=logits, validate_args=False)
        return MixtureSameFamily(mix, comp, validate_args=False), self.value(obs).squeeze(-1)


def explained_variance(values, returns):
    return 1 - (returns - values).var() / returns.var() if returns.var() > 0 else torch.tensor(float("nan"))


def build():
    torch.manual_seed(41)
    policy = SkillPolicy()
    obs, available = torch.randn(9, 5), torch.rand(9, 4) < 0.5
    available[:, 1] = True
    available[4] = torch.tensor([False, True, False, False])
    with torch.no_grad():
        dist, _ = policy(obs, available)
        actions = torch.randn(9, 2)
        old_log_prob = dist.log_prob(actions)
    return SimpleNamespace(
        model=policy,
        obs=obs,
        available=available,
        actions=actions,
        old_log_prob=old_log_prob,
        advantages=torch.randn(9),
        returns=torch.ones(9),
        log={},
        optimizer=torch.optim.Adam(policy.parameters(), lr=3e-4),
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        dist, values = s.model(s.obs, s.available)
        ratio = torch.exp(dist.log_prob(s.actions) - s.old_log_prob)
        policy_loss = -torch.min(s.advantages * ratio, s.advantages * ratio.clamp(0.8, 1.2)).mean()
        loss = policy_loss + 0.5 * nn.functional.mse_loss(values, s.returns)
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
        s.optimizer.step()
    with torch.no_grad():
        s.log["explained_variance"] = explained_variance(values, s.returns).item()
    return loss
