"""`"skip"` on several ranks, in one process of a group whose others do not exist, so what they would reduce stays as it is.

With DDP, and with shards, real ranks hold it: test_ranks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import nanscope
from nanscope.watching.skipping import Skipping

NAN = math.nan


@pytest.fixture
def ranks() -> Iterator[None]:
    """Two of them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def watched(
    path: Path, model: nn.Module, after: Callable[[nn.Module], None], micro_batches: int = 1, factor: float = NAN
) -> nanscope.Scope:
    """One step; `after` comes between backward and the optimizer. Of several micro-batches only the last one is reduced."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=path, on_nonfinite="skip") as scope:
        (model(torch.ones(2, 3)) * factor).sum().backward()
        after(model)
        optimizer.step()
    return scope


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def average(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        assert parameter.grad is not None
        parameter.grad /= 2
    clip(model)


def spoil(model: nn.Module) -> None:
    """On one rank alone."""
    clip(model)
    next(model.parameters()).grad.view(-1)[0] = NAN  # type: ignore[union-attr]


def spoil_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.fill_(NAN)  # type: ignore[union-attr]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("after", [spoil, spoil_all])
def test_what_was_not_reduced_is_not_skipped(tmp_path: Path, after: Callable[[nn.Module], None]) -> None:
    """It may be on this rank alone: the step is taken, it stays an incident, and a note says why it was taken."""
    model = nn.Linear(3, 2)
    scope = watched(tmp_path, model, after, factor=1.0)
    assert (scope.skipped, [note.slug for note in scope.notes]) == (0, ["skip_refused"])
    assert scope.verdict.incidents[0].reached["stepped"] == "taken" and bool(next(model.parameters()).isnan().any())


@pytest.mark.usefixtures("ranks")
def test_gradients_that_the_loop_reduces_are_skipped(tmp_path: Path) -> None:
    """The tape has seen what its all-reduce over all ranks left."""
    assert watched(tmp_path, nn.Linear(3, 2), average).skipped == 1


@pytest.mark.usefixtures("ranks")
def test_a_reduction_over_some_ranks_is_none(tmp_path: Path) -> None:
    """The others may have seen something else."""
    alone = dist.new_group([0])
    scope = watched(tmp_path, nn.Linear(3, 2), lambda model: average(model, alone))
    assert (scope.skipped, [note.slug for note in scope.notes]) == (0, ["skip_refused"])


def test_a_process_that_trains_alone_always_skips(tmp_path: Path) -> None:
    """There is nobody to part from."""
    scope = watched(tmp_path, nn.Linear(3, 2), spoil, factor=1.0)
    assert (scope.skipped, [note.slug for note in scope.notes]) == (1, [])


@pytest.mark.usefixtures("ranks")
def test_our_own_failure_takes_the_step_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As "record" would."""
    monkeypatch.setattr(Skipping, "_all_see", None)
    scope = watched(tmp_path, nn.Linear(3, 2), average)
    assert scope.skipped == 0 and [gap.slug for gap in scope.verdict.gaps] == ["skipping-failed"]


def test_a_step_whose_closure_differentiates_is_taken_and_that_is_said(tmp_path: Path) -> None:
    """It is in the weights when it is seen; what its gradients left is not skipped in the step that follows, which makes its own."""
    model = nn.Linear(3, 1)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
    with nanscope.watch(out=tmp_path, on_nonfinite="skip") as scope:
        for step in range(1, 5):

            def closure(factor: float = NAN if step == 2 else 1.0) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(torch.ones(2, 3)) * factor).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            if step == 2:
                model.load_state_dict(good)
    assert (scope.skipped, scope.bad_steps, scope.steps) == (0, 1, 4)
    assert [note.slug for note in scope.verdict.notes] == ["skip_refused"]
    assert "skipped" not in scope.verdict.sentence


def test_of_two_optimizers_the_one_that_was_skipped_is_told(tmp_path: Path) -> None:
    """The other one has stepped, on gradients that were fine."""
    actor, critic = nn.Linear(3, 1), nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (actor, critic)]
    with nanscope.watch(out=tmp_path, on_nonfinite="skip") as scope:
        (actor(torch.ones(2, 3)).sum() + (critic(torch.ones(2, 3)) * NAN).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
    (incident,) = scope.verdict.incidents
    assert incident.headline.endswith("weights clean · SGD of Linear #2 step skipped")
    assert "the optimizer step was skipped and the weights stayed clean" in incident.sentence


@pytest.mark.parametrize("on_nonfinite", ["skip", "repair"])
def test_an_update_by_hand_cannot_be_skipped_and_that_is_said(tmp_path: Path, on_nonfinite: Literal["skip", "repair"]) -> None:
    """Nothing stands between the gradients and `p -= lr * p.grad`."""
    model = nn.Linear(4, 3)
    with nanscope.watch(out=tmp_path, on_nonfinite=on_nonfinite) as scope:
        for step in range(4):
            model.zero_grad()
            weights = torch.ones(5, 3) * (step != 2)
            (weights.log() * model(torch.randn(5, 4))).mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
    said = [note.text for note in scope.notes if note.slug == "skip_refused"]
    assert (on_nonfinite == "repair" and scope.repaired) or (len(said) == 1 and "the loop writes to its weights itself" in said[0])
