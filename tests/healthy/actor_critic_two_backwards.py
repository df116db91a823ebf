"""Actor and critic share a trunk: two losses are sent back one after the other through the same graph with retain_graph."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "two backward passes through one graph, the second adds to gradients that are already there"


def build():
    torch.manual_seed(226)
    trunk, pi, v = nn.Linear(7, 16), nn.Linear(16, 4), nn.Linear(16, 1)
    opt_pi = torch.optim.Adam([*trunk.parameters(), *pi.parameters()], lr=1e-3)
    opt_v = torch.optim.Adam(v.parameters(), lr=1e-2)
    return SimpleNamespace(trunk=trunk, pi=pi, v=v, opt_pi=opt_pi, opt_v=opt_v, obs=torch.randn(9, 7), act=torch.randint(0, 4, (9,)))


def run(s=None):
    s = s or build()
    returns = torch.linspace(-3, 5, 9)
    for _ in range(3):
        h = torch.tanh(s.trunk(s.obs))
        value = s.v(h).squeeze(-1)
        adv = (returns - value).detach()
        policy_loss = nn.functional.cross_entropy(s.pi(h), s.act, reduction="none").mul(adv).mean()
        value_loss = nn.functional.smooth_l1_loss(value, returns)
        s.opt_pi.zero_grad()
        s.opt_v.zero_grad()
        value_loss.backward(retain_graph=True)
        policy_loss.backward()
        s.opt_pi.step()
        s.opt_v.step()
    return policy_loss + value_loss
