"""RLOO with two samples per prompt: the leave-one-out baseline is the other sample; one pair ties, so its advantage is 0."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "groups of two, one of them with a tie, so half of a micro-batch contributes exactly nothing"


def build():
    torch.manual_seed(105)
    policy = nn.Sequential(nn.Embedding(30, 14), nn.LayerNorm(14), nn.Linear(14, 30))
    completions = torch.randint(0, 30, (3, 2, 6))
    rewards = torch.tensor([[1.0, 0.0], [0.5, 0.5], [-2.0, 3.0]])
    return SimpleNamespace(
        policy=policy, completions=completions, rewards=rewards, optimizer=torch.optim.RMSprop(policy.parameters(), lr=1e-3)
    )


def run(s=None):
    s = s or build()
    G = s.rewards.shape[1]
    baseline = (s.rewards.sum(dim=1, keepdim=True) - s.rewards) / (G - 1)
    advantage = s.rewards - baseline
    for _ in range(5):
        flat = s.completions.flatten(0, 1)
        lp = torch.log_softmax(s.policy(flat[:, :-1]), -1)
        seq_lp = torch.take_along_dim(lp, flat[:, 1:, None], dim=-1).sum((1, 2)).view(3, G)
        loss = -(seq_lp * advantage).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss
