"""Illegal actions get logits of -inf; Categorical clamps them in its entropy, and the returns of an early critic are huge and finite.
https://github.com/Stable-Baselines-Team/stable-baselines3-contrib/issues/221

No row is without a legal action, equal advantages of a mini-batch meet an epsilon, the value loss is 1e15 and the norm clip takes it down.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical


class MaskableActorCritic(nn.Module):
    def __init__(self, obs_dim=5, actions=6, hidden=16):
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh())
        self.action_net = nn.Linear(hidden, actions)
        self.value_net = nn.Linear(hidden, 1)

    def forward(self, obs, action_masks):
        latent = self.extractor(obs)
        logits = self.action_net(latent)
        logits = torch.where(action_masks, logits, torch.full_like(logits, float("-inf")))
        return Categorical(logits=logits, validate_args=False), self.value_net(latent).flatten()


def build():
    torch.manual_seed(221)
    policy = MaskableActorCritic()
    obs = torch.randn(12, 5)
    action_masks = torch.rand(12, 6) > 0.4
    action_masks[:, 2] = True
    action_masks[7] = torch.tensor([False, False, True, False, False, False])  # a forced move
    with torch.no_grad():
        dist, values = policy(obs, action_masks)
        actions = dist.sample()
        old_log_prob = dist.log_prob(actions)
    returns = 3e7 * (1 + torch.rand(12))  # unscaled makespan
    advantages = (returns - values).clone()
    advantages[8:] = 2.5e7  # one mini-batch of equal advantages
    rollout = dict(obs=obs, masks=action_masks, actions=actions, old=old_log_prob, adv=advantages, returns=returns)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5)
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=rollout)


def run(s=None):
    s = s or build()
    b = s.batch
    for rows in torch.arange(12).split(4):
        dist, values = s.model(b["obs"][rows], b["masks"][rows])
        log_prob = dist.log_prob(b["actions"][rows])
        adv = b["adv"][rows]
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        ratio = torch.exp(log_prob - b["old"][rows])
        policy_loss = -torch.min(adv * ratio, adv * ratio.clamp(0.8, 1.2)).mean()
        loss = policy_loss + 0.5 * F.mse_loss(values, b["returns"][rows]) - 0.01 * dist.entropy().mean()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
        s.optimizer.step()
    return loss
