"""An optimizer's update is made once more on copies of all that it holds."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanscope
from nanscope.capture.update import update_again
from nanscope.causes import Cause
from nanscope.verdict.diagnose import diagnose
from nanscope.watching.rates import Rates


class Masters(torch.optim.SGD):
    """Steps weights of its own, counts, and divides by a scale of its own."""

    def __init__(self, params: Any, **extra: Any) -> None:
        super().__init__(params, lr=0.1)
        self.masters = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.count, self.me, self.scale = 0, self, torch.ones(())
        self.__dict__.update(extra)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for p, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            master -= p.grad / self.scale
            p.copy_(master)


def stepped(**extra: Any) -> tuple[Masters, nn.Parameter]:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Masters([weight], **extra)
    weight.grad = torch.ones(3)
    optimizer.step()
    return optimizer, weight


def test_nothing_of_the_optimizer_moves() -> None:
    """Masters, counters and weights are copies, also where the optimizer holds itself; hooks on it do not run."""
    optimizer, weight = stepped()
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook was run again"))
    version = weight._version
    made = update_again(optimizer, weight, "w", 1 << 20, first=True)
    assert made is not None and made[0].calls
    assert optimizer.count == 1 and torch.equal(optimizer.masters[0], torch.zeros(3)) and weight._version == version


WHY: dict[str, tuple[Callable[[], Any], str]] = {
    "a stream": (lambda: {"source": (n for n in range(3))}, "cannot be copied"),
    "too much": (lambda: {"history": torch.zeros(1 << 21)}, "more than"),
}


@pytest.mark.parametrize("name", WHY)
def test_an_update_that_cannot_be_made_again_is_said(tmp_path: Path, name: str) -> None:
    """The weight that went bad is named, with a note."""
    make, words = WHY[name]
    model = nn.Linear(2, 2)
    optimizer = Masters(model.parameters(), **make())
    with nanscope.watch(model, out=tmp_path, budget=1 << 20) as scope:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.scale = torch.zeros(())
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert incident.phase == "optimizer" and optimizer.count == 1
    assert [words in note.text for note in incident.notes if note.slug == "not_run_again"] == [True]


def test_masters_are_stepped_once(tmp_path: Path) -> None:
    """The update that divided by 0 is found, and the copies that it was found with are gone."""
    model = nn.Linear(2, 2)
    optimizer = Masters(model.parameters())
    with nanscope.watch(model, out=tmp_path) as scope:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.scale = torch.zeros(())
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.op, optimizer.count) == ("optimizer", "div", 1)
    assert all(math.isinf(float(master.flatten()[0])) for master in optimizer.masters)


class Natural(torch.optim.Optimizer):
    """A natural gradient: solves with products of a Hessian that it differentiates itself, out of a closure over the model."""

    def __init__(self, params: Any, data: bool = False) -> None:
        super().__init__(params, {})
        self.data = data

    def step(self, kl: Callable[[], torch.Tensor], size: float = 1.0) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        gradient = torch.cat([p.grad.reshape(-1) for p in params]) * size
        with torch.enable_grad():
            flat = torch.cat([one.reshape(-1) for one in torch.autograd.grad(kl(), params, create_graph=True)])
            product = torch.cat([one.reshape(-1) for one in torch.autograd.grad(flat.dot(gradient), params)])
        with torch.no_grad():
            length = gradient.dot(gradient) / gradient.dot(product)
            offset = 0
            for p in params:
                change = (length * gradient)[offset : offset + p.numel()].view_as(p)
                offset += p.numel()
                (p.data if self.data else p).sub_(1e-3 * change)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("last", [1, 3])
def test_an_update_that_takes_gradients_itself_is_looked_into(tmp_path: Path, by_name: bool, data: bool, last: int) -> None:
    """It cannot be made again without the closure that it was given: what it computed when it was made is told, with its line."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(16, 4)
    optimizer = Natural(model.parameters(), data)
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in range(1, last + 1):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            size = 0.0 if step == last else 1.0

            def kl() -> torch.Tensor:
                return model(x).square().sum()

            if by_name:
                optimizer.step(kl=kl, size=size)
            else:
                optimizer.step(kl, size)
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.phase, incident.cause, incident.origin.op) == (last, "optimizer", "zero_div_zero", "div")
    assert (incident.origin.variable, incident.origin.index) == ("length", ()) and "test_update.py:" in incident.sentence
    assert incident.sentence.startswith("the update of Natural made 0.weight non-finite: length = ")
    assert any(fix.works for fix in incident.fixes) and not [note for note in incident.notes if note.slug == "not_run_again"]


def solved(steps: int, data: bool) -> list[torch.Tensor]:
    """The weights after some steps of a natural gradient."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2), nn.Linear(3, 2)), torch.randn(16, 4)
    optimizer = Natural(model.parameters(), data)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step(lambda: model(x).square().sum())
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize("data", [False, True])
def test_listening_to_an_update_changes_nothing(tmp_path: Path, data: bool) -> None:
    """Weights are the same to the bit, with and without somebody who listens."""
    with nanscope.watch(out=tmp_path) as scope:
        watched = solved(4, data)
    assert scope.verdict.healthy and scope.steps == 4
    assert all(torch.equal(one, other) for one, other in zip(watched, solved(4, data), strict=True))


class Conjugate(Natural):
    """Solves with more than one product: what is taken in the second round comes of what went bad in the first."""

    def step(self, kl: Callable[[], torch.Tensor], size: float = 1.0) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        residual = torch.cat([p.grad.reshape(-1) for p in params]) * size
        direction, solved = residual.clone(), torch.zeros_like(residual)
        for _ in range(3):
            with torch.enable_grad():
                flat = torch.cat([one.reshape(-1) for one in torch.autograd.grad(kl(), params, create_graph=True)])
                product = torch.cat([one.reshape(-1) for one in torch.autograd.grad(flat.dot(direction), params)])
            length = residual.dot(residual) / direction.dot(product)
            solved = solved + length * direction
            residual = residual - length * product
            direction = residual + 0.5 * direction
        with torch.no_grad():
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params) - 1e-3 * solved, params)


def test_a_gradient_that_comes_of_the_origin_is_no_second_fault(tmp_path: Path) -> None:
    """Under an edit it would be another one: that the step heals then is not shown, and nothing speaks against it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(16, 4)
    optimizer = Conjugate(model.parameters())
    with nanscope.watch(model, out=tmp_path) as scope:
        model(x).square().mean().backward()
        optimizer.step(lambda: model(x).square().sum(), 0.0)
    (incident,) = scope.verdict.incidents
    assert (incident.cause, incident.origin.variable, incident.origin.index) == ("zero_div_zero", "length", ())
    assert [(fix.id, fix.proven) for fix in incident.fixes] == [("clamp_denominator", False)] and not incident.notes


class Agent(nn.Module):
    """Its networks are called one by one, and it itself never."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 1))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_has_the_name_that_it_has_in_the_largest_module(tmp_path: Path, compiled: bool) -> None:
    """Of an actor and a critic that are alike, the weight is named that went bad; a wrapper adds nothing to its name."""
    agent = Agent()
    wrapped = torch.compile(agent.critic, backend="eager") if compiled else agent.critic
    optimizer = torch.optim.SGD([{"params": agent.actor.parameters()}, {"params": agent.critic.parameters(), "lr": math.inf}], lr=0.1)
    with nanscope.watch(agent, out=tmp_path) as scope:
        x = torch.ones(1, 2)
        (agent.actor(x).sum() + wrapped(x).sum()).backward()  # type: ignore[operator]
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert "made critic.0.weight" in incident.sentence


@pytest.mark.parametrize(("kind", "given"), [(torch.optim.SGD, {}), (torch.optim.Adam, {}), (torch.optim.AdamW, {"weight_decay": 0.1})])
@pytest.mark.parametrize("rate", [math.inf, math.nan], ids=["infinite", "NaN"])
def test_a_setting_that_no_update_survives_is_named(tmp_path: Path, kind: Any, given: dict[str, Any], rate: float) -> None:
    """A learning rate that a schedule has spoilt is the reason, in the process and in the file, and no huge value of the weights."""
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1, **given)
    optimizer.param_groups[0]["lr"] = rate
    named = f"(lr = {'NaN' if math.isnan(rate) else '+inf'})"
    with nanscope.watch(model, out=tmp_path) as scope:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.cause) == ("optimizer", "bad_input") and f"{kind.__name__} {named}" in incident.sentence
    assert incident.snapshot is not None and named in diagnose(nanscope.load(incident.snapshot)).sentence


def test_a_setting_that_the_loop_has_worked_out_is_followed_to_what_made_it(tmp_path: Path) -> None:
    """A learning rate by the effective size of a batch, which weights that underflowed make 0 / 0: it went by way of Python."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        model(torch.ones(2, 3)).sum().backward()
        with torch.no_grad():
            shares = torch.exp(torch.tensor([-120.0, -130.0]))
            size = shares.sum() ** 2 / shares.square().sum()
        optimizer.param_groups[0]["lr"] = 0.1 * size.item()
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.cause, incident.origin.op, incident.origin.variable) == ("optimizer", "zero_div_zero", "div", "size")
    assert "SGD (lr = NaN)" in incident.sentence


class Preconditioned(torch.optim.Optimizer):
    """Writes what it makes of a gradient back into the gradient, as K-FAC does; one direction has no curvature."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__([weight], {"lr": 0.1, "damping": 0.0})
        self.curvature = torch.tensor([1.0, 0.0, 2.0])

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                natural = weight.grad / (self.curvature + self.param_groups[0]["damping"])
                weight.grad.copy_(natural)
                weight.add_(weight.grad, alpha=-0.1)


def test_an_optimizer_that_spoils_the_gradient_itself_is_named_with_its_line(tmp_path: Path) -> None:
    """The gradient was finite when the step began: the division in there is the origin, and no gradient that came in."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Preconditioned(weight)
    with nanscope.watch(out=tmp_path) as scope:
        (weight * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.op, incident.origin.variable, incident.origin.index) == ("optimizer", "div", "natural", (1,))
    assert incident.cause in ("zero_denominator", "zero_div_zero")


class Counts(torch.optim.Optimizer):
    """Divides by how often it has stepped, which only the first of its workers counts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"step": torch.zeros(1), "mean": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, rank: int = 0) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] += rank == 0
            state["mean"].lerp_(p.grad, 0.1)
            p.sub_(state["mean"] * (state["step"] / state["step"]))


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path, **given: Any) -> Any:
    with nanscope.watch(out=folder) as scope:
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step(**given)
    return scope.verdict.incidents[0]


def test_an_update_is_made_again_with_what_the_step_was_given(tmp_path: Path) -> None:
    """Without its argument it would have been another one, and the weight would be said to have been bad before."""
    model = nn.Linear(3, 2)
    incident = trained(Counts(model.parameters()), model, tmp_path, rank=3)
    assert (incident.phase, incident.cause, incident.origin.op) == ("optimizer", "zero_div_zero", "div")


@pytest.mark.parametrize("fresh", [True, False])
def test_what_an_optimizer_keeps_may_be_what_is_bad(tmp_path: Path, fresh: bool) -> None:
    """The weight was finite, and the update of finite numbers is: the state is told, and whether anybody had written to it."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with nanscope.watch(out=tmp_path) as scope:
        torch.use_deterministic_algorithms(fresh)  # torch fills fresh memory with NaN then
        for state in optimizer.state.values():
            state["exp_avg_sq"] = (torch.empty_like if fresh else lost)(state["exp_avg_sq"])
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    torch.use_deterministic_algorithms(False)
    incident = scope.verdict.incidents[0]
    assert (incident.phase, incident.origin.variable, incident.origin.role) == ("optimizer", "exp_avg_sq", "optimizer")
    assert "exp_avg_sq, of which AdamW makes the update of weight, is NaN at [0, 0] of [2, 3]" in incident.sentence
    assert incident.cause == ("uninitialized" if fresh else "unknown")


def lost(state: torch.Tensor) -> torch.Tensor:
    return torch.full_like(state, math.nan)


class Shrinks(torch.optim.Optimizer):
    """Divides by a scale that is 0 a step later in the first element than in the last one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            scale = state.setdefault("scale", torch.tensor([2.0, 2.0, 1.0]))
            p.sub_(p.grad / scale)
            state["scale"] = (scale - 1).clamp(min=0.0)


def test_of_an_update_that_is_made_again_the_element_is_told_that_went_bad(tmp_path: Path) -> None:
    """What the optimizer keeps has changed since: made once more, elements go bad that are finite in the weight."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = Shrinks([weight])
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(2):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
    assert torch.isfinite(weight).tolist() == [True, True, False]
    incident = scope.verdict.incidents[0]
    assert (incident.origin.op, incident.origin.index, incident.cause) == ("div", (2,), "zero_denominator")
    assert any(fix.works for fix in incident.fixes)
    assert nanscope.verdict.diagnose.verdict([nanscope.load(incident.snapshot)]).incidents[0].origin == incident.origin


class Restores(torch.optim.Optimizer):
    """What it divides by is put right again at the end of its step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"count": 4.0, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(0.1 * weight.grad / torch.tensor(group["count"]))
            group["count"] = 4.0


def test_of_an_update_that_does_not_come_out_again_no_formula_is_made_up(tmp_path: Path) -> None:
    """Its optimizer is told, where it is written, and why nothing more."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = Restores(model.parameters())
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in range(1, 4):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.param_groups[0]["count"] = 0.0 if step == 2 else 4.0
            optimizer.step()
    incident = scope.verdict.incidents[0]
    line = inspect.unwrap(Restores.step).__code__.co_firstlineno + 1
    assert "the update of Restores made weight" in incident.sentence, incident.sentence
    assert (incident.origin.op, incident.origin.line) == ("unknown", line)
    assert any(note.slug == "not_run_again" and "came out finite" in note.text for note in incident.notes), incident.notes


def test_an_epsilon_of_zero_is_named(tmp_path: Path) -> None:
    """Of a row that no loss has read the gradient is 0, and so is the average of its squares."""
    embedding = nn.Embedding(6, 4)
    optimizer = torch.optim.Adam(embedding.parameters(), eps=0.0)
    with nanscope.watch(out=tmp_path) as scope:
        embedding(torch.tensor([1, 2])).square().mean().backward()
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert incident.cause is Cause.EPS_UNDERFLOW and incident.fixes[0].id == "representable_eps"
    assert "The epsilon of the optimizer is 0" in incident.sentence and "1e-08 as epsilon" in incident.fixes[0].label


def test_a_learning_rate_that_has_just_jumped_is_told_of_a_loss_that_runs_away(tmp_path: Path) -> None:
    critic = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
    seen = torch.randn(32, 4)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 15):
            if step == 9:
                optimizer.param_groups[0]["lr"] = 10.0
            loss = (critic(seen).squeeze(-1) - 30 * seen.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    told = [note.text for incident in scope.verdict.incidents for note in incident.notes if note.slug == "rate_jumped"]
    assert told and set(told) == {"the learning rate went from 0.01 to 10 in step 9"}
    overflowed = next(incident for incident in scope.verdict.incidents if incident.cause is Cause.MAGNITUDE_OVERFLOW)
    assert ". The learning rate went from 0.01 to 10 in step 9. " in overflowed.sentence


def test_a_warmup_is_no_jump() -> None:
    weight = nn.Parameter(torch.zeros(()))
    optimizer, rates = torch.optim.SGD([weight], lr=0.0), Rates()
    for step, rate in enumerate([0.0, 1e-6, 2e-6, 3e-6, 2.5e-6], 1):
        optimizer.param_groups[0]["lr"] = rate
        rates.stepped([optimizer], step)
        assert not rates.in_words(step)
    optimizer.param_groups[0]["lr"] = 1e-3
    rates.stepped([optimizer], 6)
    assert [bool(rates.in_words(step)) for step in (5, 6, 22, 23)] == [False, True, True, False]
