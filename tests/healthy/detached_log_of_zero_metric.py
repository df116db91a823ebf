"""The logged entropy uses p * log(p) on a saturated policy: it is NaN in the log, the loss does not contain it."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "log(0) and 0 * -inf in a metric that is detached and only printed"


def build():
    torch.manual_seed(217)
    net = nn.Linear(3, 5)
    with torch.no_grad():
        net.bias[2] += 130.0
    x = torch.randn(6, 3)
    return SimpleNamespace(net=net, x=x, a=torch.tensor([2, 2, 2, 2, 4, 2]), opt=torch.optim.Adam(net.parameters(), lr=1e-3), log={})


def run(s=None):
    s = s or build()
    adv = torch.tensor([0.1, -0.4, 0.3, 0.2, 1.0, -1.2])
    for _ in range(3):
        logits = s.net(s.x)
        loss = nn.functional.cross_entropy(logits, s.a, reduction="none").mul(adv).mean()
        p = logits.detach().softmax(-1)
        s.log["entropy"] = -(p * torch.log(p)).sum(-1).mean()
        s.log["min_logprob"] = torch.log(p).min().item()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
