"""gSDE "expln" takes exp of every log_std and keeps the non-positive ones by a product; one large log_std overflows and inf * 0 is NaN.
https://github.com/DLR-RM/stable-baselines3/issues/1593

The entropy bonus has carried one log_std up to 88.7; the first mini-batch is healthy and its update lifts it over the edge of exp.
Heals: exp(log_std.clamp(max=0)) (or where on the operand). Does not: torch.where(log_std <= 0, exp(log_std), 0), the slope stays inf * 0.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "exp_overflow"),
    op=("exp",),
    index=(4, 1),
    masked=True,
    role=("hidden", "weights", "log_probs"),
    fix=("mask_before_op", "clamp_exponent", "clamp_input"),
    variable=(None,),
    line=("below_threshold = torch.exp(log_std) * (log_std <= 0)",),
)


class StateDependentNoisePolicy(nn.Module):
    def __init__(self, obs_dim=5, latent_dim=6, action_dim=3, epsilon=1e-6):
        super().__init__()
        self.latent = nn.Sequential(nn.Linear(obs_dim, latent_dim), nn.Tanh())
        self.mean_actions = nn.Linear(latent_dim, action_dim)
        self.value_net = nn.Linear(latent_dim, 1)
        self.log_std = nn.Parameter(torch.full((latent_dim, action_dim), -0.5))
        self.epsilon = epsilon

    def get_std(self, log_std):
        below_threshold = torch.exp(log_std) * (log_std <= 0)
        safe_log_std = log_std * (log_std > 0) + self.epsilon
        above_threshold = (torch.log1p(safe_log_std) + 1.0) * (log_std > 0)
        return below_threshold + above_threshold

    def distribution(self, latent):
        variance = torch.mm(latent.detach() ** 2, self.get_std(self.log_std) ** 2)
        return Normal(self.mean_actions(latent), torch.sqrt(variance + self.epsilon), validate_args=False)

    def evaluate_actions(self, obs, actions):
        latent = self.latent(obs)
        dist = self.distribution(latent)
        return self.value_net(latent).flatten(), dist.log_prob(actions).sum(-1), dist.entropy().sum(-1)


def build():
    torch.manual_seed(93)
    policy = StateDependentNoisePolicy()
    with torch.no_grad():
        policy.log_std[0, 0] = 0.4
        policy.log_std[4, 1] = 88.7
        obs = torch.randn(12, 5)
        actions = policy.distribution(policy.latent(obs)).sample()
        values, old_log_prob, _ = policy.evaluate_actions(obs, actions)
    advantages = torch.randn(12)
    rollout = dict(obs=obs, actions=actions, old_log_prob=old_log_prob, advantages=advantages, returns=values + advantages)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03, eps=1e-5)
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=rollout, clip_range=0.2, ent_coef=0.5, vf_coef=0.5)


def run(s=None):
    s = s or build()
    b = s.batch
    for rows in torch.arange(12).split(4):
        values, log_prob, entropy = s.model.evaluate_actions(b["obs"][rows], b["actions"][rows])
        advantages = b["advantages"][rows]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = torch.exp(log_prob - b["old_log_prob"][rows])
        policy_loss_1 = advantages * ratio
        policy_loss_2 = advantages * torch.clamp(ratio, 1 - s.clip_range, 1 + s.clip_range)
        policy_loss = -torch.min(policy_loss_1, policy_loss_2).mean()
        value_loss = nn.functional.mse_loss(b["returns"][rows], values)
        loss = policy_loss - s.ent_coef * entropy.mean() + s.vf_coef * value_loss
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
        s.optimizer.step()
    return loss
