"""KL to the reference on the top-k support of the policy: both log-softmaxes are -inf elsewhere and only kept entries are compared."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "both distributions are -inf outside the top k; their difference is taken on gathered entries only"


def build():
    torch.manual_seed(209)
    policy, ref = nn.Linear(9, 30), nn.Linear(9, 30)
    ref.requires_grad_(False)
    h = torch.randn(7, 9)
    return SimpleNamespace(policy=policy, ref=ref, h=h, opt=torch.optim.AdamW(policy.parameters(), lr=2e-3))


def keep_only(logits, idx):
    out = torch.full_like(logits, float("-inf"))
    return out.scatter(-1, idx, logits.gather(-1, idx))


def run(s=None, k=5):
    s = s or build()
    for _ in range(4):
        logits = s.policy(s.h)
        idx = logits.detach().topk(k, -1).indices
        p = keep_only(logits, idx).log_softmax(-1).gather(-1, idx)
        q = keep_only(s.ref(s.h), idx).log_softmax(-1).gather(-1, idx)
        kl = (p.exp() * (p - q)).sum(-1)
        loss = kl.mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
