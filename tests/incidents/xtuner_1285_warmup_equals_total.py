"""Cosine schedule with warmup for SFT, the learning rate kept in a tensor for a compiled optimizer step (xtuner's trainer).

warmup_steps was set to the total number of steps ("deemed valid"). The cosine branch divides (step - warmup) by (total - warmup): at step == total that is 0/0.
With plain numbers Python raises; with tensors the rate silently becomes NaN and the one step that the packed data set has more than estimated writes NaN to all weights.
Source: https://github.com/InternLM/xtuner/pull/1285
Heals: checking warmup < total when the trainer is built, max(total - warmup, 1).  Does not: clipping gradients (they are fine), a smaller base rate.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(),
    masked=None,
    role=("optimizer",),
    fix=("validate_config", "clamp_denominator", "where_on_detached"),
    variable=("progress",),
    line=("progress = (step - self.warmup) / (self.total - self.warmup)",),
)


class CosineWithWarmup:
    """Writes the rate of the coming step into the lr tensor of each group."""

    def __init__(self, optimizer, warmup_steps, total_steps, lr_min_ratio=0.1):
        self.optimizer = optimizer
        self.warmup = torch.tensor(float(warmup_steps))
        self.total = torch.tensor(float(total_steps))
        self.lr_min_ratio = lr_min_ratio
        self.base = [g["lr"].clone() for g in optimizer.param_groups]
        self.count = 0

    def factor(self):
        step = torch.tensor(float(self.count))
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = (step - self.warmup) / (self.total - self.warmup)
        cosine = 0.5 * (1.0 + torch.cos(math.pi * progress))
        return self.lr_min_ratio + (1 - self.lr_min_ratio) * cosine

    def step(self):
        factor = self.factor()
        for base, group in zip(self.base, self.optimizer.param_groups):
            group["lr"].copy_(base * factor)
        self.count += 1


class SGDM(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": torch.tensor(lr), "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buf = self.state[p].setdefault("buf", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                p.sub_(group["lr"] * buf)


def build():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(24, 12), nn.RMSNorm(12), nn.Linear(12, 24))
    optimizer = SGDM(model.parameters(), lr=0.05)
    scheduler = CosineWithWarmup(optimizer, warmup_steps=3, total_steps=3)
    batches = [{"input_ids": torch.randint(0, 24, (2, 9))} for _ in range(4)]
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, batch=batches)


def run(s=None):
    s = s or build()
    for batch in s.batch:
        ids = batch["input_ids"]
        logits = s.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.scheduler.step()
        s.optimizer.step()
    return loss.item(), s.model[2].weight.detach().isnan().any().item()


if __name__ == "__main__":
    print(run())
