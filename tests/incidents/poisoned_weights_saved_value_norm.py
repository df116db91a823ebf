"""The resumed critic comes from a checkpoint of a run that had diverged: one element of its output gain is NaN before
the first step.
"""

import io
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("poisoned_weights",),
    op=("mul", "previous_step"),
    index=(0, 0, 3),
    masked=None,
    role=("weights", "hidden"),
    fix=("fix_upstream", "skip_bad_step", "reload_checkpoint"),
    variable=("gain.scale",),
    line=("return self.scale * x",),
)


class Gain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.scale * x


class Critic(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inp = nn.Linear(5, width)
        self.gain = Gain(width)
        self.out = nn.Linear(width, 1)

    def forward(self, obs):
        return self.out(self.gain(torch.tanh(self.inp(obs)))).squeeze(-1)


def diverged_checkpoint():
    critic = Critic()
    critic.gain.scale.data[3] = torch.nan
    blob = io.BytesIO()
    torch.save(critic.state_dict(), blob)
    blob.seek(0)
    return blob


def build():
    torch.manual_seed(125)
    critic = Critic()
    critic.load_state_dict(torch.load(diverged_checkpoint(), weights_only=True))
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-4)
    batch = [(torch.randn(2, 6, 5), torch.randn(2, 6)) for _ in range(3)]
    return SimpleNamespace(model=critic, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    for obs, target in s.batch:
        s.optimizer.zero_grad()
        value_loss = nn.functional.mse_loss(s.model(obs), target)
        value_loss.backward()
        s.optimizer.step()
    return value_loss
