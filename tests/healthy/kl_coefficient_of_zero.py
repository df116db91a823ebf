"""beta = 0 keeps the KL in the loss with weight zero; the KL is finite, so the product is an ordinary 0."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a KL above 1e3 is multiplied by a coefficient of exactly 0"


def build():
    torch.manual_seed(323)
    policy, ref = nn.Linear(6, 9), nn.Linear(6, 9).requires_grad_(False)
    with torch.no_grad():
        ref.weight.mul_(12.0)
    return SimpleNamespace(
        policy=policy, ref=ref, x=torch.randn(8, 6), act=torch.randint(0, 9, (8,)), opt=torch.optim.AdamW(policy.parameters(), lr=1e-3)
    )


def run(s=None, beta=0.0):
    s = s or build()
    adv = torch.linspace(1.5, -1.5, 8)
    for _ in range(3):
        lp = s.policy(s.x).log_softmax(-1).gather(1, s.act[:, None]).squeeze(1)
        rp = s.ref(s.x).log_softmax(-1).gather(1, s.act[:, None]).squeeze(1)
        diff = (rp + 9.0) - lp
        k3 = torch.expm1(diff.clamp(-20, 20)) - diff
        loss = (-(lp - lp.detach()).exp() * adv + beta * k3).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
