"""Hooks on gradients: one that makes a bad gradient of a finite one is looked into, and what it counts and keeps stays as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.capture.hooks import Hook, acts


class Run:
    """A small training step. Where its hook goes, the subclass knows."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(3, 4), Part(), nn.Linear(4, 2))
        self.scale = torch.tensor([1.0, 0.0])
        self.calls: list[str] = []
        self.total = 0

    def counts(self, result: Tensor) -> Tensor:
        self.calls.append("called")
        self.total += 1
        return result

    def divides(self, grad: Tensor) -> Tensor:
        return self.counts(grad / self.scale)


class Part(nn.Module):
    """A part of a model that puts hooks on what it makes. hooks: these."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[Callable[[Tensor], Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        made = x.tanh()
        for hook in self.hooks:
            made.register_hook(hook)
        return made


def on_the_loss(run: Run, logits: Tensor) -> Tensor:
    ratio = (logits * 0.1).exp()
    ratio.register_hook(run.divides)
    return ratio.sum()


def of_the_output(run: Run, logits: Tensor) -> Tensor:
    logits.register_hook(lambda grad: grad / run.scale)
    return logits.square().sum()


def normed(grad: Tensor) -> Tensor:
    norm = grad.norm()
    return grad / norm


def in_the_model(run: Run, logits: Tensor) -> Tensor:
    return logits.sum() * 0.0


def overflows(grad: Tensor) -> Tensor:
    weight = torch.exp(grad * 1e4)
    return grad * weight


def steep(run: Run, logits: Tensor) -> Tensor:
    logits.register_hook(overflows)
    return logits.sum()


def of_a_weight(run: Run, logits: Tensor) -> Tensor:
    return logits.sum() * 0.0


def accumulated(run: Run, logits: Tensor) -> Tensor:
    return logits.sum() * 0.0


def divide_in_place(weight: Tensor) -> None:
    weight.grad.div_(weight.grad.norm())  # type: ignore[union-attr]


def before_a_module(run: Run, logits: Tensor) -> Tensor:
    return logits.sum()


def handed_on(run: Run, logits: Tensor) -> Tensor:
    first = run.model[0](torch.ones(5, 3))
    first.register_hook(lambda grad: grad * (1 / (run.scale.sum() - 1)))
    return run.model[2](run.model[1](first)).sum()


def between(run: Run, logits: Tensor) -> Tensor:
    first = run.model[0](torch.ones(5, 3))
    half = first * 0.5
    half.register_hook(lambda grad: grad * (1 / (run.scale.sum() - 1)))
    return run.model[2](run.model[1](half)).sum()


def set_up(run: Run, name: str) -> None:
    part: Any = run.model[1]
    if name == "in the model":
        part.hooks.append(normed)
    elif name == "of a weight":
        run.model[2].weight.register_hook(normed)
    elif name == "accumulated":
        run.model[2].weight.register_post_accumulate_grad_hook(divide_in_place)
    elif name == "behind a module":
        run.model[1].register_full_backward_pre_hook(lambda module, grads: (grads[0] / (run.scale.sum() - 1),))
    elif name == "before a module that only knows itself":
        run.model[1].register_full_backward_hook(lambda module, into, out: (out[0] / into[0].sub(into[0]),))
    elif name == "before a module":
        run.model[1].register_full_backward_hook(lambda module, into, out: (into[0] * (1 / (run.scale.sum() - 1)),))


Case = tuple[Callable[[Run, Tensor], Tensor], str, str, str, str, str]
CASES: dict[str, Case] = {
    # name: loss, op, cause, fix, line
    "on the loss": (on_the_loss, "div", "zero_denominator", "clamp_denominator", "return self.counts(grad / self.scale)", "grad"),
    "of the output": (of_the_output, "div", "zero_denominator", "clamp_denominator", "logits.register_hook(lambda grad: grad / run.scale)", "grad"),
    "in the model": (in_the_model, "div", "zero_div_zero", "clamp_denominator", "return grad / norm", "grad"),
    "overflows": (steep, "exp", "exp_overflow", "clamp_exponent", "weight = torch.exp(grad * 1e4)", "grad"),
    "of a weight": (of_a_weight, "div", "zero_div_zero", "clamp_denominator", "return grad / norm", "grad"),
    "accumulated": (accumulated, "div", "zero_div_zero", "clamp_denominator", "weight.grad.div_(weight.grad.norm())  # type: ignore[union-attr]", "grad"),
    "behind a module": (before_a_module, "div", "zero_denominator", "clamp_denominator", "run.model[1].register_full_backward_pre_hook(lambda module, grads: (grads[0] / (run.scale.sum() - 1),))", "grad"),
    "before a module": (before_a_module, "reciprocal", "zero_denominator", "clamp_denominator", "run.model[1].register_full_backward_hook(lambda module, into, out: (into[0] * (1 / (run.scale.sum() - 1)),))", "grad"),
    "before a module that only knows itself": (before_a_module, "div", "zero_denominator", "clamp_denominator", "run.model[1].register_full_backward_hook(lambda module, into, out: (out[0] / into[0].sub(into[0]),))", "grad"),
    "handed on": (handed_on, "reciprocal", "zero_denominator", "clamp_denominator", "first.register_hook(lambda grad: grad * (1 / (run.scale.sum() - 1)))", "grad"),
    "between": (between, "reciprocal", "zero_denominator", "clamp_denominator", "half.register_hook(lambda grad: grad * (1 / (run.scale.sum() - 1)))", "grad"),
}  # fmt: skip


def train(name: str, folder: Path | None) -> tuple[Run, nanscope.Verdict | None]:
    """One step with a hook; watched where there is a folder."""
    run = Run()
    set_up(run, name)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    scope = nanscope.watch(out=folder) if folder is not None else None
    if scope is not None:
        scope.__enter__()
    try:
        for _ in range(2):
            logits = run.model(torch.ones(5, 3))
            loss = CASES[name][0](run, logits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finally:
        if scope is not None:
            scope.__exit__(None, None, None)
    return run, None if scope is None else scope.verdict


@pytest.mark.parametrize("name", CASES)
def test_the_line_in_a_hook_is_named(tmp_path: Path, name: str) -> None:
    """Operator, line, cause and a fix that was run; the saved step tells the same."""
    _, op, cause, fix, line, role = CASES[name]
    _, verdict = train(name, tmp_path)
    assert verdict is not None
    first = verdict.incidents[0]
    place = first.origin
    assert (first.phase, place.op, str(first.cause), place.role) == ("backward", op, cause, role), first.sentence
    assert dict(place.source)[place.line or 0].strip() == line
    assert first.fixes[0].id == fix and first.fixes[0].works
    again = nanscope.verdict.diagnose.verdict([nanscope.load(first.snapshot)])
    assert str(again.incidents[0].origin) == str(place) and again.incidents[0].cause == first.cause  # as words: NaN is not NaN


def test_a_hook_that_only_looks_is_not_called_again(tmp_path: Path) -> None:
    """It may tell somebody, and it changes no gradient; the one beside it is found all the same."""
    told: list[float] = []

    def tell(grad: Tensor) -> None:
        told.append(float(grad.norm()))
        Path(tmp_path / "told").open("a").write("x")  # noqa: SIM115

    run = Run()
    with nanscope.watch(out=tmp_path / "run") as scope:
        logits = run.model(torch.ones(5, 3))
        logits.register_hook(tell)
        logits.register_hook(lambda grad: grad / run.scale)
        logits.square().sum().backward()
        torch.optim.SGD(run.model.parameters(), lr=0.1).step()
    assert (scope.verdict.incidents[0].origin.op, len(told)) == ("div", 1)
    assert Path(tmp_path / "told").read_text() == "x"


def test_where_a_hook_leads_to_a_bad_gradient_is_named(tmp_path: Path) -> None:
    """What it makes is finite, and a call of the loss makes a bad one of that."""
    run = Run()
    with nanscope.watch(out=tmp_path) as scope:
        logits = run.model(torch.ones(5, 3))
        grown = logits * 1e20
        grown.register_hook(lambda grad: grad * 1e30)
        grown.sum().backward()
        torch.optim.SGD(run.model.parameters(), lr=0.1).step()
    place = scope.verdict.incidents[0].origin
    assert (place.op, place.variable) == ("mul", "grown")


@pytest.mark.parametrize("name", CASES)
def test_a_hook_that_is_looked_into_was_called_as_often_as_ever(tmp_path: Path, name: str) -> None:
    """Weights, and what the hook counts and keeps, are to the bit what they are without anybody who looks."""
    plain, _ = train(name, None)
    watched, _ = train(name, tmp_path)
    assert (plain.calls, plain.total) == (watched.calls, watched.total)
    pairs = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in pairs)


def test_a_hook_on_the_loss_itself_is_found(tmp_path: Path) -> None:
    """Its gradient is one number, of no dimension."""
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    with nanscope.watch(model, out=tmp_path) as scope:
        loss = model(x).square().mean()
        loss.register_hook(lambda grad: grad * math.inf)
        loss.backward()
    (incident,) = scope.verdict.incidents
    assert incident.origin.op == "mul" and "grad * math.inf" in incident.sentence and not scope.verdict.gaps


def test_what_torch_has_put_there_for_its_ranks_is_not_called() -> None:
    """It gathers weights, and the other ranks do not look."""
    state = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_state").FSDPState()
    assert not acts(Hook(state._pre_backward)) and acts(Hook(lambda grad: grad * 2))
