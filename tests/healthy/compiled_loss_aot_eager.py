"""The clipped surrogate is compiled with the aot_eager backend; inside it a -inf fill feeds a logsumexp."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a compiled loss whose graph holds -inf logits of forbidden tokens"


@torch.compile(backend="aot_eager")
def surrogate(logits, allowed, actions, old_logp, adv):
    logits = logits.masked_fill(~allowed, float("-inf"))
    logp = logits.gather(-1, actions.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)
    ratio = torch.exp(logp - old_logp)
    return -torch.min(ratio * adv, torch.clamp(ratio, 0.8, 1.2) * adv).mean()


def build():
    torch.manual_seed(124)
    net = nn.Linear(6, 5)
    obs = torch.randn(8, 6)
    allowed = torch.ones(8, 5, dtype=torch.bool)
    allowed[2, 1:4] = False
    allowed[5, 0] = False
    actions = torch.tensor([0, 3, 4, 2, 1, 4, 2, 3])
    return SimpleNamespace(net=net, opt=torch.optim.Adam(net.parameters(), lr=1e-2), obs=obs, allowed=allowed, actions=actions)


def run(s=None):
    s = s or build()
    adv = torch.linspace(-1, 1, 8)
    old = torch.full((8,), -1.6)
    for _ in range(3):
        loss = surrogate(s.net(s.obs), s.allowed, s.actions, old, adv)
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
