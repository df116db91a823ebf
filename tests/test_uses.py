"""What a loss does with a tensor tells what it is, whatever it is called: these have names that say nothing, or another thing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recorded import record
from torch import Tensor

from nanscope.locate.names import Names
from nanscope.locate.uses import Uses
from nanscope.roles import Role

SHAPE = (2, 3)


def ppo(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    r = torch.exp(a - b)
    return -torch.min(r * c, r.clamp(0.8, 1.2) * c).mean()


def penalty(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    d = (b - a).clamp(-10, 10)
    return ((torch.exp(d) - d - 1) * c).mean()


def sequences(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    d = (a - b.unsqueeze(0).squeeze(0)).sum(-1) / 3
    return (torch.exp(d) * c[:, 0]).mean()


def grouped(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    normal = (b - b.mean(-1, keepdim=True)) / (b.std(-1, keepdim=True) + 1e-4)
    return -(torch.exp(a - a.detach()) * normal * c).mean()


def plain(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return ((a - b).square() * c).mean()


ROLES: tuple[tuple[Callable[..., Tensor], tuple[Role | None, Role | None, Role | None]], ...] = (
    (ppo, (Role.LOG_PROBS, Role.OLD_LOG_PROBS, Role.ADVANTAGES)),
    (penalty, (Role.LOG_PROBS, Role.REF_LOG_PROBS, None)),
    (sequences, (Role.LOG_PROBS, Role.OLD_LOG_PROBS, Role.ADVANTAGES)),
    (grouped, (Role.LOG_PROBS, Role.REWARDS, None)),
    (plain, (None, None, None)),
)


def tensors() -> list[Tensor]:
    return [torch.randn(SHAPE).requires_grad_(), torch.randn(SHAPE), torch.randn(SHAPE)]


@pytest.mark.parametrize(("loss", "roles"), ROLES, ids=[loss.__name__ for loss, _ in ROLES])
def test_what_is_done_with_a_tensor_says_what_it_is(loss: Callable[..., Tensor], roles: tuple[Role | None, ...]) -> None:
    """The one that carries the gradient is the policy's; what is taken from it before exp another one's; what weighs a ratio an advantage."""
    program = record(loss, *tensors()).program
    uses = Uses(program)
    found = {leaf.name: uses.role(leaf.id) for leaf in program.leaves}
    assert [found[name] for name in "abc"] == list(roles)


def test_a_name_that_does_not_say_whose_they_are_gives_way() -> None:
    """Two tensors called log-probs: the loss knows which are which. One that says so is believed."""

    def loss(logprobs: Tensor, logps: Tensor, ref_logps: Tensor) -> Tensor:
        d = ref_logps - logprobs
        return (torch.exp(logprobs - logps) + torch.exp(d) - d - 1).mean()

    program = record(loss, *tensors()).program
    names = Names(program)
    found = {leaf.name: names.role(leaf.id) for leaf in program.leaves}
    assert found == {"logprobs": Role.LOG_PROBS, "logps": Role.OLD_LOG_PROBS, "ref_logps": Role.REF_LOG_PROBS}


def test_what_says_where_from_is_not_what_is_moved() -> None:
    """The selection is no advantage because what it selects weighs a ratio."""

    def loss(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        chosen = d > 0
        return (torch.exp(a - b)[chosen] * c[chosen]).mean()

    program = record(loss, *tensors(), torch.ones(SHAPE)).program
    assert {leaf.name: Uses(program).role(leaf.id) for leaf in program.leaves}["d"] is None
