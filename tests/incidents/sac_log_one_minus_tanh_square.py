"""SAC corrects the density of a squashed action by log(1 − tanh(u)²): for an action at its limit tanh is 1 in float32, and that is log 0.

2 · (log 2 − u − softplus(−2u)) is the same number for every u; an epsilon within the logarithm heals, too, and bounds the correction.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(2, 1),
    masked=False,
    role=("log_probs",),
    fix=("stable_function", "clamp_input"),
    variable=("correction",),
    line=("correction = torch.log(1 - action.pow(2))",),
)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(4, 2)

    def forward(self, state):
        return self.mean(state)


def log_prob(mean, std, noise):
    raw = mean + std * noise
    action = torch.tanh(raw)
    correction = torch.log(1 - action.pow(2))
    return (-0.5 * noise.square() - correction).sum(-1)


def build():
    torch.manual_seed(5)
    actor = Actor()
    state = torch.randn(5, 4)
    with torch.no_grad():
        actor.mean.weight.mul_(0.5)
        actor.mean.weight[1] = torch.tensor([2.0, 0.0, 0.0, 0.0])
    state[:, 0].clamp_(-1.0, 1.0)
    state[2, 0] = 7.0  # an observation that was never normalised
    return SimpleNamespace(model=actor, optimizer=torch.optim.Adam(actor.parameters(), lr=3e-4), state=state, noise=0.3 * torch.randn(5, 2))


def run(s=None):
    s = s or build()
    entropy_loss = log_prob(s.model(s.state), 0.2, s.noise).mean()
    s.optimizer.zero_grad()
    entropy_loss.backward()
    s.optimizer.step()
    return entropy_loss
