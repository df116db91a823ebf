"""A value normaliser divides its moving averages by 1 - decay ** step; the critic's cast to bfloat16 rounds the decay 0.9999 to 1: 0 / 0.
https://github.com/SlopDotCash/asi/pull/480

The averages never move (1 - decay is 0) and the correction is 0 as well.
Heals: keep the buffers of the normaliser in float32, or floor the correction. Does not: the epsilon that is already under the root.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div",),
    index=(0,),
    masked=None,
    role=("rewards", "advantages", "loss"),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator"),
    variable=("mean",),
    line=("mean = self.mean / correction",),
)


class ReturnNorm(nn.Module):
    """Moving moments of the returns, one pair for each value head."""

    def __init__(self, heads, decay=0.9999, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("decay", torch.tensor(decay))
        self.register_buffer("mean", torch.zeros(heads))
        self.register_buffer("mean_sq", torch.zeros(heads))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update(self, returns, mask):
        count = mask.sum()
        rate = 1 - self.decay
        self.mean.mul_(self.decay).add_(rate * (returns * mask).sum((0, 1)) / count)
        self.mean_sq.mul_(self.decay).add_(rate * (returns.square() * mask).sum((0, 1)) / count)
        self.step += 1

    def moments(self):
        correction = 1 - self.decay**self.step
        mean = self.mean / correction
        var = self.mean_sq / correction - mean.square()
        return mean, torch.sqrt(var.clamp(min=0.0) + self.eps)


class Critic(nn.Module):
    def __init__(self, vocab=17, width=12, heads=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.value_head = nn.Linear(width, heads)
        self.norm = ReturnNorm(heads)

    def forward(self, ids):
        return self.value_head(self.mlp(self.emb(ids)))


def build():
    torch.manual_seed(480)
    critic = Critic().to(torch.bfloat16)
    batches = []
    for _ in range(2):
        mask = torch.ones(4, 8, 1)
        mask[1, 6:] = 0
        mask[3, 3:] = 0
        task = (torch.rand(4, 1, 1) > 0.5).float().expand(4, 8, 1)  # correctness
        length = -torch.arange(8).view(1, 8, 1).expand(4, 8, 1) / 40.0  # length cost
        batches.append(dict(ids=torch.randint(0, 17, (4, 8)), mask=mask, returns=torch.cat([task, length], -1)))
    return SimpleNamespace(model=critic, optimizer=torch.optim.AdamW(critic.parameters(), lr=1e-4), batch=batches, clip=0.5)


def run(s=None):
    s = s or build()
    for b in s.batch:
        returns = b["returns"].to(torch.bfloat16)
        s.model.norm.update(returns, b["mask"].to(torch.bfloat16))
        mean, std = s.model.norm.moments()
        targets = (returns - mean) / std
        with torch.no_grad():
            old_values = s.model(b["ids"])
        values = s.model(b["ids"])
        clipped = old_values + (values - old_values).clamp(-s.clip, s.clip)
        error = torch.max((values - targets).float().square(), (clipped - targets).float().square())
        loss = 0.5 * (error * b["mask"]).sum() / (b["mask"].sum() * 2)
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss
