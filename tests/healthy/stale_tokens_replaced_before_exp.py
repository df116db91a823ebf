"""Off-policy tokens whose log ratio exceeds a bound are set to 0 by torch.where before the exponential."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "log ratios of 200 and of +inf occur in the batch and are replaced before exp"


def build():
    torch.manual_seed(212)
    model = nn.Sequential(nn.Embedding(16, 12), nn.Linear(12, 16))
    ids = torch.randint(0, 16, (3, 8))
    rollout = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).detach()
    rollout[0, 2] = -200.0
    rollout[1, 6] = float("-inf")
    return SimpleNamespace(model=model, ids=ids, rollout=rollout, opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None, bound=3.0):
    s = s or build()
    adv = torch.tensor([[0.5], [1.0], [-1.5]])
    for _ in range(4):
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        trusted = (lp.detach() - s.rollout).abs() < bound
        log_ratio = torch.where(trusted, lp - torch.where(trusted, s.rollout, lp.detach()), torch.zeros_like(lp))
        loss = -(log_ratio.exp() * adv * trusted).sum() / trusted.sum()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
