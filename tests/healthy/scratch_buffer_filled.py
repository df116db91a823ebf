"""Advantages go through torch.empty scratch memory, but every slot is written before it is read; padding is cut by indexing."""

from types import SimpleNamespace

import torch
import torch.nn as nn


@torch.no_grad()
def lambda_returns(rewards, values, lengths, gamma=0.98, lam=0.9):
    scratch = torch.empty_like(rewards)
    for i, n in enumerate(lengths.tolist()):
        acc = 0.0
        for t in range(n - 1, -1, -1):
            nxt = values[i, t + 1] if t + 1 < n else 0.0
            acc = rewards[i, t] + gamma * nxt - values[i, t] + gamma * lam * acc
            scratch[i, t] = acc
    inside = torch.arange(rewards.shape[1]) < lengths[:, None]
    return scratch[inside], inside


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.pi = nn.Linear(8, 3)
        self.v = nn.Linear(8, 1)

    def forward(self, obs):
        h = torch.tanh(self.trunk(obs))
        return self.pi(h).log_softmax(-1), self.v(h).squeeze(-1)


def build():
    torch.manual_seed(351)
    torch.use_deterministic_algorithms(True)  # reproducible runs
    net = ActorCritic()
    batch = {"obs": torch.randn(3, 6, 4), "act": torch.randint(0, 3, (3, 6)), "rew": torch.rand(3, 6), "len": torch.tensor([4, 6, 3])}
    return SimpleNamespace(model=net, optimizer=torch.optim.Adam(net.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logp, values = s.model(b["obs"])
    adv, inside = lambda_returns(b["rew"], values, b["len"])
    picked = logp.gather(-1, b["act"].unsqueeze(-1)).squeeze(-1)[inside]
    target = adv + values.detach()[inside]
    loss = -(picked * adv).mean() + 0.5 * (values[inside] - target).square().mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
