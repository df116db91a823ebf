"""Lines of the trainer's between two modules: what goes wrong there, or before them, is told as what it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.capture.glue import Between, Glue, opened
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.verdict.incident import Incident


class Models:
    """Three in a row, and one that nobody trains."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.second, self.third, self.frozen = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(4))
        self.trained = [*self.first.parameters(), *self.second.parameters(), *self.third.parameters(), self.scale]


def spoil(weight: Tensor) -> None:
    with torch.no_grad():
        weight[0] = math.nan


IDS = torch.arange(6)


def plain(m: Models) -> Tensor:
    return m.third(torch.log(m.first(IDS) * 0))


def in_a_row(m: Models) -> Tensor:
    return m.third(m.second(torch.log(m.first(IDS) * 0)).tanh())


def before(m: Models) -> Tensor:
    return m.third(torch.log(IDS[:, None] * torch.zeros(4)))


def unnamed(m: Models) -> Tensor:
    return m.third(torch.sqrt(torch.zeros(6, 4) - 1))


def in_place(m: Models) -> Tensor:
    hidden = m.first(IDS) * 2
    hidden.mul_(0.0).sub_(1.0)
    return m.third(hidden.sqrt_())


def of_two(m: Models) -> Tensor:
    return m.third(torch.log((m.first(IDS) - m.second(torch.ones(6, 4))) * 0))


def without_gradient(m: Models) -> Tensor:
    with torch.no_grad():
        hidden = torch.log(m.first(IDS) * 0)
    return m.third(hidden)


def of_a_frozen_one(m: Models) -> Tensor:
    return m.third(m.second(torch.log(m.frozen(m.first(IDS)) * 0)))


def by_keyword(m: Models) -> Tensor:
    return m.third(input=torch.log(m.scale * m.first(IDS) * 0))


class Outer(nn.Module):
    """Modules and lines of their owner's in one forward."""

    def __init__(self, m: Models) -> None:
        super().__init__()
        self.first, self.third = m.first, m.third

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.third(torch.log(self.first(ids) * 0))
        return out


def lies_otherwise(m: Models) -> Tensor:
    hidden = torch.log(m.first(IDS) * 0).view(2, 3, 4)
    return m.third(hidden[:, :-1])


def inside_a_module(m: Models) -> Tensor:
    out: Tensor = Outer(m)(IDS)
    return out


def both(m: Models) -> Tensor:
    hidden = torch.log(m.first(IDS) * 0)
    return m.third(hidden) + hidden.sum() * 0


def backward(m: Models) -> Tensor:
    return m.third(torch.sqrt(m.first(IDS) * 0))


LINES: dict[str, tuple[Callable[[Models], Tensor], str]] = {
    "between": (plain, "log"),
    "three in a row": (in_a_row, "log"),
    "before the first": (before, "log"),
    "in place": (in_place, "sqrt"),
    "of two modules": (of_two, "log"),
    "without gradient": (without_gradient, "log"),
    "of a frozen module": (of_a_frozen_one, "log"),
    "by keyword, with a weight of its own": (by_keyword, "log"),
    "a part of it, which does not lie as its copy": (lies_otherwise, "log"),
    "inside a module": (inside_a_module, "log"),
    "the loss reads it, too": (both, "log"),
    "in its backward": (backward, "sqrt"),
}


def incident_of(values: Callable[[Models], Tensor], out: Path, spoils: Callable[[Models], None] = lambda m: None) -> Incident:
    """What is told of the third of four steps, the only one that goes wrong by itself."""
    m = Models()
    optimizer = torch.optim.SGD(m.trained, lr=0.01)
    with nanscope.watch(out=out) as scope:
        for step in range(1, 5):
            if step == 3:
                spoils(m)
            (values(m) if step == 3 else m.third(m.second(m.frozen(m.first(IDS)).tanh()).tanh())).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    incident = scope.verdict.incidents[0]
    assert incident.step == 3
    return incident


@pytest.mark.parametrize("name", LINES)
def test_a_line_between_two_modules_is_named(tmp_path: Path, name: str) -> None:
    """The operator, and the line that it stands in."""
    values, op = LINES[name]
    incident = incident_of(values, tmp_path)
    assert incident.origin.op == op and incident.origin.line is not None
    assert op in str(incident.origin.expression)


def test_what_a_model_is_given_is_no_loss(tmp_path: Path) -> None:
    """It has no name, and what is called loss stands behind the model: it is an activation."""
    incident = incident_of(unnamed, tmp_path)
    assert (incident.origin.op, incident.origin.role) == ("sqrt", "hidden")


WEIGHTS: dict[str, tuple[Callable[[Models], Tensor], Callable[[Models], None], str]] = {
    "of the module before": (lambda m: m.third(m.first(IDS).tanh()), lambda m: spoil(m.first.weight), "weight"),
    "of the module right before": (lambda m: m.third(m.first(IDS)), lambda m: spoil(m.first.weight), "weight"),
    "of the first of three": (
        lambda m: m.third(m.second(m.first(IDS).tanh()).tanh()), lambda m: spoil(m.first.weight), "weight",
    ),
    "of a frozen one": (lambda m: m.third(m.frozen(m.first(IDS)).tanh()), lambda m: spoil(m.frozen.weight), "weight"),
    "between them": (lambda m: m.third(m.scale * m.first(IDS)), lambda m: spoil(m.scale), "scale"),
}  # fmt: skip


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_behind_it_is_no_batch(tmp_path: Path, name: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module has made never came with the batch. small: the model is too large to be recorded, and followed call by call."""
    if small:
        monkeypatch.setattr("nanscope.capture.rerun.Reruns._tape", lambda self: Tape(64))
    values, spoils, weight = WEIGHTS[name]
    incident = incident_of(values, tmp_path, spoils)
    assert (incident.phase, incident.cause, incident.origin.op) == ("weights", "poisoned_weights", "parameter")
    assert math.isnan(incident.origin.value) and weight in str(incident.origin.variable)


class Once(nn.Module):
    """One that cannot be run again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.runs = nn.Linear(4, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs > 1:
            raise RuntimeError("once")
        out: Tensor = self.layer(x)
        return out


def looked_at(hidden: Callable[[nn.Module, Tensor], Tensor], out: Path) -> Incident:
    first, last, batch = nn.Linear(4, 4), Once(), torch.ones(3, 4)
    with nanscope.watch(out=out) as scope:
        last(hidden(first, batch)).mean().backward()
    return scope.verdict.incidents[0]


HIDDEN: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], tuple[str, str]]] = {
    "made": (lambda m, x: torch.log(m(x) * 0 - 1), ("forward", "log")),
    "data": (lambda m, x: torch.full((3, 4), math.nan), ("input", "input")),
    "data, moved": (lambda m, x: torch.full((3, 4), math.nan)[1:].neg(), ("input", "input")),
    "a number": (lambda m, x: torch.linalg.inv(m(x)[:, :3] * 0 + math.nan) @ x, ("input", "add")),
    "by nobody knows whom": (lambda m, x: nn.functional.rrelu(m(x)[:, :3] * 0 + math.nan, training=True) @ x, ("forward", "opaque")),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_an_argument_of_a_module_that_cannot_be_run_again(tmp_path: Path, name: str) -> None:
    """What led to it is known all the same; and what was computed is no data."""
    hidden, expected = HIDDEN[name]
    incident = looked_at(hidden, tmp_path)
    assert (incident.phase, incident.origin.op) == expected


def test_what_a_step_has_been_through_is_not_gone_over_again(tmp_path: Path) -> None:
    """A network that is called again and again, with lines between its calls: each step holds its own calls, and none of those before."""
    cell, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.01)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            hidden = torch.zeros(2, 4)
            for _ in range(5):
                hidden = cell(torch.randn(2, 4) + hidden).tanh()
            head(hidden).sum().backward()
            assert not scope._modules._waiting
            optimizer.step()
            optimizer.zero_grad()


def times_compressed(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(3).to_sparse_csr(), x)


def reduced(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(3).to_sparse_csr(), x, "amax")


def times_coordinates(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(3).to_sparse(), x)


def multiplied(x: Tensor) -> Tensor:
    return torch.eye(3).to_sparse() @ x


@pytest.mark.parametrize("product", [times_compressed, reduced, times_coordinates, multiplied])
def test_what_is_multiplied_by_a_sparse_matrix_is_followed(tmp_path: Path, product: Callable[[Tensor], Tensor]) -> None:
    """No program holds the matrix: what the call reads beside it is asked, and what made that."""
    weight = nn.Parameter(torch.ones(3, 2))
    with nanscope.watch(out=tmp_path) as scope:
        product(torch.log(weight - 1) * 0).sum().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.origin.op, incident.origin.index, str(incident.cause)) == ("log", (0, 0), "log_zero"), incident.sentence
    with nanscope.watch(out=tmp_path) as scope:
        product(weight * torch.tensor(math.nan)).sum().backward()
    (incident,) = scope.verdict.incidents
    assert incident.phase == "input", incident.sentence


class Rounds(torch.autograd.Function):
    """A custom function, which stands in the loss as one call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def test_what_a_custom_function_did_stands_where_it_was_done() -> None:
    """Which of two lines was the first is read off the program."""
    tape = Tape()
    with TapeMode(tape):
        x = torch.ones(2, requires_grad=True)
        first = x / torch.zeros(2)
        loss = (first + Rounds.apply(torch.log(-x))).sum()
    names = [call.name for call in opened(tape, tape.value_of(loss))[0].calls]
    assert [name for name in names if name in ("div", "log", "round")] == ["div", "log", "round"]


@pytest.mark.parametrize("lost", [False, True])
def test_several_values_are_taken_from_the_tape_as_each_alone(lost: bool) -> None:
    """Where a model is called part by part, what led to each argument is a part of one program; what is not there any more is left out."""
    tape, state = Tape(), torch.ones(4, requires_grad=True)
    made = []
    with TapeMode(tape):
        for step in range(5):
            state = torch.tanh(state * 2 + step)
            made.append(state[:2] + torch.arange(2.0))
            made.append(state.detach().log1p())
    values = [tape.value_of(one) for one in made]
    if lost:
        values[0].tensor = None
        del tape.known.made_by[values[0].id]
    together, tensors = tape.together(values)
    between = Between(together, tensors, tape.places(tensors))
    assert [between.has(value.id) for value in values] == [not lost, *[True] * 9]
    for value in values[lost:]:
        alone, own = tape.program(value)
        glue = Glue(("", 0), between, value.id)  # type: ignore[arg-type]
        assert glue.program.output == value.id and [call.outs for call in glue.program.calls] == [call.outs for call in alone.calls]
        assert glue.program.calls == tuple(
            replace(call, site=mine.site) for call, mine in zip(alone.calls, glue.program.calls, strict=True)
        )
        assert glue.tensors.keys() == own.keys() == {leaf.id for leaf in glue.program.leaves} == glue.apart().tensors.keys()
        assert glue.places == {leaf: tape.places([leaf])[leaf] for leaf in own}
