"""stable-baselines3, PPO.train - the last minibatch of the rollout buffer holds a single step.

n_steps is batch_size + 1, so that the second minibatch is one observation; the unbiased std of one advantage is NaN, and with it advantages, policy loss, gradients.
Source: https://github.com/DLR-RM/stable-baselines3/issues/325 (PPO.train, normalisation of advantages). Heals: `and len(advantages) > 1` (what the project does); dropping the
minibatch; std(unbiased=False) (shifts the other minibatch by 3 %). Does not: the 1e-8 of the denominator; clip_grad_norm_.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(),
    masked=None,
    role=("advantages",),
    fix=("guard_small_group", "drop_invalid_sample", "avoid_singular_op", "validate_config", "fix_upstream"),
    variable=(None,),
    line=("advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)",),
)


class ActorCriticPolicy(nn.Module):
    def __init__(self, obs_dim=4, n_actions=3, width=16):
        super().__init__()
        self.mlp_extractor = nn.Sequential(nn.Linear(obs_dim, width), nn.Tanh())
        self.action_net = nn.Linear(width, n_actions)
        self.value_net = nn.Linear(width, 1)

    def evaluate_actions(self, obs, actions):
        latent = self.mlp_extractor(obs)
        distribution = Categorical(logits=self.action_net(latent))
        return self.value_net(latent), distribution.log_prob(actions), distribution.entropy()


class RolloutBuffer:
    def __init__(self, policy, n_steps):
        g = torch.Generator().manual_seed(7)
        self.buffer_size = n_steps
        self.observations = torch.randn(n_steps, 4, generator=g)
        self.actions = torch.randint(0, 3, (n_steps,), generator=g)
        with torch.no_grad():
            values, log_prob, _ = policy.evaluate_actions(self.observations, self.actions)
        self.old_log_prob = log_prob
        self.advantages = torch.randn(n_steps, generator=g)
        self.returns = values.flatten() + self.advantages

    def get(self, batch_size):
        indices = torch.randperm(self.buffer_size, generator=torch.Generator().manual_seed(0))
        start_idx = 0
        while start_idx < self.buffer_size:
            b = indices[start_idx : start_idx + batch_size]
            yield SimpleNamespace(
                observations=self.observations[b],
                actions=self.actions[b],
                old_log_prob=self.old_log_prob[b],
                advantages=self.advantages[b],
                returns=self.returns[b],
            )
            start_idx += batch_size


def build():
    torch.manual_seed(0)
    policy = ActorCriticPolicy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5)
    return SimpleNamespace(
        model=policy, optimizer=optimizer, rollout_buffer=RolloutBuffer(policy, n_steps=17), batch_size=16, normalize_advantage=True
    )


def run(s=None):
    s = s or build()
    clip_range, ent_coef, vf_coef, max_grad_norm = 0.2, 0.01, 0.5, 0.5
    for rollout_data in s.rollout_buffer.get(s.batch_size):
        values, log_prob, entropy = s.model.evaluate_actions(rollout_data.observations, rollout_data.actions)
        values = values.flatten()
        # Normalize advantage
        advantages = rollout_data.advantages
        if s.normalize_advantage:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        # ratio between old and new policy, should be one at the first iteration
        ratio = torch.exp(log_prob - rollout_data.old_log_prob)

        # clipped surrogate loss
        policy_loss_1 = advantages * ratio
        policy_loss_2 = advantages * torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
        policy_loss = -torch.min(policy_loss_1, policy_loss_2).mean()

        value_loss = F.mse_loss(rollout_data.returns, values)
        entropy_loss = -torch.mean(entropy)
        loss = policy_loss + ent_coef * entropy_loss + vf_coef * value_loss

        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), max_grad_norm)
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
