"""Optimizers that step inside a backward pass: what one such pass comes to is a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope


def train(fault: Callable[[Tensor], Tensor] = torch.log, bad: int = -1, every: int = 1, head: bool = False) -> list[Tensor]:
    """Six backward passes in which each weight is stepped as soon as its gradient is there; every: second one, say. Returns the weights.

    head: the last layer has an optimizer that steps afterwards.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = {parameter: torch.optim.AdamW([parameter], 0.01) for parameter in model.parameters()}
    last = torch.optim.SGD(model[2].parameters(), 0.01)

    def step_now(parameter: Tensor) -> None:
        if number % every == 0:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model[0].parameters() if head else model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    for number in range(1, 7):
        error = model(torch.randn(8, 4)).square()
        (fault(error * 0) + error if number == bad else error).mean().backward()
        if head:
            last.step()
            last.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(("fault", "phase"), [(torch.log, "forward"), (torch.sqrt, "backward")])
def test_a_backward_pass_in_which_optimizers_step_is_a_step(
    fault: Callable[[Tensor], Tensor], phase: str, head: bool, tmp_path: Path
) -> None:
    """Counted and numbered as any other, with the norm of its gradients, and what it wrote into the weights; one that follows closes it not twice."""
    bare = train(fault, 4, head=head)
    with nanscope.watch(out=tmp_path) as scope:
        watched = train(fault, 4, head=head)
    for one, two in zip(bare, watched, strict=True):
        assert torch.equal(one.view(torch.int32), two.view(torch.int32))
    assert [(e.step, e.nonfinite, e.stepped, e.micro_batches) for e in scope.history.entries] == [
        (step, step >= 4, None, None) for step in range(1, 7)
    ]
    assert all((entry.grad_norm or 0.0) > 0 for entry in scope.history.entries[:3])
    first, *rest = scope.verdict.incidents
    assert (first.step, first.phase, first.origin.op) == (4, phase, fault.__name__)
    reached = scope.snapshots[0].reached
    assert (reached.stepped, reached.bad_weights) == ("taken", 4)
    assert reached.bad_gradients == (2 if head else 4)  # of those that are still there
    assert {incident.consequence_of for incident in rest} <= {4}
    assert (scope.steps, scope.verdict.gaps) == (6, ())


def test_a_backward_pass_in_which_none_steps_yet_is_a_micro_batch(tmp_path: Path) -> None:
    """Gradients that are gathered first are stepped on in the pass in which they are complete."""
    with nanscope.watch(out=tmp_path) as scope:
        train(bad=5, every=2)
    assert [(e.step, e.nonfinite, e.micro_batches) for e in scope.history.entries] == [(1, False, 2), (2, False, 2), (3, True, 2)]
    assert [(incident.step, incident.micro_batch) for incident in scope.verdict.incidents] == [(3, 1)]


def test_a_step_inside_a_backward_pass_cannot_be_skipped(tmp_path: Path) -> None:
    """It is over before all gradients are there: it is said that it was taken."""
    with nanscope.watch(out=tmp_path, on_nonfinite="skip") as scope:
        train(bad=4)
    assert (scope.skipped, [note.slug for note in scope.notes]) == (0, ["skip_refused"])
    assert scope.snapshots[0].reached.stepped == "taken"


def test_stop_ends_training_after_the_backward_pass(tmp_path: Path) -> None:
    """What it wrote is in the weights already, and nothing follows."""
    with pytest.raises(nanscope.NonFiniteError), nanscope.watch(out=tmp_path, on_nonfinite="stop") as scope:
        train(bad=4)
    assert (scope.steps, scope.verdict.incidents[0].step) == (3, 4)


def test_an_update_that_spoils_a_weight_inside_a_backward_pass_is_looked_into(tmp_path: Path) -> None:
    """Loss and gradients are finite, and what the optimizer makes of them is not."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    weight.register_post_accumulate_grad_hook(lambda one: optimizer.step())
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 4):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = float("inf") if step == 2 else 0.1
            (weight * 2).sum().backward()
    assert [(entry.step, entry.nonfinite) for entry in scope.history.entries] == [(1, False), (2, True), (3, True)]
    assert scope.verdict.incidents[0].step == 2 and scope.snapshots[0].reached.bad_weights == 1


@pytest.mark.parametrize("caught", [True, False])
def test_a_backward_pass_that_raises_after_an_optimizer_has_stepped_is_a_step(caught: bool, tmp_path: Path) -> None:
    """What was written is written, and the error is the trainer's."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model[2].parameters(), 0.01)

    def refuse(grad: Tensor) -> None:
        if not bool(grad.isfinite().all()):
            raise FloatingPointError("bad gradient")

    model[2].bias.register_post_accumulate_grad_hook(lambda one: optimizer.step())
    model[0].weight.register_hook(refuse)
    with contextlib.suppress(FloatingPointError), nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 5):
            model.zero_grad()
            with contextlib.suppress(*[FloatingPointError] if caught else []):
                (model(torch.randn(8, 4)).square() * (float("nan") if step == 3 else 1.0)).mean().backward()
    assert [(entry.step, entry.nonfinite) for entry in scope.history.entries] == [(1, False), (2, False), (3, True), (4, True)][
        : 4 if caught else 3
    ]
    assert scope.verdict.incidents[0].step == 3 and scope.snapshots[0].reached.stepped == "taken"


def differentiate(model: nn.Module, passes: int, bad: tuple[int, ...]) -> None:
    """So many backward passes; of those that are bad the loss is −inf."""
    for number in range(1, passes + 1):
        error = model(torch.ones(8, 4)).square()
        (error * 0 if number in bad else error + 1).log().mean().backward()


def test_hooks_that_update_the_weights_themselves_take_a_step(tmp_path: Path) -> None:
    """Each backward pass is one, taken by hand; what a bad one wrote is counted, and what follows is its consequence."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def update(weight: Tensor) -> None:
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.01)  # type: ignore[arg-type]
        weight.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with nanscope.watch(out=tmp_path) as scope:
        differentiate(model, 5, bad=(3,))
    assert [(e.step, e.stepped, e.nonfinite) for e in scope.history.entries] == [(n, "taken by hand", n >= 3) for n in range(1, 6)]
    assert [(i.step, i.consequence_of) for i in scope.verdict.incidents] == [(3, None), (4, 3)]
    assert "the update wrote it into 4 weights" in scope.verdict.sentence
    assert scope.verdict.incidents[0].reached["gradients"] == [None, None]  # which are gone, and were not finite


def test_gradients_that_a_hook_passes_over_are_a_step_that_was_dropped(tmp_path: Path) -> None:
    """Its optimizers step inside the backward pass, and only if what they would step on is finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = {parameter: torch.optim.SGD([parameter], 0.01) for parameter in model.parameters()}

    def step_now(parameter: Tensor) -> None:
        if torch.isfinite(parameter.grad).all():  # type: ignore[arg-type]
            optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    with nanscope.watch(out=tmp_path) as scope:
        differentiate(model, 6, bad=(3, 5))
    dropped = "skipped by the trainer"
    assert [(e.step, e.stepped) for e in scope.history.entries] == [(n, dropped if n in (3, 5) else None) for n in range(1, 7)]
    assert [(i.step, i.reached["stepped"]) for i in scope.verdict.incidents] == [(3, dropped), (5, dropped)]
