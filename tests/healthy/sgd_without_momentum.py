"""The plainest loop there is: SGD without momentum, REINFORCE with a moving baseline."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the optimizer has no state at all, and the loss changes its sign and size from step to step"


def build():
    torch.manual_seed(229)
    policy = nn.Linear(4, 3)
    return SimpleNamespace(policy=policy, opt=torch.optim.SGD(policy.parameters(), lr=0.1), obs=torch.randn(12, 4))


def run(s=None):
    s = s or build()
    baseline = 0.0
    gen = torch.Generator().manual_seed(5)
    for _ in range(6):
        logp = s.policy(s.obs).log_softmax(-1)
        with torch.no_grad():
            act = torch.multinomial(logp.exp(), 1, generator=gen)
        reward = 5.0 - act.float().squeeze(1) * 4
        loss = (logp.gather(1, act).squeeze(1) * (baseline - reward)).mean()
        baseline = 0.9 * baseline + 0.1 * reward.mean().item()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
