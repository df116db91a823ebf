"""Advantages use a reward mean averaged over workers; the worker that got no prompts contributes the mean of nothing
and spoils all of them.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("allreduce_nan", "empty_mask_mean", "zero_div_zero"),
    op=("mean",),
    index=(),
    masked=None,
    role=("rewards", "advantages"),
    fix=("guard_empty", "clamp_denominator", "drop_invalid_sample"),
    variable=(None,),
    line=("means = workers.all_reduce([r.mean() for r in rewards])",),
)


class Workers:
    """Stands in for a process group: one entry per worker."""

    def __init__(self, count):
        self.count = count

    def all_reduce(self, values):
        total = torch.stack(values).sum(dim=0)
        return [total.clone() for _ in range(self.count)]


def global_advantages(workers, rewards):
    means = workers.all_reduce([r.mean() for r in rewards])
    return [r - m / workers.count for r, m in zip(rewards, means, strict=True)]


def build():
    torch.manual_seed(135)
    policy = nn.Sequential(nn.Embedding(18, 6), nn.LayerNorm(6), nn.Linear(6, 18))
    sizes = (3, 4, 0, 2)
    ids = [torch.randint(0, 18, (n, 5)) for n in sizes]
    rewards = [torch.rand(n) for n in sizes]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    return SimpleNamespace(model=policy, optimizer=optimizer, workers=Workers(len(sizes)), batch=(ids, rewards))


def run(s=None):
    s = s or build()
    ids, rewards = s.batch
    advantages = torch.cat(global_advantages(s.workers, rewards))
    flat = torch.cat(ids)
    logp = s.model(flat[:, :-1]).log_softmax(-1).gather(-1, flat[:, 1:, None])[..., 0]
    loss = -(advantages[:, None] * torch.exp(logp - logp.detach())).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
