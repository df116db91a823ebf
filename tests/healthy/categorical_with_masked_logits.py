"""torch.distributions.Categorical on logits with -inf entries: log_prob of taken actions and entropy are both well defined."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.distributions import Categorical

HEALTHY = "entropy of a distribution with impossible actions, which the library clamps before it multiplies"


def build():
    torch.manual_seed(207)
    net = nn.Linear(4, 8)
    forbidden = torch.zeros(6, 8, dtype=torch.bool)
    forbidden[1, 2:5] = True
    forbidden[4, 0] = True
    return SimpleNamespace(net=net, forbidden=forbidden, obs=torch.randn(6, 4), optimizer=torch.optim.Adam(net.parameters(), lr=1e-2))


def run(s=None):
    s = s or build()
    for step in range(4):
        dist = Categorical(logits=s.net(s.obs).masked_fill(s.forbidden, -float("inf")))
        torch.manual_seed(step)
        act = dist.sample()
        reward = (act % 3).float()
        loss = -(dist.log_prob(act) * (reward - reward.mean())).mean() - 1e-2 * dist.entropy().mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss
