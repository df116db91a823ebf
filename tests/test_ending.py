"""When a step is over that no optimizer takes: dropped by its trainer, taken by hand, or still running."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanscope
from nanscope.watching.ending import Ending
from nanscope.watching.recording import Recording

NAN = math.nan


def norm_of(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def watched(path: Path, loop: Callable[[nn.Module, torch.optim.Optimizer], None], model: nn.Module | None = None) -> nanscope.Scope:
    """Run a loop over a small model under watch."""
    model = model if model is not None else nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with nanscope.watch(out=path) as scope:
        loop(model, torch.optim.AdamW(model.parameters()))
    return scope


@pytest.fixture(params=["at once", "late"])
def looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are read when backward has ended, or, as on a GPU, not before somebody has to know."""
    if request.param == "late":
        monkeypatch.setattr(Recording, "waits", True)


def told(scope: nanscope.Scope) -> list[tuple[int, str | None, bool]]:
    return [(entry.step, entry.stepped, entry.nonfinite) for entry in scope.history.entries]


SKIPPED = "skipped by the trainer"


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("zero_first", [True, False])
def test_a_step_that_the_trainer_drops_keeps_its_number(tmp_path: Path, to_none: bool, zero_first: bool) -> None:
    """On a bad norm optimizer.step is not called but zero_grad: NaN in steps 2 and 4 of 5 is told as 2 and 4."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(1, 6):
            if zero_first:
                optimizer.zero_grad(set_to_none=to_none)
            model(torch.randn(8, 4) * (NAN if step in (2, 4) else 1)).square().mean().backward()
            if norm_of(model).isfinite():
                optimizer.step()
            if not zero_first:
                optimizer.zero_grad(set_to_none=to_none)

    scope = watched(tmp_path, loop)
    taken = (None, False)
    assert told(scope) == [(1, *taken), (2, SKIPPED, True), (3, *taken), (4, SKIPPED, True), (5, *taken)]
    assert [(i.step, i.reached["stepped"], i.cause) for i in scope.verdict.incidents] == [
        (2, SKIPPED, "bad_input"),
        (4, SKIPPED, "bad_input"),
    ]
    assert (scope.steps, scope.bad_steps, scope.skipped) == (5, 2, 0)
    assert all("optimizer step skipped by the trainer" in incident.headline for incident in scope.verdict.incidents)


class Pole(nn.Module):
    """Finite forward, and a backward that is NaN where an input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        root = torch.where(x == 0, torch.zeros_like(x), torch.sqrt(self.scale(x).abs() * (x != 0)))
        return root.sum(-1)


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("last", [False, True])
def test_a_nan_that_only_the_trainer_s_norm_has_seen_is_an_incident(tmp_path: Path, last: bool) -> None:
    """The loss is finite, so is all at its edge; the model's own backward made it, and the trainer has dropped the gradients."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(1, 3 if last else 5):
            x = torch.ones(3, 4)
            x[0, 0] = 0.0 if step == 2 else 1.0
            model(x).mean().backward()
            if norm_of(model).isfinite():
                optimizer.step()
            optimizer.zero_grad()

    scope = watched(tmp_path, loop, Pole())
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.phase, incident.origin.op) == (2, "backward", "sqrt"), incident.sentence
    assert (scope.bad_steps, scope.steps) == (1, 2 if last else 4) and Path(str(incident.snapshot)).is_file()
    assert told(scope)[1] == (2, SKIPPED, True)


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("measured", [False, True])
def test_a_finite_loss_whose_gradient_was_dropped_is_not_said_to_be_absorbed(tmp_path: Path, measured: bool) -> None:
    """Nobody can count gradients that are gone; that the trainer dropped them says enough."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(1, 4):
            values = model(torch.ones(8, 4)).squeeze(-1)
            divisor = torch.tensor([0.0 if step == 2 else 1.0] + [1.0] * 7)
            torch.where(divisor == 0, 0.0, values / divisor).mean().backward()
            fine = (
                norm_of(model).isfinite()
                if measured
                else all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
            )
            if fine:
                optimizer.step()
            optimizer.zero_grad()

    scope = watched(tmp_path, loop)
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.phase, incident.origin.op) == (2, "backward", "div") and "stayed clean" not in incident.sentence
    assert scope.notes == [] and told(scope)[1] == (2, SKIPPED, True)


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize(("bad", "last"), [((1,), 2), ((1, 2), 2), ((1,), 3)])
def test_gradients_that_come_with_the_last_micro_batch_are_waited_for(tmp_path: Path, drops: bool, bad: tuple[int, ...], last: int) -> None:
    """A sharded model keeps them elsewhere until then: the first micro-batch made the NaN, it was not absorbed, and no clip did it.

    last: the micro-batch whose backward hands them over, a third one for nobody: they come when all are over.
    """

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        kept: dict[nn.Parameter, Tensor] = {}

        def keep(parameter: nn.Parameter) -> None:
            kept[parameter] = kept.get(parameter, 0) + parameter.grad  # type: ignore[operator]
            parameter.grad = kept[parameter] if micro == last else None

        hooks = [parameter.register_post_accumulate_grad_hook(keep) for parameter in model.parameters()]
        for step in range(1, 4):
            for micro in (1, 2):
                values = model(torch.ones(8, 4)).squeeze(-1)
                divisor = torch.tensor([0.0 if step == 2 and micro in bad else 1.0] + [1.0] * 7)
                torch.where(divisor == 0, 0.0, values / divisor).mean().backward()
            for parameter in model.parameters():
                parameter.grad = kept.pop(parameter)
            if norm_of(model).isfinite() or not drops:
                optimizer.step()
            optimizer.zero_grad()
        for hook in hooks:
            hook.remove()

    scope = watched(tmp_path, loop)
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.micro_batch, incident.origin.op, incident.cause) == (2, 1, "div", "where_grad_trap")
    assert "stayed clean" not in incident.sentence and "clip" not in incident.sentence
    assert scope.notes == [] and told(scope)[1] == (2, SKIPPED if drops else None, True)


@pytest.mark.usefixtures("looked_at")
def test_a_step_that_is_dropped_for_its_size_is_one(tmp_path: Path) -> None:
    """A trainer may drop a step with a finite norm: healthy, and counted as its loop counts."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            model(torch.randn(8, 4)).square().mean().backward()
            if step != 1:
                optimizer.step()
            optimizer.zero_grad()

    scope = watched(tmp_path, loop)
    assert told(scope) == [(1, None, False), (2, SKIPPED, False), (3, None, False), (4, None, False)] and scope.verdict.healthy


def test_gradients_that_stay_are_accumulated(tmp_path: Path) -> None:
    """Also where they were clipped, scaled or replaced between two micro-batches."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            for micro in range(3):
                model(torch.randn(8, 4)).square().mean().backward()
                norm_of(model)
                for parameter in model.parameters():
                    parameter.grad = None if parameter.grad is None else parameter.grad * (micro + 1)
            optimizer.step()
            optimizer.zero_grad()

    scope = watched(tmp_path, loop)
    assert [(entry.step, entry.micro_batches) for entry in scope.history.entries] == [(1, 3), (2, 3)]


@torch.no_grad()
def descend(model: nn.Module, to_none: bool, data: bool = False) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            (parameter.data if data else parameter).sub_(parameter.grad, alpha=1e-3)
            if to_none:
                parameter.grad = None
            else:
                parameter.grad.zero_()


@pytest.mark.parametrize("to_none", [True, False])
def test_steps_that_are_taken_by_hand_are_steps(tmp_path: Path, to_none: bool) -> None:
    """No optimizer at all: the weights were written, the gradients dropped."""

    def loop(model: nn.Module, _: torch.optim.Optimizer) -> None:
        for step in range(1, 5):
            model(torch.randn(8, 4) * (NAN if step == 3 else 1)).square().mean().backward()
            descend(model, to_none)

    scope = watched(tmp_path, loop)
    assert [(step, stepped) for step, stepped, _ in told(scope)] == [(n, "taken by hand") for n in range(1, 5)]
    assert scope.verdict.incidents[0].step == 3


def test_a_write_of_the_step_before_does_not_end_a_step_between_two_micro_batches(tmp_path: Path) -> None:
    """`p.data.sub_(…)` is a write that a weight does not count: it belongs to the step after whose backward pass it was made."""

    def loop(model: nn.Module, _: torch.optim.Optimizer) -> None:
        for _step in range(3):
            for _part in range(2):
                model(torch.randn(8, 4)).square().mean().backward()
            descend(model, True, data=True)

    scope = watched(tmp_path, loop)
    assert [(step, stepped) for step, stepped, _ in told(scope)] == [(n, "taken by hand") for n in (1, 2, 3)]


def surgery(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each task's gradient by itself, then their mean."""
    hidden = model(torch.randn(8, 4))
    found = []
    for weight in (1.0, 2.0, 3.0):
        optimizer.zero_grad()
        (hidden * weight).square().mean().backward(retain_graph=True)
        found.append([parameter.grad for parameter in model.parameters()])
    for parameter, *grads in zip(model.parameters(), *found, strict=True):
        parameter.grad = torch.stack(grads).mean(0)
    optimizer.step()


def sharpness_aware(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A push uphill, a second pass there, and back."""
    x = torch.randn(8, 4)
    model(x).square().mean().backward()
    with torch.no_grad():
        push = [parameter.grad * 0.05 for parameter in model.parameters() if parameter.grad is not None]
        for parameter, by in zip(model.parameters(), push, strict=True):
            parameter.add_(by)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter, by in zip(model.parameters(), push, strict=True):
            parameter.sub_(by)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("iteration", [surgery, sharpness_aware])
def test_gradients_that_are_dropped_within_a_step_end_none(
    tmp_path: Path, iteration: Callable[[nn.Module, torch.optim.Optimizer], None]
) -> None:
    """Gradient surgery and a look uphill take several backward passes to one step."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(3):
            iteration(model, optimizer)

    scope = watched(tmp_path, loop)
    assert [(step, stepped) for step, stepped, _ in told(scope)] == [(n, None) for n in range(1, 5)] and scope.verdict.healthy


def test_a_closure_that_drops_gradients_ends_no_step(tmp_path: Path) -> None:
    """LBFGS zeroes them before each of the evaluations that make one step."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 3)) - 1).square().mean()
        loss.backward()
        return loss

    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            optimizer.step(closure)
    assert [entry.step for entry in scope.history.entries] == [1, 2, 3]


def mended_in_a_closure(path: Path, reentrant: bool, finite_loss: bool) -> nanscope.Scope:
    """The optimizer asks for the loss within its step; what went bad in the second one is repaired at once."""
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        x = torch.ones(8, 4, requires_grad=True)
        values = checkpoint(model, x, use_reentrant=True) if reentrant else model(x)
        divisor = torch.tensor([0.0 if step[0] == 2 else 1.0] + [1.0] * 7)
        quotient = values / divisor
        loss: Tensor = torch.where(divisor == 0, 0.0, quotient).mean() if finite_loss else (quotient * 0).mean()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.nan_to_num_(0, 0, 0)
        norm_of(model)
        return loss.detach().nan_to_num(0, 0, 0)

    step = [0]
    with nanscope.watch(out=path) as scope:
        for step[0] in (1, 2, 3):
            optimizer.step(closure)
    return scope


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_bad_loss_of_a_closure_is_told_before_its_step_is_over(tmp_path: Path, reentrant: bool) -> None:
    """Nothing asks after the step, and nothing is left of it: neither loss nor gradient nor weight."""
    scope = mended_in_a_closure(tmp_path, reentrant, finite_loss=False)
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.origin.op) == (2, "div") and scope.notes == [] and not scope.verdict.gaps
    assert [bad for *_, bad in told(scope)] == [False, True, False]


@pytest.mark.parametrize("reentrant", [True, False])
def test_bad_gradients_of_a_closure_are_told_before_they_are_repaired(tmp_path: Path, reentrant: bool) -> None:
    """Also where the model ran without gradient, as a reentrant checkpoint runs it: they did arrive, and are not called absorbed."""
    scope = mended_in_a_closure(tmp_path, reentrant, finite_loss=True)
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.origin.op) == (2, "div") and scope.notes == []


class Trap(nn.Module):
    """Drops what overflows; only its backward meets it again. armed: it overflows."""

    armed = False

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        raised = torch.exp(x + 1e3 * self.armed)
        found: Tensor = self.last(torch.where(raised < float("inf"), raised, x))
        return found


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_that_go_bad_in_a_closure_are_no_matter_of_the_update(tmp_path: Path, clears: bool) -> None:
    """Lightning takes each of its steps with a closure: what the optimizer will step on is asked for when the closure has differentiated,
    and the history has the norm of these gradients, not of those that were there before."""
    model = Trap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        norms.append(float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()))
        return loss

    with nanscope.watch(out=tmp_path) as scope:
        for step in (1, 2):
            model.armed = step == 2
            optimizer.step(closure)
            if clears:
                optimizer.zero_grad()
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.phase, incident.cause, incident.origin.variable) == (2, "backward", "where_grad_trap", "raised")
    assert incident.reached["gradients"] == [2, 4] and incident.reached["weights"] == [2, 4] and incident.reached["stepped"] == "taken"
    assert scope.history.entries[0].grad_norm == pytest.approx(norms[0])


def test_our_own_failure_to_see_an_end_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on, no incident is lost, and the verdict says what was not seen."""
    monkeypatch.setattr(Ending, "became", None)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(1, 4):
            model(torch.randn(8, 4) * (NAN if step == 2 else 1)).square().mean().backward()
            if norm_of(model).isfinite():
                optimizer.step()
            optimizer.zero_grad()

    scope = watched(tmp_path, loop)
    assert [incident.step for incident in scope.verdict.incidents] == [2] and scope.steps == 2
    assert [gap.slug for gap in scope.verdict.gaps] == ["step-ends-failed"]


class Trapped(nn.Module):
    """Divides by the length of a row where that is not 0, and differentiates where it is, too: the loss stays finite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, width, bias=False), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        length = hidden.norm(dim=-1, keepdim=True)
        return self.last(torch.where(length > 0, hidden / length, hidden))  # type: ignore[no-any-return]


ASKED: dict[str, Callable[[list[Tensor]], bool]] = {  # how a loop asks whether its gradients are finite
    "each": lambda grads: all(grad.isfinite().all() for grad in grads),
    "any that is not": lambda grads: not any(torch.isnan(grad).any() or torch.isinf(grad).any() for grad in grads),
    "their norm": lambda grads: bool(torch.stack([grad.norm() for grad in grads]).norm().isfinite()),
    "a number": lambda grads: math.isfinite(torch.stack([grad.norm() for grad in grads]).norm().item()),
    "a sum": lambda grads: math.isfinite(sum(grad.pow(2).sum().item() for grad in grads)),
    "in one": lambda grads: bool(torch.cat([grad.flatten() for grad in grads]).isfinite().all()),
    "without gradients": torch.no_grad()(lambda grads: all(not grad.isnan().any() for grad in grads)),
}
DROPPED: dict[str, Callable[[nn.Module], None]] = {
    "to none": lambda model: model.zero_grad(),
    "to zero": lambda model: model.zero_grad(set_to_none=False),
}


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("width", [8, 1 << 18], ids=["small", "large"])
@pytest.mark.parametrize("drops", DROPPED)
@pytest.mark.parametrize("asks", ASKED)
def test_gradients_that_the_loop_has_asked_about_and_dropped(tmp_path: Path, asks: str, drops: str, width: int) -> None:
    """Nothing but the question tells that they were bad. Where they are fine nothing is."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(1, 8):
            DROPPED[drops](model)
            x = torch.randn(8, 6)
            x[3] *= step != 5
            model(x).square().mean().backward()
            if ASKED[asks]([parameter.grad for parameter in model.parameters() if parameter.grad is not None]):
                optimizer.step()

    scope = watched(tmp_path, loop, Trapped(width))
    assert [(entry.step, entry.stepped) for entry in scope.history.entries if entry.nonfinite] == [(5, SKIPPED)], scope.verdict.sentence
    origin = scope.verdict.incidents[0].origin
    assert (origin.op, origin.index[0]) == ("div", 3), scope.verdict.sentence


def test_what_the_loop_asks_about_other_numbers_tells_nothing_of_its_gradients(tmp_path: Path) -> None:
    """NaN in a metric, and gradients that are dropped for another reason."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(1, 8):
            optimizer.zero_grad()
            rewards = torch.tensor([1.0, NAN if step == 5 else 0.0])
            model(torch.randn(8, 4)).square().mean().backward()
            if rewards.isfinite().all() and not math.isnan(rewards.mean().item()):
                optimizer.step()

    scope = watched(tmp_path, loop)
    assert scope.verdict.healthy and scope.bad_steps == 0, scope.verdict.sentence


@pytest.mark.parametrize("scale", [2.0**12, None], ids=["scaled", "bare"])
def test_an_update_by_hand_on_gradients_that_overflowed_is_of_their_step(tmp_path: Path, scale: float | None) -> None:
    """No scaler skips it: where the loop scales its loss by a number and steps all the same, the step is bad, and not the next one."""
    model = nn.Linear(4, 1).half()
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 5):
            target = (100.0 if scale else 1e7) if step == 3 else 1.0
            loss = (model(torch.ones(5, 4).half()).float() - target).square().mean()
            model.zero_grad()
            (loss if scale is None else loss * scale).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 1e-3 * parameter.grad / (scale or 1.0)
    assert [entry.step for entry in scope.history.entries if entry.nonfinite] == [3, 4], scope.verdict.sentence
    assert [incident.step for incident in scope.verdict.incidents] == [3, 4] and scope.verdict.incidents[0].cause == "fp16_overflow"


def test_who_catches_the_stop_and_goes_on_is_stopped_once_a_bad_step(tmp_path: Path) -> None:
    """The batch is dropped with it: the next ones are healthy steps, each with its own number."""
    model = nn.Linear(4, 1)
    optimizer, caught = torch.optim.SGD(model.parameters(), lr=0.1), list[int]()
    with nanscope.watch(out=tmp_path, on_nonfinite="stop") as scope:
        for step in range(1, 7):
            try:
                optimizer.zero_grad()
                (model(torch.ones(2, 4)).square().mean() * (math.nan if step in (2, 4) else 1.0)).backward()
                optimizer.step()
            except nanscope.NonFiniteError:
                caught.append(step)
    assert caught == [2, 4] == [incident.step for incident in scope.verdict.incidents]
    assert scope.steps == 6 and all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_who_catches_the_stop_and_steps_all_the_same_is_stopped_again(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer, caught = torch.optim.SGD(model.parameters(), lr=0.1), list[str]()
    with nanscope.watch(out=tmp_path, on_nonfinite="stop"):
        for act in (lambda: (model(torch.ones(2, 4)).mean() * math.nan).backward(), optimizer.step):
            try:
                act()
            except nanscope.NonFiniteError:
                caught.append("stopped")
    assert len(caught) == 2 and all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("steps", [1, 4])
def test_the_last_step_that_a_loop_drops_is_a_step(tmp_path: Path, steps: int) -> None:
    """Nothing comes after it that would take its gradients away: that the loop has asked about them tells."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).square().mean() * (math.nan if step == steps else 1.0)).backward()
            if all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None):
                optimizer.step()
    assert scope.steps == steps and scope.bad_steps == 1
    assert [(entry.step, entry.stepped) for entry in scope.history.entries if entry.nonfinite] == [
        (steps, "skipped by the trainer" if steps > 1 else "none")
    ]


def test_who_leaves_by_an_exception_is_not_stopped_on_the_way(tmp_path: Path) -> None:
    """Of a rank that others have left alone, what its collective says passes through, though it had asked about bad gradients before."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="timed out"), nanscope.watch(out=tmp_path, on_nonfinite="stop"):
        for step in range(1, 3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            if step == 2:
                for parameter in model.parameters():
                    grad = parameter.grad
                    assert grad is not None
                    grad.fill_(math.nan)
                if not all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None):
                    raise RuntimeError("timed out")
            optimizer.step()
