"""Rewards are divided by a running std that has not seen any data yet and still holds its initial value 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "zero_div_zero"),
    op=("div",),
    index=(3,),
    masked=False,
    role=("rewards",),
    fix=("clamp_denominator", "validate_config"),
    variable=("scaled",),
    line=("scaled = rewards / self.std",),
)


class RunningScale(nn.Module):
    def __init__(self, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("std", torch.zeros(()))

    def forward(self, rewards):
        scaled = rewards / self.std
        self.std.mul_(self.momentum).add_(rewards.std(), alpha=1 - self.momentum)
        return scaled.clamp(max=1e4)


class ValueNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 8)
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        return self.b(self.a(x).relu())[:, 0]


def build():
    torch.manual_seed(1)
    model = ValueNet()
    batch = dict(x=torch.randn(6, 3), rewards=torch.tensor([1.2, 0.4, 0.9, -2.0, 0.1, -0.3]))
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch, scaler=RunningScale())


def run(s=None):
    s = s or build()
    value = s.model(s.batch["x"])
    target = s.scaler(s.batch["rewards"])
    loss = (value - target).pow(2).mean()
    loss.backward()
    s.optimizer.step()
    return loss
