"""Gradients that the loop replaces where they are not finite, before an optimizer steps on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_ending import Trapped
from torch import Tensor, nn

import nanscope
from nanscope.watching.recording import Recording

NAN = math.nan


def differentiate(model: Trapped, bad: bool) -> None:
    """One batch, in which a row is 0 if it is to be bad."""
    x = torch.randn(8, 6)
    x[3] *= not bad
    model(x).square().mean().backward()


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _assign(by: Callable[[Tensor], Tensor]) -> Callable[[nn.Parameter], None]:
    def replace(parameter: nn.Parameter) -> None:
        parameter.grad = by(grad_of(parameter))

    return replace


def _index(parameter: nn.Parameter) -> None:
    grad_of(parameter)[~grad_of(parameter).isfinite()] = 0.0


def _out(parameter: nn.Parameter) -> None:
    torch.nan_to_num(grad_of(parameter), 0.0, 0.0, 0.0, out=grad_of(parameter))


REPLACED: dict[str, Callable[[nn.Parameter], object]] = {
    "nan_to_num_": lambda parameter: grad_of(parameter).nan_to_num_(0.0, 0.0, 0.0),
    "nan_to_num": _assign(lambda grad: grad.nan_to_num(0.0, 0.0, 0.0)),
    "out": _out,
    "data": lambda parameter: grad_of(parameter).data.nan_to_num_(0.0, 0.0, 0.0),
    "without gradients": torch.no_grad()(lambda parameter: grad_of(parameter).nan_to_num_(0.0, 0.0, 0.0)),
    "copy": lambda parameter: grad_of(parameter).copy_(grad_of(parameter).nan_to_num(0.0)),
    "where": _assign(lambda grad: torch.where(grad.isfinite(), grad, 0.0)),
    "masked": lambda parameter: grad_of(parameter).masked_fill_(grad_of(parameter).isnan() | grad_of(parameter).isinf(), 0.0),
    "index": _index,
    "not equal": _assign(lambda grad: torch.where(grad != grad, torch.zeros(()), grad)),
}


@pytest.mark.parametrize(("width", "late"), [(8, False), (8, True), (1 << 17, False)], ids=["small", "late", "large"])
@pytest.mark.parametrize("by", REPLACED)
def test_gradients_that_the_loop_replaces_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, width: int, late: bool
) -> None:
    """The optimizer steps on finite ones. Where they were fine before nothing is said."""
    if late:  # flags are read when somebody has to know, as on a GPU
        monkeypatch.setattr(Recording, "waits", True)
    model = Trapped(width)
    optimizer = torch.optim.AdamW(model.parameters())
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 8):
            optimizer.zero_grad()
            differentiate(model, bad=step == 5)
            for parameter in model.parameters():
                REPLACED[by](parameter)
            optimizer.step()
    assert [(entry.step, entry.stepped) for entry in scope.history.entries if entry.nonfinite] == [(5, "replaced")], scope.verdict.sentence
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.origin.index[0]) == ("div", 3), scope.verdict.sentence
    assert "the training loop replaced them" in scope.verdict.sentence and "clean" not in scope.verdict.sentence
    assert incident.reached["gradients"] == [1, 3] and incident.reached["weights"] == [0, 3]


@pytest.mark.parametrize("by", ["nan_to_num_", "nan_to_num", "index"])
def test_gradients_that_are_replaced_after_each_micro_batch(tmp_path: Path, by: str) -> None:
    model = Trapped(8)
    optimizer = torch.optim.AdamW(model.parameters())
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 8):
            optimizer.zero_grad()
            for part in range(3):
                differentiate(model, bad=(step, part) == (5, 1))
                for parameter in model.parameters():
                    REPLACED[by](parameter)
            optimizer.step()
    assert [(entry.step, entry.stepped) for entry in scope.history.entries if entry.nonfinite] == [(5, "replaced")], scope.verdict.sentence
    assert scope.verdict.incidents[0].origin.op == "div", scope.verdict.sentence


def test_a_bad_loss_whose_gradients_are_replaced(tmp_path: Path) -> None:
    """The loss says where it began, and that the weights were spared says who did it."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 8):
            optimizer.zero_grad()
            mask = torch.ones(8, 3) * (step != 5)
            loss = (model(torch.randn(8, 6)).square() * mask).sum() / mask.sum()
            loss.backward()
            for parameter in model.parameters():
                grad_of(parameter).nan_to_num_(0.0)
            optimizer.step()
    (incident,) = scope.verdict.incidents
    assert incident.origin.op == "div" and incident.reached["stepped"] == "replaced"
    assert "all 2 gradients are non-finite" in scope.verdict.sentence and "the training loop replaced them" in scope.verdict.sentence


def _heal(grad: Tensor) -> Tensor:
    return grad.nan_to_num(0.0, 0.0, 0.0)


def _heal_there(parameter: nn.Parameter) -> None:
    grad_of(parameter).nan_to_num_(0.0, 0.0, 0.0)


@pytest.mark.parametrize("width", [8, 1 << 17], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["on arrival", "once there"])
def test_gradients_that_hooks_replace_within_backward_are_told(tmp_path: Path, kind: str, width: int) -> None:
    """Nobody sees them but the hooks; what these are given is looked at first, and they are as they were when backward is over."""
    model = Trapped(width)
    seen: list[bool] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: seen.append(bool(grad.isfinite().all())))
        if kind == "on arrival":
            parameter.register_hook(_heal)
        else:
            parameter.register_post_accumulate_grad_hook(_heal_there)
    hooks = [{**hooks} for p in model.parameters() for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) if hooks]
    optimizer = torch.optim.AdamW(model.parameters())
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 8):
            optimizer.zero_grad()
            differentiate(model, bad=step == 5)
            optimizer.step()
    assert [(entry.step, entry.stepped) for entry in scope.history.entries if entry.nonfinite] == [(5, "replaced")], scope.verdict.sentence
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.origin.index[0]) == ("div", 3), scope.verdict.sentence
    assert "the training loop replaced them" in scope.verdict.sentence
    assert seen.count(False) == 1 and len(seen) == 7 * 3  # the one weight that it reaches
    now = [{**hooks} for p in model.parameters() for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) if hooks]
    assert [[*one.items()] for one in now] == [[*one.items()] for one in hooks]


@pytest.mark.parametrize("reset", [False, True], ids=["", "removed"])
def test_hooks_that_replace_nothing_change_nothing(tmp_path: Path, reset: bool) -> None:
    """Bad gradients that go on are what they were without a hook; and who takes his hooks off in backward may."""
    model = Trapped(8)
    handles = [
        parameter.register_hook(lambda grad: handles.pop().remove() if reset and handles else grad * 1) for parameter in model.parameters()
    ]
    optimizer = torch.optim.AdamW(model.parameters())
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 5):
            optimizer.zero_grad()
            differentiate(model, bad=step == 3)
            optimizer.step()
    assert scope.verdict.incidents[0].origin.op == "div" and scope.verdict.incidents[0].reached["stepped"] != "replaced"
    assert not any(parameter._backward_hooks for parameter in model.parameters()) or not reset


def test_what_is_replaced_in_other_numbers_tells_nothing_of_gradients(tmp_path: Path) -> None:
    """Rewards may be NaN, and be replaced, between backward and the step; so may those that were dropped before."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 8):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            rewards = torch.tensor([1.0, NAN if step == 5 else 0.0])
            rewards.nan_to_num().mean().item()
            rewards[rewards.isnan()] = 0.0
            for parameter in model.parameters():
                grad_of(parameter).nan_to_num_(0.0)
            optimizer.step()
    assert scope.verdict.healthy and scope.bad_steps == 0, scope.verdict.sentence


def test_gradients_that_are_replaced_in_a_step_that_is_dropped_all_the_same(tmp_path: Path) -> None:
    model = Trapped(8)
    optimizer = torch.optim.AdamW(model.parameters())
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 8):
            optimizer.zero_grad()
            differentiate(model, bad=step == 5)
            bad = not all(grad_of(parameter).isfinite().all() for parameter in model.parameters())
            for parameter in model.parameters():
                grad_of(parameter).nan_to_num_(0.0)
            if not bad:
                optimizer.step()
    told = [(entry.step, entry.stepped) for entry in scope.history.entries if entry.nonfinite]
    assert told == [(5, "skipped by the trainer")], scope.verdict.sentence


class Moody(Trapped):
    """Is in another state when it is called once more."""

    def __init__(self) -> None:
        super().__init__(8)
        self.trap = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.where(hidden > -1e9, hidden, torch.exp(hidden * 0 + 100.0) * hidden) if self.trap else hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "replaced"])
def test_a_model_that_is_in_another_state_when_it_is_looked_into(tmp_path: Path, drops: bool) -> None:
    """What was seen is said, and not that nobody has recorded the loss."""
    model = Moody()
    optimizer = torch.optim.AdamW(model.parameters())
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 8):
            optimizer.zero_grad()
            model.trap = step == 5
            loss = model(torch.randn(8, 6)).square().mean()
            loss.backward()
            model.trap = False
            if drops and not all(grad_of(parameter).isfinite().all() for parameter in model.parameters()):
                continue
            for parameter in model.parameters():
                grad_of(parameter).nan_to_num_(0.0)
            optimizer.step()
    assert "the gradient of the whole model is NaN" in scope.verdict.sentence and "not recorded" not in scope.verdict.sentence
    assert "another state" in scope.verdict.sentence, scope.verdict.sentence
