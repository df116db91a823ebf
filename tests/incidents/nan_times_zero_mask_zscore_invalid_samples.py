"""Samples whose judge failed carry a negative variance estimate; sqrt makes NaN for them and the validity mask is
applied as a factor at the end."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("nan_times_zero_mask", "sqrt_negative"),
    op=("sqrt",),
    index=(5,),
    masked=True,
    role=("rewards", "advantages", "loss"),
    fix=("mask_before_op", "clamp_input"),
    variable=("spread",),
    line=("spread = torch.sqrt(variance)",),
)


class Scorer(nn.Module):
    """Reward model head regressed on judge scores of unequal certainty."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 1)])

    def forward(self, h):
        return self.layers[1](torch.relu(self.layers[0](h))).flatten()


class WeightedRegression(nn.Module):
    def forward(self, prediction, *, judged, variance, ok):
        spread = torch.sqrt(variance)
        z = (prediction - judged) / (spread + 0.1)
        return (z.abs() * ok.to(z.dtype)).sum() / ok.sum()


def build():
    torch.manual_seed(12)
    model = Scorer()
    variance = torch.rand(9) + 0.2
    ok = torch.ones(9, dtype=torch.bool)
    for bad in (5, 7):
        variance[bad] = -1.0
        ok[bad] = False
    batch = dict(h=torch.randn(9, 8), judged=torch.randn(9), variance=variance, ok=ok)
    return SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batch=batch, criterion=WeightedRegression()
    )


def run(s=None):
    s = s or build()
    inputs = dict(s.batch)
    loss = s.criterion(s.model(inputs.pop("h")), **inputs)
    loss.backward()
    s.optimizer.step()
    return loss
