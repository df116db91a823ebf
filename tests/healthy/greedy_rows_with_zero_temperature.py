"""Sampling parameters per request: greedy rows have temperature 0, their scaled logits are inf and NaN and are replaced by argmax."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "logits / 0 gives inf and 0/0 gives NaN in the sampler, and the greedy rows take the argmax of the raw logits"


def build():
    torch.manual_seed(302)
    policy = nn.Linear(5, 7)
    with torch.no_grad():
        policy.weight[3] = 0.0
        policy.bias[3] = 0.0
    temperature = torch.tensor([1.0, 0.0, 0.7, 0.0])
    return SimpleNamespace(
        policy=policy, temperature=temperature, obs=torch.randn(4, 5), opt=torch.optim.Adam(policy.parameters(), lr=1e-2)
    )


def choose(logits, temperature, generator):
    scaled = logits / temperature[:, None]
    greedy = logits.argmax(-1)
    noise = torch.empty_like(logits).exponential_(generator=generator)
    randomly = (scaled.softmax(-1) / noise).nan_to_num(nan=-1.0).argmax(-1)
    return torch.where(temperature < 1e-5, greedy, randomly)


def run(s=None):
    s = s or build()
    gen = torch.Generator().manual_seed(4)
    for _ in range(4):
        logits = s.policy(s.obs)
        act = choose(logits.detach(), s.temperature, gen)
        adv = act.float() - act.float().mean()
        loss = (nn.functional.cross_entropy(logits, act, reduction="none") * adv).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
