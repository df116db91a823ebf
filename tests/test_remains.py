"""What a run leaves behind: a model that is spoilt without any step being bad is no healthy run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import NUMBERS_ARE_FILLED_IN
from torch import Tensor, nn

import nanscope
from nanscope.causes import Cause


class Masked(nn.Module):
    """Buffers as models have them: a mask of infinities, a placeholder of NaN that nobody reads, integers, half and empty ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))
        self.register_buffer("placeholder", torch.full((3,), math.nan))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(2).half())
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) @ (x.transpose(-1, -2) @ x + self.mask).softmax(-1)).relu()


def train(spoil: Callable[[nn.Sequential], object] = lambda model: None, steps: int = 4) -> nn.Sequential:
    """spoil: is called after the second step, in training mode nothing reads it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Masked(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()
        if step == 2:
            spoil(model)
    return model


def test_a_model_in_good_order_is_quiet(tmp_path: Path) -> None:
    """Masks, placeholders and counters are what they were."""
    with nanscope.watch(out=tmp_path) as scope:
        train()
    assert scope.verdict.healthy and scope.notes == [] and scope.verdict.gaps == ()


def test_statistics_that_went_bad_while_the_loss_was_fine(tmp_path: Path) -> None:
    """They are read in evaluation only: the next one would be NaN."""
    with nanscope.watch(out=tmp_path) as scope:
        model = train(lambda model: model[1].running_mean[2:].fill_(math.nan))  # type: ignore[operator,union-attr,index]
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.phase, incident.cause) == (3, "weights", Cause.POISONED_WEIGHTS)
    told = "the buffer 1.running_mean is NaN at [2] of [8] after the update: model[1].running_mean[2:].fill_(math.nan) wrote it there"
    assert told in scope.verdict.sentence and "and it was finite in step 2" in scope.verdict.sentence
    assert [note.slug for note in incident.notes] == ["left_behind"] and model is not None
    assert (scope.steps, scope.bad_steps) == (4, 1) and [entry.nonfinite for entry in scope.history.entries] == [False, False, True, False]


def test_statistics_of_a_model_that_nobody_optimizes(tmp_path: Path) -> None:
    """They are found when the block ends."""
    with nanscope.watch(out=tmp_path) as scope:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        for _ in range(2):
            model(torch.randn(6, 4)).sum().backward()
            model[1].running_var[0] = math.inf  # type: ignore[index,operator]
    told = "the buffer 1.running_var is +inf at [0] of [8] when the block ended: model[1].running_var[0] wrote it there, test_remains.py:"
    assert told in scope.verdict.sentence


def test_weights_that_were_spoilt_after_the_last_step(tmp_path: Path) -> None:
    """By hand, and nobody steps any more."""
    with nanscope.watch(out=tmp_path) as scope:
        model = train()
        model[0].weight.data[3, 1] = math.inf
    seen = (
        "the weight 0.weight is +inf at [3, 1] of [8, 4] when the block ended: model[0].weight.data[3, 1] wrote it there, test_remains.py:"
    )
    told = "made 0.weight non-finite: model[0].weight.data[3, 1] gave +inf, test_remains.py:" if NUMBERS_ARE_FILLED_IN else seen
    assert told in scope.verdict.sentence and ("it was finite in step 4" in scope.verdict.sentence) is not NUMBERS_ARE_FILLED_IN
    assert (scope.steps, scope.bad_steps) == (4, 1)


def test_what_is_bad_since_a_bad_step_is_not_told_twice(tmp_path: Path) -> None:
    """There is one cause."""
    with nanscope.watch(out=tmp_path) as scope:
        model = train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        (model(torch.randn(6, 4)).sum() * math.nan).backward()
        optimizer.step()
    assert [incident.step for incident in scope.verdict.incidents] == [5]


def test_a_weight_that_is_in_no_model(tmp_path: Path) -> None:
    """It belongs to an optimizer."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        weight.square().sum().backward()
        optimizer.step()
        weight.data[1] = math.nan
    assert not scope.verdict.healthy and scope.verdict.incidents[0].origin.index == (1,)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_weight_may_hold_what_it_wants(tmp_path: Path, frozen: bool) -> None:
    """Nobody trains it."""
    with nanscope.watch(out=tmp_path) as scope:
        model = train()
        model[3].bias.data.fill_(-math.inf)
        model[3].bias.requires_grad_(not frozen)
    assert scope.verdict.healthy == frozen


def by_hand(model: nn.Module, factor: float = 1.0) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.sub_(0.1 * parameter.grad / (parameter.grad.norm() * factor))
        parameter.grad = None


def trained_by_hand(out: Path, spoils: Callable[[nn.Linear, int], float]) -> nanscope.Scope:
    """Six steps of a loop that has no optimizer. spoils: is called before each, and returns what its update is divided by."""
    model = nn.Linear(4, 2)
    with nanscope.watch(model, out=out) as scope:
        for step in range(1, 7):
            factor = spoils(model, step)
            model(torch.randn(8, 4)).pow(2).mean().backward()
            with torch.no_grad():
                by_hand(model, factor)
    return scope


def test_an_update_of_the_loop_s_own_is_to_blame_for_what_it_writes(tmp_path: Path) -> None:
    """Infinities as well as NaN, with its line; what follows is a consequence."""
    scope = trained_by_hand(tmp_path, lambda model, step: float(step != 3))
    first, second = scope.verdict.incidents
    assert (first.step, first.phase, first.origin.op, first.reached["stepped"]) == (3, "optimizer", "div", "taken by hand")
    assert first.sentence.startswith("the update of the training loop made weight non-finite: ") and "test_remains.py:" in first.sentence
    assert (second.step, second.consequence_of, second.cause) == (4, 3, Cause.POISONED_WEIGHTS)
    assert "the update of step 3 wrote it there" in second.sentence and scope.verdict.aftermath[0].count == 3


def written_as(how: str, parameters: list[nn.Parameter], new: list[Tensor]) -> None:
    """Give weights other contents. how: as people write that."""
    if how == "vector_to_parameters":
        nn.utils.vector_to_parameters(torch.cat([one.reshape(-1) for one in new]), parameters)
        return
    for parameter, content in zip(parameters, new, strict=True):
        if how == "p.copy_":
            with torch.no_grad():
                parameter.copy_(content)
        elif how == "p.data.copy_":
            parameter.data.copy_(content)
        elif how == "p.data.add_":
            parameter.data.add_(content - parameter.data)
        elif how == "p.data = …":
            parameter.data = content
        elif how == "p[...] = …":
            with torch.no_grad():
                parameter[...] = content


@pytest.mark.parametrize("how", ["p.copy_", "p.data.copy_", "p.data.add_", "p.data = …", "p[...] = …", "vector_to_parameters"])
@pytest.mark.parametrize("last", [False, True])
def test_an_update_by_hand_is_looked_into_however_the_weights_are_written(tmp_path: Path, how: str, last: bool) -> None:
    """The length of a step is the root of a negative number: that line, and not the weights that nobody saw being written."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in range(1, 4 if last else 6):
            model.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            grads = [one.grad for one in model.parameters() if one.grad is not None]
            curvature = torch.tensor(-1.0 if step == 3 else 1.0) * grads[0].square().sum()
            length = torch.sqrt(curvature)
            weights = list(model.parameters())
            written_as(how, weights, [one.detach() - 0.1 * grad / length for one, grad in zip(weights, grads, strict=True)])
    first = scope.verdict.incidents[0]
    assert (first.step, first.phase, first.cause, first.origin.op) == (3, "optimizer", "sqrt_negative", "sqrt")
    assert (first.origin.variable, first.origin.index, first.reached["stepped"]) == ("length", (), "taken by hand")
    assert any(fix.works for fix in first.fixes)


def loads(model: nn.Linear, step: int) -> float:
    if step == 3:
        model.load_state_dict({name: torch.full_like(value, math.nan) for name, value in model.state_dict().items()})
    return 1.0


def test_weights_that_were_loaded_after_they_had_been_fine_are_poisoned(tmp_path: Path) -> None:
    """Memory that was never written it is not: they were finite, and the line that wrote to them is known."""
    first, second = trained_by_hand(tmp_path, loads).verdict.incidents
    assert (first.step, first.cause, second.step, second.consequence_of) == (3, Cause.POISONED_WEIGHTS, 4, 3)
    assert "was already NaN at [0, 0] of [2, 4] before the step: model.load_state_dict(" in first.sentence
    assert "wrote it there, test_remains.py:" in first.sentence and "and it was finite in step 1" in first.sentence


def one_step(model: nn.Module, out: Path) -> nanscope.Scope:
    with nanscope.watch(out=out) as scope:
        model(torch.ones(3, 4)).pow(2).mean().backward()
    return scope


def test_weights_that_are_bad_when_they_are_first_seen_may_have_come_so(tmp_path: Path) -> None:
    """A checkpoint of NaN is no memory that was never written, and nothing is said of that."""
    model = nn.Linear(4, 2)
    nn.init.constant_(model.weight, math.nan)
    (incident,) = one_step(model, tmp_path).verdict.incidents
    assert incident.cause is Cause.POISONED_WEIGHTS and "was already NaN at [0, 0] of [2, 4] before the step." in incident.sentence


def left_over(model: nn.Linear) -> None:
    model.weight.data[0] = torch.tensor([1e-41, math.nan, 4.6e-41, 0.3])


def filled(model: nn.Linear) -> None:
    torch.use_deterministic_algorithms(True)
    model.weight = nn.Parameter(torch.empty(2, 4))


@pytest.mark.parametrize("make", [left_over, filled])
def test_memory_that_was_never_written_is_told_by_what_it_holds(tmp_path: Path, make: Callable[[nn.Linear], None]) -> None:
    """Numbers that nobody computes, or what torch fills fresh memory with where it is told to."""
    model = nn.Linear(4, 2)
    try:
        make(model)
        (incident,) = one_step(model, tmp_path).verdict.incidents
    finally:
        torch.use_deterministic_algorithms(False)
    assert incident.cause is Cause.UNINITIALIZED


def test_memory_that_was_seen_to_be_made_and_not_to_be_written(tmp_path: Path) -> None:
    """Within the block, it is known."""
    with nanscope.watch(out=tmp_path) as scope:
        model = nn.Linear(4, 2)
        model.weight = nn.Parameter(torch.empty(2, 4))
        memory = model.weight.data.numpy()
        memory[:] = math.nan  # what may stand in it
        model(torch.ones(3, 4)).pow(2).mean().backward()
    assert scope.verdict.incidents[0].cause is Cause.UNINITIALIZED


def test_when_a_weight_was_last_finite_is_known_of_its_own_optimizer(tmp_path: Path) -> None:
    """The step of another one says nothing of it, and does not hide the line that wrote to it."""
    bad = torch.full((1, 2), math.nan)
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(4):
            models[step % 2](torch.ones(1, 2)).sum().backward()
            optimizers[step % 2].step()
            if step == 2:
                with torch.no_grad():
                    models[0].weight.copy_(bad)
        models[0](torch.ones(1, 2)).sum().backward()
        optimizers[0].step()
    assert "it was finite in step 3" in scope.verdict.sentence and "models[0].weight.copy_(bad) wrote it there" in scope.verdict.sentence


def test_what_is_left_bad_is_told_also_after_another_incident(tmp_path: Path) -> None:
    """A loss that was passed over has harmed nothing, and the weights that somebody spoils in the end are."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 6):
            loss = (model(torch.ones(1, 2)) * (math.inf if step == 2 else 1)).square().mean()
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.weight.data[0, 1] = math.nan
    first, last = scope.verdict.incidents
    assert (first.step, last.consequence_of) == (2, None)
    assert "a weight is NaN at [0, 1] of [1, 2] when the block ended" in last.sentence


@pytest.mark.parametrize("kind", ["finite and out of scale", "dropped by the trainer"])
def test_statistics_that_go_bad_after_or_in_a_bad_step_are_told(kind: str, tmp_path: Path) -> None:
    """Once, and of a step that was bad itself as its consequence: the weights are fine, and the next evaluation would not be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer, dropped = torch.optim.SGD(model.parameters(), lr=1e-30), kind == "dropped by the trainer"
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 10):
            batch = torch.randn(5, 4)
            if step == 5 and dropped:
                batch[1, 2] = math.inf
            if step == 7 and not dropped:
                model[:2](torch.full((2, 4), 3e38))
            loss = model(batch).square().mean() * (1e9 if step == 5 and not dropped else 1)
            optimizer.zero_grad()
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()
    found = [(i.step, i.phase, i.consequence_of) for i in scope.verdict.incidents]
    assert found == ([(5, "input", None), (6, "weights", 5)] if dropped else [(5, "forward", None), (7, "forward", None)])
    assert scope.verdict.status == "non-finite" and "the buffer 1.running_" in scope.verdict.incidents[1].sentence
    if dropped:
        assert (scope.verdict.incidents[0].origin.variable, scope.verdict.incidents[0].origin.index) == ("batch", (1, 2))
    assert "every step was fine" not in str(scope.verdict.to_json())


class Scaled(nn.Module):
    """Observations by their running scale. when: it is updated, before the observations are scaled, or afterwards."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.layer, self.when = nn.Linear(4, 2), when
        self.register_buffer("scale", torch.ones(4))

    def update(self, x: torch.Tensor) -> None:
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.9).add_(0.1 * (x.square().mean(0) - x.mean(0) ** 2))  # type: ignore[operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when == "before":
            self.update(x)
        out: torch.Tensor = self.layer(x / self.scale.sqrt())  # type: ignore[operator]
        if self.when == "after":
            self.update(x)
        return out


def scaled(out: Path, when: str, spoils: Callable[[Scaled, torch.Tensor], object], step: int = 2) -> nanscope.Scope:
    """Four steps. spoils: is called before one of them with the model and the batch."""
    torch.manual_seed(0)
    model = Scaled(when)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with nanscope.watch(model, out=out) as scope:
        for number in range(1, 5):
            x = torch.randn(6, 4)
            if number == step:
                spoils(model, x)
            optimizer.zero_grad()
            model(x).square().mean().clamp(max=1e3).backward()
            optimizer.step()
    return scope


def outlier(model: Scaled, x: torch.Tensor) -> None:
    x[3, 1] = 3e20


def test_the_call_that_spoilt_a_buffer_is_found_although_the_loss_was_fine(tmp_path: Path) -> None:
    """The forward pass of that step runs once more with finite statistics, and makes them bad again: there is the origin."""
    (incident, *_) = scaled(tmp_path, "after", outlier).verdict.incidents
    assert (incident.step, incident.phase, incident.origin.op, incident.origin.index) == (2, "forward", "pow", (3, 1)), incident.sentence
    assert incident.origin.function == "Scaled.update" and "the buffer scale keeps it" in incident.sentence


def test_the_call_that_spoilt_a_buffer_is_found_where_the_loss_reads_it_at_once(tmp_path: Path) -> None:
    """It was fine when the step began: it is not told as having been bad before."""
    (incident, *_) = scaled(tmp_path, "before", outlier).verdict.incidents
    assert (incident.step, incident.phase, incident.origin.op, incident.origin.index) == (2, "forward", "pow", (3, 1)), incident.sentence


def test_a_kernel_that_writes_statistics_without_saying_so_is_found(tmp_path: Path) -> None:
    """A batch norm whose batch is too large: its running variance is infinite, and its line is known."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in range(3):
            x = torch.randn(6, 4)
            x[3, 2] = 1e25 if step == 1 else 0
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.phase, incident.origin.op, incident.origin.index) == (2, "forward", "native_batch_norm", (2,))
    assert "the buffer 0.running_var keeps it" in incident.sentence


def load(model: Scaled, x: torch.Tensor) -> None:
    model.load_state_dict({**model.state_dict(), "scale": torch.tensor([1.0, math.nan, 1.0, 1.0])})


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_buffer_that_was_loaded_is_no_batch(when: str, tmp_path: Path) -> None:
    """A checkpoint brought it: the line that loaded it, and the last step in which it was finite."""
    (incident, *_) = scaled(tmp_path, when, load).verdict.incidents
    assert (incident.step, incident.phase, incident.cause) == (2, "weights", Cause.POISONED_WEIGHTS), incident.sentence
    assert (incident.origin.op, incident.origin.variable, incident.origin.index) == ("buffer", "scale", (1,))
    assert "model.load_state_dict(" in incident.sentence and "it was finite in step 1" in incident.sentence


def test_a_buffer_that_the_loss_itself_reads_is_no_batch(tmp_path: Path) -> None:
    """The line that loaded it is told."""
    torch.manual_seed(0)
    model = Scaled("never")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with nanscope.watch(model, out=tmp_path) as scope:
        for number in range(1, 4):
            x = torch.randn(6, 4)
            if number == 2:
                load(model, x)
            optimizer.zero_grad()
            (model(x * 0 + 1).sum(-1) * (x - model.scale).sum(-1)).mean().backward()  # type: ignore[operator]
            optimizer.step()
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.phase, incident.origin.op, incident.origin.variable) == (2, "weights", "buffer", "scale"), (
        incident.sentence
    )
    assert "model.load_state_dict(" in incident.sentence


class Normalised(nn.Module):
    """Moving statistics that take in what the model is given, before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean += 0.5 * (x.mean(0) - self.mean)
        out: torch.Tensor = self.head(x - self.mean)
        return out


def test_a_buffer_that_the_first_call_of_a_model_spoils_was_fine_before(tmp_path: Path) -> None:
    """It is not what was bad when the step began: what the model was given is."""
    observations = torch.ones(4, 3)
    observations[1, 2] = torch.inf
    model = Normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        model(observations).square().mean().backward()
        optimizer.step()
    incident = scope.verdict.incidents[0]
    assert (incident.phase, incident.origin.index) == ("input", (1, 2))


def through_a_view(weight: nn.Parameter, scale: Tensor) -> None:
    weight.view(2, 2, 4).mul_(scale.view(2, 2, 1))


def in_place(weight: nn.Parameter, scale: Tensor) -> None:
    weight.mul_(scale[:, None])


def behind_autograd(weight: nn.Parameter, scale: Tensor) -> None:
    weight.data = weight.data * scale[:, None]


def row_by_row(weight: nn.Parameter, scale: Tensor) -> None:
    for row, factor in enumerate(scale):
        weight[row] *= factor


@pytest.mark.parametrize("write", [through_a_view, in_place, behind_autograd, row_by_row])
@pytest.mark.parametrize("steps", [1, 2])
def test_what_the_loop_makes_of_a_weight_behind_the_optimizer_is_looked_into(
    tmp_path: Path, write: Callable[[nn.Parameter, Tensor], None], steps: int
) -> None:
    """Weights are clipped, rescaled, projected after the update: the root of a negative number is told, and not that a weight is bad."""

    def run() -> None:  # nobody holds the model any more when the block ends
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).pow(2).mean().backward()
            optimizer.step()
            with torch.no_grad():
                norms = model.weight.pow(2).sum(-1)
                norms[2] = -1.0
                write(model.weight, torch.sqrt(norms))

    with nanscope.watch(out=tmp_path) as scope:
        run()
    first = scope.verdict.incidents[0]
    assert (first.phase, first.cause, first.origin.op, first.origin.index) == ("optimizer", "sqrt_negative", "sqrt", (2,))
    assert "test_remains.py:" in first.sentence and any(fix.works for fix in first.fixes)
    assert not any(note.slug == "left_behind" for note in first.notes)


def test_a_weight_that_is_given_what_was_bad_before_is_only_written_to(tmp_path: Path) -> None:
    """What is copied into it was made by nobody who was seen: the line that wrote it is told."""
    model, bad = nn.Linear(4, 4), torch.full((4, 4), math.nan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, optimizer, out=tmp_path) as scope:
        model(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight.copy_(bad)
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.cause) == ("weights", "poisoned_weights")
    assert "model.weight.copy_(bad) wrote it there" in incident.sentence


def test_a_gradient_that_the_loop_has_computed_is_looked_into(tmp_path: Path) -> None:
    """Of no loss, as evolution strategies do: returns that are all alike are divided by their deviation."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, optimizer, out=tmp_path) as scope, torch.no_grad():
        noise, returns = torch.randn(5, 2, 3), torch.full((5,), -200.0)
        scores = (returns - returns.mean()) / returns.std()
        model.weight.grad = -torch.tensordot(scores, noise, dims=1)
        optimizer.step()
    first = scope.verdict.incidents[0]
    assert (first.phase, first.cause, first.origin.op, first.origin.variable) == ("optimizer", "zero_div_zero", "div", "scores")
    assert first.reached["weights"] == [1, 2] and any(fix.works for fix in first.fixes)


@pytest.mark.parametrize("how", ["times", "minus"])
def test_an_infinite_number_of_the_code_is_made_finite(tmp_path: Path, how: str) -> None:
    """`(1 - mask) * -inf` is NaN where nothing is masked; an infinite bound meets a density of 0."""
    torch.manual_seed(0)
    model, mask = nn.Linear(4, 5), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    with nanscope.watch(model, out=tmp_path) as scope:
        logits = model(torch.randn(3, 4))
        if how == "times":
            loss = (logits + (1.0 - mask) * float("-inf")).softmax(-1).pow(2).mean()
        else:
            bound = float("inf") - logits
            loss = (torch.exp(-(bound**2)) * bound).mean() + logits.mean()
        loss.backward()
    (incident,) = scope.verdict.incidents
    cause, op = {"times": ("inf_times_zero_mask", "mul"), "minus": ("inf_times_zero_coef", "rsub")}[how]
    assert (incident.cause, incident.origin.op, incident.fixes[0].id, incident.fixes[0].works) == (cause, op, "finite_mask_fill", True)


@pytest.mark.parametrize("later", [None, math.nan, math.inf])
def test_a_bias_that_forbids_a_token_is_a_mask(tmp_path: Path, later: float | None) -> None:
    """A weight of −inf from the beginning, which no update changes: loss and gradients are finite. Another bad element is told."""
    body, bias = nn.Linear(4, 5), torch.zeros(5)
    bias[3] = -math.inf
    body.bias = nn.Parameter(bias)
    optimizer = torch.optim.AdamW(body.parameters())
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(body(torch.randn(6, 4)), torch.zeros(6, dtype=torch.long)).backward()
            optimizer.step()
            if step == 4 and later is not None:
                with torch.no_grad():
                    body.bias[1] = later
    assert scope.verdict.healthy == (later is None), scope.verdict.sentence
    assert "1 of 5 elements of the weight bias were infinite when it came" in scope.verdict.notes[0].text


class Adapted(nn.Module):
    """Of two adapters one is in use."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.lm, self.used = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.other = nn.Parameter(torch.zeros(4), requires_grad=not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm(x) + self.used


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_weight_that_has_no_gradient_was_not_updated(tmp_path: Path, optimizer: Any, frozen: bool) -> None:
    """What the loop writes into it is told as that, and at the end of the block where no optimizer has it."""
    torch.manual_seed(0)
    model, count = Adapted(frozen), torch.zeros(())
    steps = optimizer([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in range(1, 5):
            steps.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            steps.step()
            if step == 2:
                with torch.no_grad():
                    model.other.copy_(model.used / count)
    incident = scope.verdict.incidents[0]
    assert "other" in incident.sentence and type(steps).__name__ not in incident.sentence, incident.sentence
    assert "model.other.copy_" in incident.sentence or "model.used / count" in incident.sentence, incident.sentence


def test_an_average_of_the_weights_that_goes_bad_is_told(tmp_path: Path) -> None:
    """It is what is saved in the end, and no loss reads it; it runs without gradient."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    average = copy.deepcopy(model).requires_grad_(False)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in range(1, 5):
            steps.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            steps.step()
            count = torch.tensor(0.0 if step == 4 else float(step))
            with torch.no_grad():
                for own, weight in zip(average.parameters(), model.parameters(), strict=True):
                    own.add_((weight - own) / count)
                average(torch.ones(2, 4))
    incident = scope.verdict.incidents[0]
    assert incident.origin.operands[-1][1] == 0 and "of a Linear that ran without gradient" in incident.sentence, incident.sentence


def with_a_slot(content: Tensor, out: Path, after: Callable[[nn.Parameter, int], None] = lambda spare, step: None) -> nanscope.Scope:
    """Train a model whose optimizer was given all its parameters, one that nobody trains or reads among them. after: each step."""
    model = nn.Linear(3, 1)
    model.spare = nn.Parameter(content, requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nanscope.watch(out=out) as scope:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).mean().backward()
            optimizer.step()
            after(model.spare, step)
    return scope


def test_what_nobody_trains_and_came_bad_is_no_harm_in_the_hands_of_an_optimizer(tmp_path: Path) -> None:
    assert with_a_slot(torch.full((2,), math.nan), tmp_path).verdict.healthy


def test_what_nobody_trains_and_goes_bad_is_told_though_an_optimizer_has_it(tmp_path: Path) -> None:
    def spoil(spare: nn.Parameter, step: int) -> None:
        if step == 1:
            with torch.no_grad():
                spare.mul_(math.nan)

    assert "spare" in with_a_slot(torch.ones(2), tmp_path, spoil).verdict.incidents[0].sentence
