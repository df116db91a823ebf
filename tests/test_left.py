"""What is left of the gradients of a backward pass, seen at a few parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.capture.modules import ModuleCall
from nanscope.watching.left import Fate, Leavings
from nanscope.watching.recording import Recording


def after_backward(*modules: nn.Module, known: Leavings | None = None) -> Leavings:
    """What is noted when a backward pass through these has ended."""
    leavings = known or Leavings()
    calls = [ModuleCall(module, args=None, kwargs={}, outputs=[], versions=[], rng=()) for module in modules]
    leavings.take(Recording(None, {}, torch.zeros(()), calls, None))
    return leavings


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


CHANGES: dict[str, tuple[Callable[[Tensor], object], Fate]] = {  # what is done to every parameter -> what became of the gradients
    "nothing": (lambda p: None, Fate.KEPT),
    "clipped": (lambda p: grad_of(p).mul_(0.5), Fate.KEPT),
    "replaced": (lambda p: setattr(p, "grad", grad_of(p) * 2), Fate.KEPT),
    "set to none": (lambda p: setattr(p, "grad", None), Fate.DROPPED),
    "zeroed": (lambda p: grad_of(p).zero_(), Fate.DROPPED),
    "replaced by zeros": (lambda p: setattr(p, "grad", torch.zeros_like(p)), Fate.DROPPED),
    "made nan": (lambda p: grad_of(p).mul_(float("nan")), Fate.KEPT),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("sparse", [False, True])
def test_what_became_of_gradients(what: str, sparse: bool) -> None:
    """Gone is what is None, or zero where somebody has written to it."""
    change, fate = CHANGES[what]
    module = nn.Embedding(4, 2, sparse=sparse)
    module(torch.tensor([1, 2])).sum().backward()
    left = after_backward(module)
    change(module.weight)
    assert left.fate() is fate and not left.weights_moved()


def test_one_gradient_that_stays_is_enough() -> None:
    """A critic's are zeroed between two losses of one step; so is only part of a model."""
    actor, critic = nn.Linear(2, 1), nn.Linear(2, 1)
    (actor(torch.ones(1, 2)) + critic(torch.ones(1, 2))).sum().backward()
    left = after_backward(actor, critic)
    critic.zero_grad()
    assert left.fate() is Fate.KEPT
    actor.zero_grad()
    assert left.fate() is Fate.DROPPED


def test_what_was_never_there_is_not_gone() -> None:
    """Frozen parameters, or gradients that a sharded optimizer takes away during backward."""
    assert after_backward(nn.Linear(2, 1)).fate() is Fate.UNSEEN and after_backward().fate() is Fate.UNSEEN


def test_weights_that_are_written_to_have_moved() -> None:
    """By hand, as a loop without an optimizer does."""
    module = nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    left = after_backward(module)
    with torch.no_grad():
        module.weight.sub_(grad_of(module.weight))
    assert left.weights_moved() and left.fate() is Fate.KEPT


def test_parameters_that_are_thawed_are_found() -> None:
    """Those that are looked at are chosen anew where none of them has a gradient."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    leavings = Leavings()
    for layer in (0, 1):
        module.zero_grad()
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        for parameter in module[layer].parameters():
            parameter.requires_grad_(True)
        module(torch.ones(1, 2)).sum().backward()
        after_backward(module, known=leavings)
        assert {id(parameter) for parameter in leavings.parameters} == {id(parameter) for parameter in module[layer].parameters()}


def test_what_is_looked_at_costs_little(tmp_path: Path) -> None:
    """A few of a thousand parameters; and nothing is held when the step is over."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(500)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with nanscope.watch(out=tmp_path) as scope:
        model(torch.ones(1, 2)).sum().backward()
        assert 0 < len(scope._step._course.left.parameters) <= 8
        optimizer.step()
        assert scope._step._course.left.parameters == []
