"""One answer of a large group earned a jackpot: its normalised advantage is about 30, those of all others about -0.03."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "an advantage of 30 standard deviations on one response of 1024"


def build():
    torch.manual_seed(310)
    policy = nn.Linear(6, 8)
    obs = torch.randn(1024, 6)
    reward = 0.01 * torch.randn(1024)
    reward[617] = 400.0
    return SimpleNamespace(policy=policy, obs=obs, reward=reward, opt=torch.optim.AdamW(policy.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    adv = (s.reward - s.reward.mean()) / (s.reward.std() + 1e-8)
    act = torch.arange(1024) % 8
    old = None
    for _ in range(4):
        lp = s.policy(s.obs).log_softmax(-1).gather(1, act[:, None]).squeeze(1)
        old = lp.detach() if old is None else old
        ratio = (lp - old).exp()
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
