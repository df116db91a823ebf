"""One batch in the middle of training has targets a few times larger: the loss is some 50 times the usual one and then it is back."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the loss jumps by a factor of about 50 for one step, because the data of that step are harder"


def build():
    torch.manual_seed(112)
    critic = nn.Sequential(nn.Linear(5, 32), nn.ELU(), nn.Linear(32, 1))
    states = torch.randn(6, 12, 5)
    targets = states.sum(-1) * 0.5 + 1.0
    targets[3] *= 3.8
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    return SimpleNamespace(critic=critic, optimizer=optimizer, states=states, targets=targets, history=[])


def run(s=None):
    s = s or build()
    for x, y in zip(s.states, s.targets, strict=True):
        loss = (s.critic(x)[:, 0] - y).square().mean()
        s.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(s.critic.parameters(), max_norm=1.0)
        s.optimizer.step()
        s.history.append(float(loss.detach()))
    return loss
