"""stable-baselines #941 - prioritised replay with a min segment tree whose neutral element is infinity (looks broken, is healthy).

The leaves that hold no transition yet are inf in the min tree and 0 in the sum tree. min ignores inf, sampling never reaches a leaf of mass 0;
the weights of all leaves, computed for the histogram, are inf ** -beta = 0 there. Loss, priorities and weights are finite.
Source: https://github.com/hill-a/stable-baselines/issues/941
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class SegmentTree:
    def __init__(self, capacity, operation, neutral):
        self.capacity, self.operation = capacity, operation
        self.value = torch.full((2 * capacity,), neutral)

    def set(self, idx, val):
        self.value[self.capacity + idx] = val
        level = self.capacity // 2
        while level >= 1:
            left, right = self.value[2 * level : 4 * level : 2], self.value[2 * level + 1 : 4 * level : 2]
            self.value[level : 2 * level] = self.operation(left, right)
            level //= 2

    def root(self):
        return self.value[1]

    def leaves(self):
        return self.value[self.capacity :]


class PrioritizedReplayBuffer:
    def __init__(self, capacity=16, alpha=0.6):
        self.alpha, self.size, self.max_priority = alpha, 0, 1.0
        self.it_sum = SegmentTree(capacity, torch.add, 0.0)
        self.it_min = SegmentTree(capacity, torch.minimum, float("inf"))
        self.obs, self.act = torch.zeros(capacity, 4), torch.zeros(capacity, dtype=torch.long)
        self.rew, self.next_obs = torch.zeros(capacity), torch.zeros(capacity, 4)

    def add(self, obs, act, rew, next_obs):
        i = self.size
        self.obs[i], self.act[i], self.rew[i], self.next_obs[i] = obs, act, rew, next_obs
        self.size += 1
        self.update_priorities(torch.tensor([i]), torch.tensor([self.max_priority]))

    def update_priorities(self, idx, priorities):
        self.it_sum.set(idx, priorities**self.alpha)
        self.it_min.set(idx, priorities**self.alpha)
        self.max_priority = max(self.max_priority, priorities.max().item())

    def sample(self, mass, beta):
        total = self.it_sum.root()
        idx = torch.searchsorted(self.it_sum.leaves().cumsum(0), mass * total)
        max_weight = (self.it_min.root() / total * self.size) ** -beta
        all_weights = (self.it_min.leaves() / total * self.size) ** -beta / max_weight
        return idx, all_weights[idx], all_weights


def build():
    torch.manual_seed(94)
    q_net, target_net = nn.Linear(4, 3), nn.Linear(4, 3)
    target_net.load_state_dict(q_net.state_dict())
    buffer = PrioritizedReplayBuffer()
    for _ in range(10):
        buffer.add(torch.randn(4), torch.randint(0, 3, ()), torch.randn(()), torch.randn(4))
    buffer.update_priorities(torch.arange(5), torch.tensor([0.3, 2.0, 0.7, 0.05, 1.4]))
    return SimpleNamespace(
        model=q_net, target_net=target_net, buffer=buffer, mass=torch.rand(6), optimizer=torch.optim.Adam(q_net.parameters(), lr=5e-4)
    )


def run(s=None, beta=0.4, gamma=0.99, eps=1e-6):
    s = s or build()
    b = s.buffer
    idx, weights, all_weights = b.sample(s.mass, beta)
    s.metrics = dict(unused_leaves=torch.isinf(b.it_min.leaves()).sum().item(), smallest_weight=all_weights.min().item())
    q = s.model(b.obs[idx]).gather(1, b.act[idx][:, None]).squeeze(1)
    with torch.no_grad():
        target = b.rew[idx] + gamma * s.target_net(b.next_obs[idx]).max(1).values
    td_error = q - target
    loss = (weights * F.smooth_l1_loss(q, target, reduction="none")).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    b.update_priorities(idx, td_error.detach().abs() + eps)
    return loss
