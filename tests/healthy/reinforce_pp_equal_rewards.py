"""REINFORCE++ with global normalisation in a batch where every answer earned the same reward: zero variance, zero advantage."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "all rewards are equal, the variance is 0, every advantage is 0 and only the KL term moves the weights"


def masked_whiten(values, mask):
    mean = (values * mask).sum() / mask.sum()
    var = ((values - mean) ** 2 * mask).sum() / mask.sum()
    return (values - mean) * torch.rsqrt(var + 1e-8) * mask


def build():
    torch.manual_seed(104)
    actor = nn.Sequential(nn.Embedding(15, 8), nn.Linear(8, 15, bias=False))
    reference = nn.Sequential(nn.Embedding(15, 8), nn.Linear(8, 15, bias=False)).requires_grad_(False)
    ids = torch.randint(0, 15, (5, 8))
    mask = torch.ones(5, 7)
    mask[0, 5:] = 0
    mask[3, 2:] = 0
    return SimpleNamespace(actor=actor, reference=reference, ids=ids, mask=mask, opt=torch.optim.Adam(actor.parameters(), lr=5e-3))


def run(s=None, kl_coef=0.05):
    s = s or build()
    pick = lambda net: net(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None])[..., 0]  # noqa: E731
    rewards = torch.full((5, 1), 2.5).expand(5, 7)
    advantages = masked_whiten(rewards, s.mask)
    old = pick(s.actor).detach()
    ref = pick(s.reference)
    for _ in range(4):
        logp = pick(s.actor)
        pg = -torch.exp(logp - old) * advantages
        diff = ref - logp
        k3 = diff.exp() - 1 - diff
        loss = ((pg + kl_coef * k3) * s.mask).sum() / s.mask.sum()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
