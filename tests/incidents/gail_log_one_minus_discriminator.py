"""GAIL trains its discriminator with log(1 − D) on the policy's samples, D a sigmoid: where the discriminator is sure, D is 1 and that is log 0.

logsigmoid(−logit) heals. Clamping D heals forward and takes the gradient of exactly the sample that the discriminator has wrong.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(4,),
    masked=False,
    role=("loss", "rewards", "advantages", "log_probs"),
    fix=("stable_function",),
    variable=("on_policy",),
    line=("on_policy = torch.log(1.0 - judged)",),
)


def build():
    torch.manual_seed(13)
    discriminator = nn.Linear(5, 1)
    expert, sampled = torch.randn(6, 5), torch.randn(6, 5)
    with torch.no_grad():
        discriminator.weight[0] = torch.tensor([3.0, 0.5, 0.1, -0.2, 0.3])
    expert[:, 0].clamp_(-1.0, 1.0)
    sampled[:, 0].clamp_(-1.0, 1.0)
    sampled[4, 0] = 11.0
    return SimpleNamespace(
        model=discriminator, expert=expert, sampled=sampled, optimizer=torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    )


def run(s=None):
    s = s or build()
    judged = torch.sigmoid(s.model(s.sampled)).squeeze(-1)
    on_policy = torch.log(1.0 - judged)
    of_expert = nn.functional.logsigmoid(s.model(s.expert)).squeeze(-1)
    loss = -(of_expert.mean() + on_policy.mean())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
