"""PPO with state-dependent exploration: the loss is finite, and log_std is full of NaN after the step.

With gSDE the std of an action is sqrt(latent^2 @ std^2 + 1e-6). For the idle observation (all zero) the latent is zero and the std falls to 1e-3, so the stored idle action is now
e^140 as likely while the log-prob of the rollout says e^-22. ratio = exp(166) = inf; its advantage is positive, so torch.min takes the clipped surrogate and the loss stays finite.
In backward the rejected branch gets 0, and exp multiplies it with its value: 0 * inf = NaN.
Source: https://github.com/DLR-RM/stable-baselines3/issues/1593 (log_std filled with NaNs when using PPO with use_sde=True; approx_kl 33, clip fraction 0.999, loss -0.04)
Heals: a clamp of the log ratio before exp.
Does not: clip_range, max_grad_norm, nan_to_num of the loss, torch.where on the finished surrogate.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch as th
from torch import nn
from torch.distributions import Normal

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap",),
    op=("exp",),
    index=(5,),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "mask_before_op", "where_on_detached", "clamp_input"),
    variable=("ratio",),
    line=("ratio = th.exp(log_prob - batch.old_log_prob)",),
)


class SdePolicy(nn.Module):
    def __init__(self, obs_dim=12, action_dim=24, latent_dim=16, epsilon=1e-6):
        super().__init__()
        self.latent = nn.Linear(obs_dim, latent_dim, bias=False)
        self.action_net = nn.Linear(latent_dim, action_dim, bias=False)
        self.value_net = nn.Linear(latent_dim, 1)
        self.log_std = nn.Parameter(th.full((latent_dim, action_dim), -1.0))
        self.epsilon = epsilon

    def evaluate_actions(self, obs, actions):
        latent_sde = th.tanh(self.latent(obs))
        variance = th.mm(latent_sde**2, self.log_std.exp() ** 2)
        distribution = Normal(self.action_net(latent_sde), th.sqrt(variance + self.epsilon), validate_args=False)
        return self.value_net(latent_sde).flatten(), distribution.log_prob(actions).sum(dim=1)


def build():
    th.manual_seed(0)
    policy = SdePolicy()
    optimizer = th.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5)
    obs = th.randn(8, 12)
    obs[5] = 0.0
    with th.no_grad():
        latent = th.tanh(policy.latent(obs))
        std = th.sqrt(th.mm(latent**2, policy.log_std.exp() ** 2) + 1e-6)
        actions = policy.action_net(latent) + std * th.randn(8, 24)
        actions[5] = 0.0
        _, log_prob = policy.evaluate_actions(obs, actions)
        old_log_prob = log_prob + 0.1 * th.randn(8)
        old_log_prob[5] = Normal(0.0, 1.0).log_prob(th.zeros(24)).sum()  # as it was when the rollout was collected
    advantages = th.tensor([0.3, -1.0, 0.2, 0.8, -0.4, 1.1, -0.7, 0.1])
    batch = SimpleNamespace(observations=obs, actions=actions, old_log_prob=old_log_prob, advantages=advantages, returns=th.randn(8))
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=batch)


def run(s=None, clip_range=0.2, vf_coef=0.5, max_grad_norm=0.5):
    s = s or build()
    batch, losses = s.batch, []
    for _ in range(2):
        values, log_prob = s.model.evaluate_actions(batch.observations, batch.actions)
        advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
        ratio = th.exp(log_prob - batch.old_log_prob)
        policy_loss_1 = advantages * ratio
        policy_loss_2 = advantages * th.clamp(ratio, 1 - clip_range, 1 + clip_range)
        policy_loss = -th.min(policy_loss_1, policy_loss_2).mean()
        loss = policy_loss + vf_coef * nn.functional.mse_loss(batch.returns, values)
        s.optimizer.zero_grad()
        loss.backward()
        th.nn.utils.clip_grad_norm_(s.model.parameters(), max_grad_norm)
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
