"""States are embedded in a Poincaré ball, and the distance of two is acosh(1 + …). One state is its own goal: acosh(1) is 0, and its derivative
is infinite.

A bound a little above 1 heals; a mask on the distance, or a where, comes too late for backward.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad", "outside_domain"),
    op=("acosh",),
    index=(1,),
    masked=None,
    role=("hidden", "loss", "values", "rewards"),
    fix=("clamp_input", "avoid_singular_op"),
    variable=("distance",),
    line=("distance = torch.acosh(1 + 2 * apart / (room_of_states * room_of_goals))",),
)


def build():
    torch.manual_seed(144)
    embed = nn.Embedding(7, 2)
    with torch.no_grad():
        embed.weight.mul_(0.2)
    states, goals = torch.tensor([0, 3, 4, 6]), torch.tensor([5, 3, 1, 2])
    return SimpleNamespace(model=embed, states=states, goals=goals, optimizer=torch.optim.SGD(embed.parameters(), lr=0.01))


def run(s=None):
    s = s or build()
    here, there = s.model(s.states), s.model(s.goals)
    apart = (here - there).square().sum(-1)
    room_of_states, room_of_goals = 1 - here.square().sum(-1), 1 - there.square().sum(-1)
    distance = torch.acosh(1 + 2 * apart / (room_of_states * room_of_goals))
    loss = distance.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
