"""bittensor prompting's normalize_rewards: one reward in the batch gives var(dim=0) = NaN, kept in the running variance for ever.

Source: https://github.com/opentensor/validators (openvalidators/reward/reward.py, BaseRewardModel.normalize_rewards). `if self.var > 0` is False for NaN,
so the division is left out; rewards are only centred and squashed. Loss, gradients and weights are finite. Healthy.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn


class RewardNormalizer:
    def __init__(self):
        self.count, self.mean, self.var, self.count_limit = 0, torch.tensor(0.0), torch.tensor(0.0), 3000

    def normalize_rewards(self, rewards):
        new_count = rewards.numel()
        if new_count > 0 and self.count + new_count > 0:
            new_mean, new_var = rewards.mean(dim=0), rewards.var(dim=0)
            new_weight = new_count / (self.count + new_count)
            old_weight = self.count / (self.count + new_count)
            diff = new_mean - self.mean
            self.mean = new_weight * new_mean + old_weight * self.mean
            self.var = new_weight * new_var + old_weight * self.var + new_weight * old_weight * diff * diff
            self.count = min(self.count_limit, self.count + new_count)
        rewards = rewards - self.mean
        if self.var > 0:
            rewards = rewards / torch.sqrt(self.var)
        return 0.5 * (1 + torch.erf(rewards / math.sqrt(2.0)))


def build():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps = [(torch.randint(0, 16, (1, 7)), torch.tensor([0.8])), (torch.randint(0, 16, (4, 7)), torch.tensor([0.1, 0.9, 0.4, -0.3]))]
    return SimpleNamespace(model=model, optimizer=optimizer, steps=steps, normalizer=RewardNormalizer())


def run(s=None):
    s = s or build()
    for ids, rewards in s.steps:
        normalized = s.normalizer.normalize_rewards(rewards)
        logp = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).mean(-1)
        loss = -(normalized * logp).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss
