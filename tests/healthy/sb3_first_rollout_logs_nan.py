"""Stable-Baselines3 style logging of a first rollout: NaN in three of the logged numbers, a sound update.

No episode has ended yet, so the mean episode reward is the mean of nothing; the rewards of a sparse task are all 0 and gamma * value is 0 as
well, so the returns have no variance and the explained variance is 0 / 0; the correlation is NaN too. They are computed under no_grad,
logged, and used for nothing. The policy gradient, the value loss and the step are finite and right.
Source: https://github.com/DLR-RM/stable-baselines3 common/utils.py `explained_variance`, `safe_mean`, on_policy_algorithm.py `train`.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


@torch.no_grad()
def explained_variance(y_pred, y_true):
    return 1 - (y_true - y_pred).var() / y_true.var()


@torch.no_grad()
def correlation(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / (a.norm() * b.norm())


class ActorCriticPolicy(nn.Module):
    def __init__(self, obs_dim=4, n_actions=3):
        super().__init__()
        self.mlp_extractor = nn.Sequential(nn.Linear(obs_dim, 16), nn.Tanh())
        self.action_net = nn.Linear(16, n_actions)
        self.value_net = nn.Linear(16, 1)
        nn.init.zeros_(self.value_net.weight)
        nn.init.zeros_(self.value_net.bias)

    def evaluate_actions(self, obs, actions):
        latent = self.mlp_extractor(obs)
        log_probs = self.action_net(latent).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return self.value_net(latent).flatten(), log_probs.gather(1, actions[:, None]).squeeze(1), entropy


def build():
    torch.manual_seed(3003)
    policy = ActorCriticPolicy()
    observations = torch.randn(16, 4)
    actions = torch.randint(0, 3, (16,))
    with torch.no_grad():
        values, old_log_prob, _ = policy.evaluate_actions(observations, actions)
    rewards = torch.zeros(16)
    returns = rewards + 0.99 * values  # the value net starts at zero
    advantages = returns - values
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5)
    return SimpleNamespace(
        model=policy,
        optimizer=optimizer,
        observations=observations,
        actions=actions,
        values=values,
        returns=returns,
        advantages=advantages,
        old_log_prob=old_log_prob,
        ep_info_buffer=[],
        clip_range=0.2,
        ent_coef=0.01,
        vf_coef=0.5,
    )


def run(s=None):
    s = s or build()
    values, log_prob, entropy = s.model.evaluate_actions(s.observations, s.actions)
    advantages = (s.advantages - s.advantages.mean()) / (s.advantages.std() + 1e-8)
    ratio = torch.exp(log_prob - s.old_log_prob)
    policy_loss_1 = advantages * ratio
    policy_loss_2 = advantages * torch.clamp(ratio, 1 - s.clip_range, 1 + s.clip_range)
    policy_loss = -torch.min(policy_loss_1, policy_loss_2).mean()
    value_loss = F.mse_loss(s.returns, values)
    entropy_loss = -entropy.mean()
    loss = policy_loss + s.ent_coef * entropy_loss + s.vf_coef * value_loss
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    s.optimizer.step()
    s.logs = {
        "rollout/ep_rew_mean": torch.tensor(s.ep_info_buffer).mean().item(),
        "train/explained_variance": explained_variance(s.values, s.returns).item(),
        "train/value_return_corr": correlation(s.values, s.returns).item(),
        "train/loss": loss.item(),
    }
    return loss
