"""Finished backward passes on the account: the oldest are let go of, and what could not be looked at any more is said."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope

BATCH = 64 << 10  # bytes of the data of one micro-batch


def micro_batch(weight: Tensor, scale: float = 1.0) -> Tensor:
    return (torch.randn(64, 256) * scale @ weight).square().mean()


@pytest.mark.parametrize("steps", [False, True], ids=["no optimizer", "accumulated"])
def test_the_budget_holds_for_what_is_over(steps: bool, tmp_path: Path) -> None:
    """Backward passes without end, or 60 before one step: what is held of them stays within the budget."""
    weight = torch.zeros(256, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 1e-3)
    budget = 10 * BATCH
    with nanscope.watch(out=tmp_path, budget=budget) as scope:
        alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        for _ in range(60):
            batch = torch.randn(64, 256)
            alive.add(batch)
            (batch @ weight).square().mean().backward()
            del batch
            assert scope._tape.held <= budget
            assert len(alive) <= 11
        if steps:
            optimizer.step()
            optimizer.zero_grad()
    assert scope.verdict.healthy and scope._tape.account.held == 0
    written = json.loads((scope.out / "run.json").read_text(encoding="utf-8"))
    assert written["budget"] == budget and 0 < written["held_peak"] <= budget


def test_a_bad_micro_batch_is_found_however_many_follow(tmp_path: Path) -> None:
    """What is let go of has been looked at: the fourth of sixty is the one that is saved, with its number."""
    weight = torch.ones(256, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 1e-3)
    with nanscope.watch(out=tmp_path, budget=10 * BATCH) as scope:
        for number in range(60):
            loss = micro_batch(weight)
            (loss / 0 if number == 3 else loss).backward()
        optimizer.step()
    assert scope.verdict.incidents and scope.snapshots[0].part == 4


def test_gradients_whose_backward_pass_was_let_go_of_are_said_not_to_be_explained(tmp_path: Path) -> None:
    """Every loss was finite, a gradient is not, and the first backward passes are not held any more: the verdict says so."""
    weight = torch.ones(256, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 1e-3)

    def spoil(leaf: Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.fill_(float("nan"))

    with nanscope.watch(out=tmp_path, budget=10 * BATCH) as scope:
        for _ in range(30):
            micro_batch(weight).backward()
        weight.register_post_accumulate_grad_hook(spoil)
        micro_batch(weight).backward()
        optimizer.step()
    assert [gap.slug for gap in scope.verdict.gaps] == ["not-held"]
    assert not scope.verdict.healthy


def test_nothing_of_a_step_is_held_once_it_is_closed(tmp_path: Path) -> None:
    """After the optimizer has stepped, what the loss was made of is the trainer's alone."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            given = torch.randn(4, 8, requires_grad=True)
            hidden = model(given)
            alive = [weakref.ref(given), weakref.ref(hidden)]
            hidden.exp().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            del given, hidden
        assert not any(known() is not None for known in alive)
        assert not scope._step._recordings


def test_nothing_is_held_after_the_block_whatever_raised(tmp_path: Path) -> None:
    """A backward pass that raises holds nothing beyond the block."""
    model = nn.Linear(8, 8)

    def refuse(gradient: Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), nanscope.watch(out=tmp_path) as scope:
        hidden = model(torch.randn(4, 8))
        alive = weakref.ref(hidden)
        hidden.register_hook(refuse)
        hidden.exp().mean().backward()
    del hidden
    gc.collect()
    assert alive() is None and scope._tape.account.held == 0


def test_calls_of_modules_are_on_the_account(tmp_path: Path) -> None:
    """Arguments of a model that is called many times before a backward pass: the newest are held, within the budget."""
    model = nn.Linear(1024, 1)
    total = torch.zeros(())
    with nanscope.watch(out=tmp_path, budget=1 << 20) as scope:
        for _ in range(40):
            total = total + model(torch.randn(32, 1024)).square().mean()
            assert scope._tape.held <= 1 << 20
        calls = scope._modules.calls
        assert calls[-1].args is not None and calls[0].args is None
        total.backward()
    assert scope.verdict.healthy


def test_calls_that_nobody_will_differentiate_are_let_go_of(tmp_path: Path) -> None:
    """Evaluation with gradients enabled: the activations of a few batches are alive, not those of all."""
    model = nn.Linear(8, 8)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(60):
            given = torch.randn(4, 8, requires_grad=True)
            alive.add(given)
            float((model(given) * 2).exp().mean().detach())
        del given
        gc.collect()
        assert len(alive) <= 6 and len(scope._modules.calls) <= 6


def test_programs_of_any_length_leave_a_bounded_number_of_plans(tmp_path: Path) -> None:
    """Each length of a sequence is a program of its own."""
    weight = torch.zeros(1, requires_grad=True)
    with nanscope.watch(out=tmp_path) as scope:
        for length in range(150):
            loss = (weight * 2).exp()
            for _ in range(length):
                loss = loss + 1
            loss.sum().backward()
        assert len(scope._step._outlook._gauge._dials) <= 64


Losses = Callable[[], tuple[Tensor, Tensor]]


class Trunk(nn.Module):
    """Two heads on one body, as an actor-critic has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return hidden * 2, hidden.sum(-1)


def separate() -> tuple[Tensor, Tensor]:
    one, two = nn.Linear(4, 1), nn.Linear(4, 1)
    return one(torch.randn(6, 4)).mean(), torch.log(two(torch.randn(6, 4)).square().mean() * 0)


def chained() -> tuple[Tensor, Tensor]:
    """The model of the second loss has run, and its loss is computed when the first is over."""
    one, two, three = nn.Linear(4, 1), nn.Linear(4, 4), nn.Linear(4, 1)
    out = three(two(torch.randn(6, 4)) * 0).square()
    return one(torch.randn(6, 4)).mean(), torch.log(out.mean() * 0)


def shared() -> tuple[Tensor, Tensor]:
    policy, value = Trunk()(torch.randn(6, 4))
    return policy.mean(), torch.log(value.square().mean() * 0)


LOSSES: dict[str, tuple[Losses, bool]] = {
    "of two models": (separate, False),
    "of several": (chained, False),
    "of one model": (shared, True),
}


@pytest.mark.parametrize("stepped", [False, True], ids=["two backward passes", "two optimizers"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_waits_for_its_backward_pass_keeps_its_record(name: str, stepped: bool, tmp_path: Path) -> None:
    """Another loss is differentiated, and stepped on, before it: it is explained as if it were alone."""
    make, retain = LOSSES[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    with nanscope.watch(out=tmp_path) as scope:
        first, second = make()
        first.backward(retain_graph=retain)
        if stepped:
            optimizer.step()
        second.backward()
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.phase, incident.origin.line is not None) == ("log", "forward", True)


def test_a_loss_that_waits_leads_into_the_model_that_made_it(tmp_path: Path) -> None:
    """What was bad in there is found in there, with the line."""

    class Spoils(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(self.inner(x) * 0)

    for late in (False, True):
        critic, actor = Spoils(), nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*critic.parameters(), *actor.parameters()], 0.1)
        with nanscope.watch(out=tmp_path) as scope:
            values = critic(torch.randn(6, 4))
            value_loss = None if late else values.square().mean()
            policy_loss = actor(torch.randn(6, 4)).mean()
            policy_loss.backward()
            value_loss = values.square().mean() if value_loss is None else value_loss
            value_loss.backward()
            optimizer.step()
        (incident,) = scope.verdict.incidents
        assert (incident.origin.op, incident.origin.function) == ("log", Spoils.forward.__qualname__), late


def test_a_graph_that_is_kept_is_explained_each_time_that_it_is_differentiated(tmp_path: Path) -> None:
    """The same loss twice: the second time its gradient goes bad, in a line."""
    weight = torch.zeros(2, requires_grad=True)
    with nanscope.watch(out=tmp_path) as scope:
        loss = weight.square().sum().sqrt()
        (weight * 1).sum().backward()
        loss.backward(retain_graph=True)
        loss.backward()
    assert [snapshot.part for snapshot in scope.snapshots] == [2, 3]
    assert all(incident.origin.op == "sqrt" for incident in scope.verdict.incidents)


def test_a_loss_that_nobody_will_differentiate_is_let_go_of(tmp_path: Path) -> None:
    """One that was made and dropped is held until the next backward pass has ended, at most; so is what a metric was made of."""
    weight = torch.ones(8, requires_grad=True)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(20):
            given = torch.randn(8)
            alive.add(given)
            metric = (weight * given).exp().mean()
            (weight * 2).sum().backward()
            del given
            assert len(alive) <= 2
        assert alive
        del metric
        weight.sum().backward()
        assert not alive
    assert scope._tape.account.held == 0


def test_a_loss_that_waits_is_let_go_of_when_the_budget_is_full(tmp_path: Path) -> None:
    """What waits is on the account, too."""
    weight = torch.ones(256, requires_grad=True)
    budget = 4 * BATCH
    with nanscope.watch(out=tmp_path, budget=budget) as scope:
        waiting = [micro_batch(weight, 1 + number) for number in range(12)]
        for loss in waiting:
            loss.backward()
            assert scope._tape.held <= budget
    assert scope.backwards == 12
