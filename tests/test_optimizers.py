"""What the optimizers of a run are called, where there are several."""

from __future__ import annotations

import torch
from torch import nn

from nanscope.watching.optimizers import Optimizers


class Critic(nn.Linear):
    """A value function."""


class Both(nn.Module):
    """A wrapper of two, as many agents are."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(3, 1), Critic(3, 1)


def test_an_optimizer_is_called_after_the_smallest_module_that_it_updates() -> None:
    """A wrapper holds the parameters, too; one that nobody saw has no owner to name."""
    agent, alone = Both(), nn.Parameter(torch.ones(1))
    sgd, adam = torch.optim.SGD(agent.critic.parameters()), torch.optim.Adam([alone])
    known = Optimizers()
    known.add(sgd, (agent, agent.critic, agent.actor))
    assert known.any and known.name(sgd) is None, "one alone needs no name"
    known.add(adam, (agent,))
    assert (known.name(sgd), known.name(adam), known.name(None)) == ("SGD of Critic", "Adam", None)


def test_two_of_one_name_are_numbered() -> None:
    """In the order in which they first stepped."""
    models = [nn.Linear(3, 1) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    known = Optimizers()
    for optimizer in (*optimizers, *optimizers):
        known.add(optimizer, models)
    assert [known.name(optimizer) for optimizer in optimizers] == ["SGD of Linear", "SGD of Linear #2", "SGD of Linear #3"]


def test_which_models_are_updated_is_known_when_the_optimizer_is_gone() -> None:
    """Loops make one for every step, and the model has none between two."""
    mine, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, known = torch.optim.SGD(mine.parameters()), Optimizers()
    assert known.without([mine, other]) == [mine, other]
    known.add(optimizer, ())
    assert known.without([mine, other]) == [other]
    del optimizer
    assert known.without([mine, other]) == [other]


def test_whose_a_parameter_is() -> None:
    """Of those that were seen to step; one that is gone is none."""
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters())
    known = Optimizers()
    assert known.of(model.parameters()) is None
    known.add(optimizer, ())
    assert known.of(model.parameters()) is optimizer and known.of(other.parameters()) is None
    del optimizer
    assert known.of(model.parameters()) is None and known.any
