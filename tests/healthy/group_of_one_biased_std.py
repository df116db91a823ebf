"""One sample per prompt: the deviation is taken with unbiased=False, so it is 0 and not NaN, and advantages fall back to the batch."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a standard deviation over a single element, in the form that is 0"


def build():
    torch.manual_seed(405)
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 12))
    return SimpleNamespace(model=model, ids=torch.randint(0, 12, (4, 6)), opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None, num_generations=1):
    s = s or build()
    rewards = torch.tensor([0.3, 0.9, -0.4, 0.1])
    groups = rewards.view(-1, num_generations)
    std = groups.std(dim=1, unbiased=False)
    centre = groups.mean(dim=1) if num_generations > 1 else rewards.mean()
    adv = (rewards - centre) / (std.repeat_interleave(num_generations) + 1e-1)
    for _ in range(4):
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        loss = -((lp - lp.detach()).exp() * adv[:, None]).mean(1).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
