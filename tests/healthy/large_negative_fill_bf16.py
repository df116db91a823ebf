"""bfloat16 logits with -1e9 for forbidden tokens and an entropy as probs * log-probs: 0 times -1e9 is a plain 0."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "log-probs of -1e9 are multiplied by probabilities that are exactly 0"


def build():
    torch.manual_seed(409)
    net = nn.Linear(6, 10).to(torch.bfloat16)
    obs = torch.randn(5, 6, dtype=torch.bfloat16)
    allowed = torch.rand(5, 10) > 0.4
    allowed[:, 3] = True
    return SimpleNamespace(net=net, obs=obs, allowed=allowed, opt=torch.optim.AdamW(net.parameters(), lr=1e-2))


def run(s=None):
    s = s or build()
    act = torch.full((5, 1), 3)
    adv = torch.tensor([0.5, 1.0, -1.0, 0.2, -0.7])
    for _ in range(4):
        logits = s.net(s.obs).masked_fill(~s.allowed, -1e9)
        logp = torch.log_softmax(logits, -1, dtype=torch.float32)
        entropy = -(logp.exp() * logp).sum(-1)
        loss = -(logp.gather(1, act).squeeze(1) * adv).mean() - 0.05 * entropy.mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
