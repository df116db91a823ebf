"""The reward model standardises its pooled features over the batch; on the last, ragged batch of one sample the
unbiased variance is NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("var",),
    index=(0,),
    masked=False,
    role=("hidden",),
    fix=("guard_small_group",),
    variable=("variance",),
    line=("variance = z.var(dim=0)",),
)


class BatchStandardise(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, z):
        variance = z.var(dim=0)
        return (z - z.mean(dim=0)) * torch.rsqrt(variance + 1e-5) * self.gain + self.shift


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(9, 6)
        self.norm = BatchStandardise(6)
        self.head = nn.Linear(6, 1)

    def forward(self, tokens):
        pooled = torch.tanh(self.encoder(tokens)).mean(dim=1)
        return self.head(self.norm(pooled)).squeeze(-1)


def build():
    torch.manual_seed(100)
    model = RewardModel()
    batch = dict(tokens=torch.randn(5, 4, 9), score=torch.randn(5))
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), batch=batch, batch_size=2)


def run(s=None):
    s = s or build()
    for at in range(0, 5, s.batch_size):
        x, y = s.batch["tokens"][at : at + s.batch_size], s.batch["score"][at : at + s.batch_size]
        s.optimizer.zero_grad()
        loss = nn.functional.mse_loss(s.model(x), y)
        loss.backward()
        s.optimizer.step()
    return loss
