"""Group advantages divide 0 by 0 for a prompt whose answers agree; torch.where drops that branch and nothing there needs a gradient."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "0/0 gives NaN inside the advantage computation, but only in the branch that torch.where throws away and without autograd"


def group_advantages(rewards):
    centered = rewards - rewards.mean(dim=0, keepdim=True)
    spread = rewards.std(dim=0, keepdim=True)
    scaled = centered / spread
    return torch.where(spread > 0, scaled, torch.zeros_like(scaled))


def build():
    torch.manual_seed(106)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    rewards = torch.tensor([[0.0, 1.0, 0.3], [1.0, 1.0, 0.1], [0.0, 1.0, 0.9], [1.0, 1.0, 0.2]])  # [G, prompts]
    ids = torch.randint(0, 12, (4, 3, 5))
    return SimpleNamespace(model=model, rewards=rewards, ids=ids, opt=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def run(s=None):
    s = s or build()
    for _ in range(3):
        advantages = group_advantages(s.rewards)
        logp = s.model(s.ids[..., :-1]).log_softmax(-1).gather(-1, s.ids[..., 1:, None]).squeeze(-1)
        loss = -(logp.mean(-1) * advantages).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
