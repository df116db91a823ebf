"""Gradients that the trainer's code takes itself: they are no data, and the walk goes on in what was differentiated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import nanscope
from nanscope.verdict.incident import Incident


class Critic(nn.Module):
    """Its backward is NaN where its input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        distance = x.square().sum(-1, keepdim=True).sqrt()
        out: Tensor = self.linear(x) + distance
        return out


def batch() -> Tensor:
    x = torch.arange(1.0, 25.0).reshape(6, 4) / 24
    x[3] = 0
    return x


def distance(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


def by_autograd(model: Critic) -> Tensor:
    x = batch().requires_grad_()
    (force,) = torch.autograd.grad(distance(x).sum(), x)
    return (model(x.detach() + 1) - force).square().mean()


def weighted(model: Critic) -> Tensor:
    x = batch().requires_grad_()
    (force,) = torch.autograd.grad(distance(x), x, torch.full((6,), 0.5))
    return (model(x.detach() + 1) - force).square().mean()


def of_two(model: Critic) -> Tensor:
    x = batch().requires_grad_()
    (force,) = torch.autograd.grad([x.sum(), distance(x).mean()], x)
    return (model(x.detach() + 1) - force).square().mean()


def of_what_was_computed(model: Critic) -> Tensor:
    x = (batch() * 2).requires_grad_()
    y = x * 1
    (force,) = torch.autograd.grad(distance(y).sum(), y)
    return (model(x.detach() + 1) - force).square().mean()


def penalty(model: Critic) -> Tensor:
    x = batch().requires_grad_()
    (force,) = torch.autograd.grad((model(x + 1).mean() + distance(x)).sum(), x, create_graph=True)
    return (force.square().sum(-1) - 1).square().mean() + model(x.detach() + 1).mean()


def by_a_transform(model: Critic) -> Tensor:
    x = batch()
    force = torch.func.vmap(torch.func.grad(lambda one: one.square().sum().sqrt()))(x)
    return (model(x + 1) - force).square().mean()


def in_a_model(model: Critic) -> Tensor:
    x = batch().requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x)
    return (model(x.detach() + 1) - force).square().mean()


def in_a_model_twice(model: Critic) -> Tensor:
    x = batch().requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (force.square().sum(-1) - 1).square().mean() + model(x.detach() + 1).mean()


def trained(values: Callable[[Critic], Tensor], out: Path) -> Incident:
    torch.manual_seed(0)
    model = Critic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=out) as scope:
        loss = values(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return scope.verdict.incidents[0]


TAKEN = [by_autograd, weighted, of_two, of_what_was_computed, penalty, by_a_transform, in_a_model, in_a_model_twice]


@pytest.mark.parametrize("values", TAKEN)
def test_a_gradient_that_the_code_took_itself_is_no_data(tmp_path: Path, values: Callable[[Critic], Tensor]) -> None:
    """It went bad in the backward of a root, which has a line and a fix that was seen to work."""
    incident = trained(values, tmp_path)
    assert (incident.phase, incident.origin.op, incident.origin.index[0]) == ("backward", "sqrt", 3), incident.sentence
    assert "sqrt()" in dict(incident.origin.source)[incident.origin.line or 0] and "came in" not in incident.sentence
    assert any(fix.works for fix in incident.fixes) and incident.reproduction.words == ""


def test_a_value_that_was_bad_before_it_was_differentiated_is_the_origin(tmp_path: Path) -> None:
    """In forward: the logarithm, and not what its backward made of it."""

    def values(model: Critic) -> Tensor:
        x = batch().requires_grad_()
        (force,) = torch.autograd.grad(torch.log(x).sum().square(), x)
        return (model(x.detach() + 1) - force).square().mean()

    incident = trained(values, tmp_path)
    assert (incident.phase, incident.origin.op, incident.origin.index) == ("forward", "log", (3, 0)), incident.sentence


def added(model: Critic, x: Tensor, delta: Tensor) -> Tensor:
    return model(x + delta)


def alone(model: Critic, x: Tensor, delta: Tensor) -> Tensor:
    """The attacked batch itself is what carries the gradient."""
    return model(delta)


def by_hand(model: Critic, x: Tensor, delta: Tensor) -> Tensor:
    return functional.linear(x + delta, model.linear.weight)


def scaled(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("taken", [False, True], ids=["left by backward", "taken"])
@pytest.mark.parametrize("given", [added, alone, by_hand])
def test_what_is_made_of_a_gradient_and_gets_one_is_no_data(
    tmp_path: Path, given: Callable[[Critic, Tensor, Tensor], Tensor], taken: bool
) -> None:
    """An attack takes a step along a gradient that is 0 in one row, and the next pass starts at what came of it."""
    torch.manual_seed(0)
    model, x = Critic(), torch.arange(1.0, 25.0).reshape(6, 4) / 24
    margin = torch.tensor([9.0, 9.0, -9.0, 9.0, 9.0, 9.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with nanscope.watch(out=tmp_path) as scope:
        optimizer.zero_grad()
        delta = x * 1 if given is alone else x * 0.1
        for _ in range(2):
            delta.requires_grad_()
            loss = functional.relu(given(model, x, delta)[:, 0] + margin).sum()
            if taken:
                (gradient,) = torch.autograd.grad(loss, delta, retain_graph=True)
            loss.backward()
            gradient = gradient if taken else delta.grad.clone()
            delta = (delta + 0.1 * scaled(gradient)).detach()
        optimizer.step()
    (incident,) = scope.verdict.incidents[:1]
    assert (incident.cause, incident.origin.op, incident.origin.index) == ("zero_div_zero", "div", (2, 0)), incident.sentence
    assert "gradient / gradient.norm" in (incident.origin.expression or "") and incident.origin.role == "grad", incident.sentence
    assert any(fix.works for fix in incident.fixes if fix.executed), incident.fixes


def test_gradients_of_a_transform_that_an_optimizer_steps_on(tmp_path: Path) -> None:
    """No backward pass of the block made them: what the transform differentiated tells why they are bad."""
    model, x = nn.Linear(4, 1), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        grads = torch.func.grad(lambda w: (x @ w["weight"].t() + torch.log(x[:, :1])).mean() ** 2)(weights)
        for name, weight in model.named_parameters():
            weight.grad = grads.get(name)
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.op, incident.origin.index) == ("forward", "log", (3, 0)), incident.sentence


def test_a_gradient_that_came_with_the_batch_is_data(tmp_path: Path) -> None:
    """Nobody here took it."""
    force = torch.zeros(6, 4)
    force[3, 1] = torch.nan
    incident = trained(lambda model: (model(batch()) - force).square().mean(), tmp_path)
    assert (incident.phase, incident.origin.variable, incident.origin.index) == ("input", "force", (3, 1))


def test_what_was_differentiated_is_let_go_of(tmp_path: Path) -> None:
    """When the gradient is gone: a hundred of them hold no more than a few do."""
    with nanscope.watch(out=tmp_path) as scope:
        held = []
        for _ in range(100):
            x = torch.ones(500, requires_grad=True)
            (force,) = torch.autograd.grad(x.square().sin().sum(), x)
            held.append(scope._tape.held)
            del x, force
    assert max(held[50:]) <= max(held[:50])


def in_chunks(hidden: Tensor, head: nn.Linear, old: Tensor) -> Tensor:
    """As a chunked loss does: each part is differentiated by itself, and the model is given what they come to."""
    handed = torch.zeros_like(hidden)
    for rows in (slice(0, 3), slice(3, 6)):
        part = hidden[rows].detach().requires_grad_()
        ratio = torch.exp(head(part).squeeze(-1) - old[rows])
        found = torch.autograd.grad(-ratio.mean(), [part, *head.parameters()])
        handed[rows] = found[0]
        for weight, gradient in zip(head.parameters(), found[1:], strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
    return handed


def by_hand(hidden: Tensor, head: nn.Linear, old: Tensor) -> Tensor:
    """The gradient of a loss that nobody writes down."""
    ratio = torch.exp(head(hidden.detach()).squeeze(-1).detach() - old)
    return -ratio[:, None] * head.weight.detach() / len(ratio)


@pytest.mark.parametrize("handed", [in_chunks, by_hand])
def test_a_gradient_that_backward_was_handed_by_the_code_of_the_loop(
    tmp_path: Path, handed: Callable[[Tensor, nn.Linear, Tensor], Tensor]
) -> None:
    """No other rank has sent it: what made it has a line, and what is done about that."""
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1e-3)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 7):
            old = torch.zeros(6)
            old[4] -= 200.0 * (step == 5)
            optimizer.zero_grad()
            hidden = body(torch.randn(6, 4))
            hidden.backward(handed(hidden, head, old))
            optimizer.step()
    incident = scope.verdict.incidents[0]
    origin = incident.origin
    assert (incident.step, incident.cause, origin.op, origin.variable) == (5, "exp_overflow", "exp", "ratio"), incident.sentence
    assert "handed" not in incident.sentence and any(fix.works for fix in incident.fixes)


class Logs(nn.Module):
    """The logarithm of its input, in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.log(x)


def test_a_model_that_a_transform_calls_is_no_batch(tmp_path: Path) -> None:
    """It cannot be run again outside of the transform: what it computes there is recorded at once."""
    reference = Logs()

    def values(model: Critic) -> Tensor:
        with torch.no_grad():
            wanted = torch.func.vmap(reference)(batch())
        return (model(batch() + 1) - wanted).square().mean()

    incident = trained(values, tmp_path)
    assert (incident.phase, incident.origin.op, incident.origin.index) == ("forward", "log", (3, 0)), incident.sentence
    assert incident.origin.function == "Logs.forward"


def test_a_weight_that_a_transform_is_given_is_a_weight(tmp_path: Path) -> None:
    """Detached, as a dictionary: it lies where the weight of the model does, and whoever detached it wrote nothing."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        with torch.no_grad():
            model.weight[0, 2] = torch.nan
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        grads = torch.func.grad(lambda w: torch.func.functional_call(model, w, (batch(),)).square().mean())(weights)
        for name, weight in model.named_parameters():
            weight.grad = grads[name]
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.variable, incident.origin.index) == ("weights", "weight", (0, 2)), incident.sentence
    assert "detach" not in incident.sentence


@pytest.mark.parametrize("by", ["torch.func.grad", "autograd.grad"])
def test_gradients_that_the_loop_takes_itself_are_not_foreign(tmp_path: Path, by: str) -> None:
    """They were seen to be made, with the line that made them bad."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(weights: dict[str, Tensor], x: Tensor, mask: Tensor) -> Tensor:
        return (torch.func.functional_call(model, weights, (x,)) * mask).sum() / mask.sum()

    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 5):
            x, mask = torch.randn(4, 3), torch.ones(4, 2) * (step != 3)
            weights = dict(model.named_parameters())
            if by == "torch.func.grad":
                grads = torch.func.grad(loss_of)({name: one.detach() for name, one in weights.items()}, x, mask)
            else:
                found = torch.autograd.grad(loss_of(weights, x, mask), list(weights.values()))
                grads = dict(zip(weights, found, strict=True))
            for name, weight in weights.items():
                weight.grad = grads[name]
            optimizer.step()
    assert scope.verdict.incidents[0].origin.op == "div", scope.verdict.sentence
    assert not any(note.slug == "foreign_gradients" for note in scope.notes)
