"""Custom autograd functions outside the model: a backward that makes NaN out of finite gradients is looked into, and a healthy one is left alone."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanscope
import nanscope.verdict.diagnose
from nanscope.capture.custom import is_custom
from tests.functions import CASES


class Score(torch.autograd.Function):
    """log p with a floor in forward, and a backward that divides by p itself."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, floor: float) -> Tensor:
        ctx.save_for_backward(probs)
        ctx.scale = 1.0
        return probs.clamp_min(floor).log()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (probs,) = ctx.saved_tensors
        grad_probs = ctx.scale * grad_output / probs
        return grad_probs, None


class Opaque(Score):
    """The same, through numpy: nothing of it can be recorded."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (probs,) = ctx.saved_tensors
        with __import__("numpy").errstate(divide="ignore"):
            return torch.from_numpy(grad_output.numpy() / probs.numpy()), None


def train(function: type[Score], zero_at: tuple[int, int] | None, folder: Path, *, watch: bool = True) -> tuple[Any, list[Tensor]]:
    """Two steps; in the second one a probability underflows. The mask leaves column 4 out."""
    torch.manual_seed(5)
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.ones(4, 5)
    mask[:, 4] = 0
    scope = nanscope.watch(out=folder)
    if watch:
        scope.__enter__()
    for step in range(2):
        logits = model(torch.randn(4, 3))
        keep = torch.ones(4, 5)
        if step == 1 and zero_at is not None:
            keep[zero_at] = 0.0
        log_probs = function.apply(torch.sigmoid(logits) * keep, 1e-6)
        loss = -(log_probs * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if watch:
        scope.__exit__(None, None, None)
    return scope, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("zero_at", "masked"), [((2, 3), False), ((1, 0), False)])
def test_the_line_in_a_backward_is_named(tmp_path: Path, zero_at: tuple[int, int], masked: bool) -> None:
    """Op, element and variable inside the function, whether the loss counts the element, and a fix that was run; the file tells the same."""
    scope, _ = train(Score, zero_at, tmp_path)
    (incident,) = scope.verdict.incidents
    place = incident.origin
    assert (incident.phase, place.op, place.index, place.masked, place.variable) == ("backward", "div", zero_at, masked, "grad_probs")
    assert incident.fixes[0].id == "clamp_denominator" and incident.fixes[0].works
    assert nanscope.load(incident.snapshot).program.calls
    again = nanscope.verdict.diagnose.verdict([nanscope.load(incident.snapshot)])
    assert again.incidents[0].origin == place


def test_a_masked_element_of_a_backward_is_told_as_masked(tmp_path: Path) -> None:
    """0 / 0 at a token that the loss does not count."""
    scope, _ = train(Score, (3, 4), tmp_path)
    place = scope.verdict.incidents[0].origin
    assert (place.op, place.index, place.masked) == ("div", (3, 4), True)


class Raise(torch.autograd.Function):
    """exp, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad_output * y


def test_an_overflow_inside_a_function_that_the_loss_drops_is_named(tmp_path: Path) -> None:
    """min picks the clipped side of an infinite ratio: the function's own backward makes NaN of it, at a token that the loss counts."""
    old = torch.zeros(3, 4)
    old[1, 2] = -200.0
    model = nn.Linear(2, 4)
    with nanscope.watch(out=tmp_path) as scope:
        log_probs = nn.functional.logsigmoid(model(torch.ones(3, 2)))
        ratio = Raise.apply(log_probs - old)
        loss = -torch.min(ratio * 2.0, ratio.clamp(0.8, 1.2) * 2.0).mean()
        loss.backward()
    (incident,) = scope.verdict.incidents
    place = incident.origin
    assert (incident.phase, str(incident.cause)) == ("backward", "where_grad_trap")
    assert (place.op, place.index, place.value, place.variable) == ("Raise", (1, 2), float("inf"), "ratio")
    again = nanscope.verdict.diagnose.verdict([nanscope.load(incident.snapshot)])
    assert again.incidents[0].origin == place


def test_a_backward_that_cannot_be_recorded_is_named_by_its_function(tmp_path: Path) -> None:
    """Where the second run shows no ops, the function and the element of its gradient are said."""
    scope, _ = train(Opaque, (2, 3), tmp_path)
    (incident,) = scope.verdict.incidents
    assert incident.phase == "backward" and incident.origin.op == "Opaque" and incident.origin.index == (2, 3)
    assert "def backward" in dict(incident.origin.source)[incident.origin.line or 0] and "unknown line" not in incident.sentence
    assert f"Opaque.backward gave −inf at [2, 3] of [4, 5], test_custom.py:{incident.origin.line}." in incident.sentence


class Seldom(torch.autograd.Function):
    """Its backward goes wrong once, and never again."""

    left = iter([math.nan])

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output * next(Seldom.left, 1.0)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Opaque.apply(torch.sigmoid(self.layer(x) - 1e3), 1e-6)
        return found * 2.0


def test_a_function_whose_backward_does_not_repeat_itself_is_named_with_its_line(tmp_path: Path) -> None:
    """What it gave in the step was seen; where it is written is known."""
    model = nn.Linear(3, 3)
    with nanscope.watch(model, out=tmp_path) as scope:
        Seldom.apply(model(torch.ones(2, 3))).sum().backward()
    (incident,) = scope.verdict.incidents
    assert "Seldom.backward gave NaN at [0, 0] of [2, 3], test_custom.py:" in incident.sentence
    assert "def backward" in dict(incident.origin.source)[incident.origin.line or 0]


def test_a_function_inside_a_model_is_named_with_its_line(tmp_path: Path) -> None:
    """Its backward cannot be replayed, and is followed node by node."""
    model = Inside()
    with nanscope.watch(model, out=tmp_path) as scope:
        model(torch.ones(2, 3)).sum().backward()
    (incident,) = scope.verdict.incidents
    assert "Opaque.backward " in incident.sentence and "Inside" in (incident.origin.module or "")
    assert "def backward" in dict(incident.origin.source)[incident.origin.line or 0]


@pytest.mark.parametrize("zero_at", [None, (2, 3)])
def test_watching_a_function_changes_nothing(tmp_path: Path, zero_at: tuple[int, int] | None) -> None:
    """Weights are bit-identical, in a healthy and in a spoilt run."""
    _, bare = train(Score, zero_at, tmp_path / "a", watch=False)
    scope, watched = train(Score, zero_at, tmp_path / "b")
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(bare, watched, strict=True))
    assert scope.verdict.healthy is (zero_at is None)


def test_a_backward_that_fails_the_second_time_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The function is anybody's code: the incident is there all the same."""

    class Once(Score):
        calls = 0

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
            Once.calls += 1
            if Once.calls > 2:
                raise RuntimeError("not again")
            return Score.backward(ctx, grad_output)

    with caplog.at_level(logging.WARNING, "nanscope"):
        scope, _ = train(Once, (2, 3), tmp_path)
    assert "not again" in caplog.text
    assert scope.verdict.incidents[0].origin.op == "Once"


@pytest.mark.parametrize("inside", [False, True], ids=["in the loss", "in a module"])
@pytest.mark.parametrize("name", CASES)
def test_what_goes_wrong_in_a_function_is_found_in_there(tmp_path: Path, name: str, inside: bool) -> None:
    """Operator, line, cause and phase, in its forward and in its backward; a fix that was run; gradients as without us."""
    case = CASES[name]
    _, bare = case.train(lambda: contextlib.nullcontext(), inside=inside)
    scope, watched = case.train(lambda: nanscope.watch(out=tmp_path), inside=inside)
    (incident,) = scope.verdict.incidents
    place = incident.origin
    assert (place.op, str(incident.cause), incident.phase) == (case.op, case.cause, case.phase)
    assert case.line in dict(place.source)[place.line or 0]
    assert place.masked is case.masked or (inside and place.masked is None)
    assert any(fix.works for fix in incident.fixes) or name == "saved"
    again = nanscope.verdict.diagnose.verdict([nanscope.load(incident.snapshot)])
    assert again.incidents[0].origin.to_json() == place.to_json()
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(bare, watched, strict=True))


@pytest.mark.parametrize("zero_at", [None, (2, 3)])
def test_what_a_checkpoint_saves_is_asked_for_once(tmp_path: Path, zero_at: tuple[int, int] | None) -> None:
    """Asked for twice it raises, and asked for early it computes the loss again: its gradients are those of an unwatched run."""

    def grads(watched: bool) -> list[Tensor]:
        x = torch.linspace(0.1, 0.9, 20).reshape(4, 5)
        if zero_at is not None:
            x[zero_at] = 0.0
        x.requires_grad_()
        with nanscope.watch(out=tmp_path) if watched else contextlib.nullcontext():
            loss = checkpoint(lambda t: Score.apply(t, 1e-6).sum(), x * 1.0, use_reentrant=False)
            loss.backward()
        return [x.grad] if x.grad is not None else []

    assert all(torch.equal(a, b) for a, b in zip(grads(watched=False), grads(watched=True), strict=True))


class Unseen(torch.autograd.Function):
    """Its backward writes the first rows of a memory of its own, in a way that nobody can follow, and hands on what it makes of it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(gate)
        return (rows * gate).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate,) = ctx.saved_tensors
        found = torch.empty(len(grad), len(gate))
        ctypes.memmove(found.data_ptr(), (grad[:2, None] * gate).contiguous().data_ptr(), 2 * len(gate) * 4)
        return found, None


def test_rows_that_a_kernel_has_never_written_are_named(tmp_path: Path) -> None:
    """Function, argument, element, and how much of it; torch has seen nothing of the writing."""
    model = nn.Linear(3, 4)
    torch.use_deterministic_algorithms(True)  # the memory holds NaN then
    try:
        with nanscope.watch(out=tmp_path) as scope:
            Unseen.apply(model(torch.ones(3, 3)), torch.ones(4)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    (incident,) = scope.verdict.incidents
    place = incident.origin
    assert (place.op, place.index, place.shape, place.variable, place.masked) == ("Unseen", (2, 0), (3, 4), "rows", False)
    assert str(incident.cause) == "uninitialized" and "the whole row 2" in incident.sentence and "rows" in incident.sentence


class Coupled(torch.autograd.Function):
    """A reversible layer: its backward recovers the input by a division, and differentiates the net once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: nn.Module) -> Tensor:
        ctx.net = net
        with torch.no_grad():
            scale = net(x[:, :1]).exp()
            ctx.save_for_backward(x[:, :1], x[:, 1:] * scale)
            return torch.cat((x[:, :1], x[:, 1:] * scale), 1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        kept, scaled = ctx.saved_tensors
        with torch.enable_grad():
            kept = kept.detach().requires_grad_()
            log_scale = ctx.net(kept)
        lost = scaled / log_scale.detach().exp()
        (through,) = torch.autograd.grad(log_scale, [kept], grad_outputs=grad_output[:, 1:] * lost)
        return torch.cat((grad_output[:, :1] + through, grad_output[:, 1:]), 1), None


def test_what_a_backward_weighs_its_own_gradients_by_is_looked_into(tmp_path: Path) -> None:
    """The gradient that it takes itself is bad because of the number that it is given: the division is told, and not the function."""
    net, first = nn.Linear(1, 1, bias=False), nn.Linear(2, 2)
    x = torch.tensor([[1.0, 1.0], [2.0, 1.0]])
    with torch.no_grad():
        net.weight.fill_(-100.0)
        first.weight.copy_(torch.eye(2))
        first.bias.zero_()
        x[0, 0] = 0.1
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        Coupled.apply(first(x), net).sum().backward()
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.cause, incident.origin.op, incident.origin.variable, incident.origin.index) == ("zero_div_zero", "div", "lost", (1, 0))


class InNumpy(torch.autograd.Function):
    """Its forward leaves torch, and what comes back lies where the loss reads it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(x.detach().numpy()))  # in numpy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_function_that_calculates_in_numpy_is_told_by_the_line_that_comes_back(tmp_path: Path) -> None:
    """Nobody sees inside of it, and nothing fails for that."""
    weight = torch.ones(3, requires_grad=True)
    with nanscope.watch(out=tmp_path) as scope:
        InNumpy.apply(weight * torch.tensor([1.0, 0.0, 2.0])).mean().backward()
    (incident,) = scope.verdict.incidents
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# in numpy"))
    assert (incident.origin.line, incident.origin.index) == (line, (1,)), scope.verdict.sentence
    assert not incident.notes


def test_only_functions_of_others_are_custom() -> None:
    """torch's own nodes, in C++ or Python, are not looked into."""
    x = torch.rand(3, requires_grad=True)
    assert is_custom(Score.apply(x, 1e-6).grad_fn)
    assert not is_custom((x * 2).grad_fn) and not is_custom(None)


class Doubled(torch.autograd.Function):
    """What only passes through, at the end of a loss."""

    @staticmethod
    def forward(ctx: Any, summed: Tensor) -> Tensor:
        return summed * 2

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output * 2


def told_behind_a_function(folder: Path, bad: int, how: str) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=folder) as scope:
        for step in range(1, bad + 1):
            noise, weight, mask = torch.zeros(4, 5), torch.ones(4, 5), torch.ones(4, 5)
            mask[1, 1] = how not in ("masked", "after")
            if step == bad:
                noise[1, 1], weight[1, 1] = (-95.0, 1.0) if how != "log" else (0.0, 0.0)
            logp = model(torch.ones(4, 3)).log_softmax(-1)
            if how == "log":
                logp = Doubled.apply(logp + weight.log())
                ratio = torch.exp(logp - logp.detach())
            else:
                ratio = torch.exp(logp - (logp.detach() + noise))
            kept = ratio if how == "log" else torch.where(noise < -50, torch.zeros(()), ratio)
            kept = kept if how != "masked" else ratio.clamp(max=2) * mask
            total = Doubled.apply(kept.sum()) if how == "trap" else Doubled.apply(kept) if how == "masked" else kept
            total = torch.where(mask > 0, Doubled.apply(ratio), torch.zeros(())) if how == "after" else total
            loss = -total.sum() / 20
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return scope.verdict.incidents[0]


@pytest.mark.parametrize("bad", [1, 2, 3, 6])
@pytest.mark.parametrize("how", ["trap", "masked", "after"])
def test_a_gradient_that_goes_bad_before_a_function_is_told_at_its_line(how: str, bad: int, tmp_path: Path) -> None:
    """The loss reads what the function returned, and all that comes back to that is finite: the line lies between the model and the function."""
    incident = told_behind_a_function(tmp_path, bad, how)
    assert (incident.origin.op, str(incident.phase), list(incident.origin.index)) == ("exp", "backward", [1, 1]), incident.sentence
    assert incident.origin.masked, incident.sentence
    assert incident.fixes[0].id in ("mask_before_op", "clamp_exponent") and incident.fixes[0].works
    again = nanscope.verdict.diagnose.verdict([nanscope.load(incident.snapshot)])
    assert again.incidents[0].origin == incident.origin


@pytest.mark.parametrize("bad", [1, 2, 3, 6])
def test_an_infinity_that_came_through_a_function_is_told_where_it_was_made(bad: int, tmp_path: Path) -> None:
    """And not where it did its harm: between the two nobody but the function has touched it."""
    incident = told_behind_a_function(tmp_path, bad, "log")
    assert (incident.origin.op, incident.origin.operands[0][0], list(incident.origin.index)) == ("log", "weight", [1, 1]), incident.sentence
