"""A policy over a truncated normal draws by its inverse distribution function, erfinv(2u − 1); far in the tail the upper bound of u rounds
to a little more than 1.

A clamp of the argument to the open interval heals; a clamp of what is drawn does not.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("outside_domain",),
    op=("erfinv",),
    index=(3, 1),
    masked=False,
    role=("loss",),
    fix=("clamp_input",),
    variable=("noise",),
    line=("noise = torch.erfinv(argument)",),
)


def build():
    torch.manual_seed(2)
    return SimpleNamespace(model=nn.Linear(4, 2), states=torch.randn(5, 4), uniform=torch.rand(5, 2))


def run(s=None):
    s = s or build()
    mean = s.model(s.states)
    uniform = s.uniform.clone()
    uniform[3, 1] = 1.0000002
    argument = 2 * uniform - 1 + 0 * mean
    noise = torch.erfinv(argument)
    action = mean + 0.5 * noise
    loss = action.square().mean()
    loss.backward()
    return loss
