"""Illegal moves get logit -inf; the entropy is built from probabilities whose zero entries are replaced before the product."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "log-probs of illegal actions are -inf, the entropy term masks them before it multiplies"


def masked_entropy(logits, legal):
    logp = logits.log_softmax(-1)
    safe = logp.masked_fill(~legal, 0.0)
    return -(safe.exp() * safe * legal).sum(-1)


def build():
    torch.manual_seed(206)
    policy = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 6))
    obs = torch.randn(5, 7)
    legal = torch.tensor(
        [[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1], [0, 0, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0], [1, 1, 0, 1, 1, 1]], dtype=torch.bool
    )
    action = torch.tensor([3, 2, 3, 4, 0])
    return SimpleNamespace(policy=policy, obs=obs, legal=legal, action=action, opt=torch.optim.Adam(policy.parameters(), lr=3e-3))


def run(s=None, ent_coef=0.02):
    s = s or build()
    adv = torch.tensor([1.0, -0.5, 0.3, 0.8, -1.6])
    for _ in range(4):
        logits = torch.where(s.legal, s.policy(s.obs), torch.tensor(float("-inf")))
        logp = logits.log_softmax(-1).gather(1, s.action[:, None])[:, 0]
        loss = -(logp * adv).mean() - ent_coef * masked_entropy(logits, s.legal).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
