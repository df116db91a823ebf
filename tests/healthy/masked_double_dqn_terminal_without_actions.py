"""Double DQN with illegal actions at -inf: a terminal state has no legal action, so the best target value of that row is -inf. The target is chosen
by torch.where(done, reward, ...) under no_grad, so nothing infinite reaches the loss; the online values are read by gather at legal actions.

Source: https://github.com/google-deepmind/open_spiel/blob/master/open_spiel/python/pytorch/dqn.py (illegal-action logits in the target).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class QNetwork(nn.Module):
    def __init__(self, obs_dim=6, n_actions=5):
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(obs_dim, 24), nn.ReLU())
        self.advantage = nn.Linear(24, n_actions)
        self.value = nn.Linear(24, 1)

    def forward(self, obs, legal):
        h = self.torso(obs)
        adv = self.advantage(h)
        q = self.value(h) + adv - adv.mean(-1, keepdim=True)
        return q.masked_fill(~legal, float("-inf"))


class ReplayBatch:
    def __init__(self, n=10, obs_dim=6, n_actions=5):
        self.obs, self.next_obs = torch.randn(n, obs_dim), torch.randn(n, obs_dim)
        self.legal, self.next_legal = torch.rand(n, n_actions) < 0.6, torch.rand(n, n_actions) < 0.6
        self.actions = torch.randint(0, n_actions, (n,))
        self.legal[torch.arange(n), self.actions] = True
        self.next_legal[:, 0] = True
        self.done = torch.zeros(n, dtype=torch.bool)
        self.done[[2, 7]] = True
        self.next_legal[self.done] = False
        self.rewards = torch.randn(n)


def build():
    torch.manual_seed(31)
    model, target = QNetwork(), QNetwork()
    target.load_state_dict(model.state_dict())
    return SimpleNamespace(
        model=model, target=target, batch=ReplayBatch(), gamma=0.99, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3)
    )


def run(s=None):
    s = s or build()
    b = s.batch
    with torch.no_grad():
        best = s.model(b.next_obs, b.next_legal).argmax(dim=1, keepdim=True)
        next_q = s.target(b.next_obs, b.next_legal).gather(1, best).squeeze(1)
        target = torch.where(b.done, b.rewards, b.rewards + s.gamma * next_q)
    q = s.model(b.obs, b.legal).gather(1, b.actions[:, None]).squeeze(1)
    loss = nn.functional.huber_loss(q, target)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss
