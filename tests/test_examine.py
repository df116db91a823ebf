"""Examining a bad step: what it harmed, what it is called, and that it is told whatever fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seen import INF, NAN
from torch import Tensor, nn

import nanscope
from nanscope.capture.failsafe import Failsafe
from nanscope.capture.mode import TapeMode
from nanscope.capture.modules import ModuleWatch
from nanscope.capture.tape import Tape
from nanscope.program.program import Program
from nanscope.snapshot.coverage import Status
from nanscope.snapshot.observation import CHANGED, UNSEEN, Kind
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.diagnose import diagnose
from nanscope.watching import examine
from nanscope.watching.examine import Examiner
from nanscope.watching.optimizers import Optimizers
from nanscope.watching.recording import Recording
from nanscope.watching.scale import LossScale


@pytest.mark.parametrize("name", ["look_closely", "find_trainer", "settings", "to_save", "logged_loss", "environment"])
def test_an_incident_that_cannot_be_explained_is_still_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever fails while a bad step is described: the step is reported, with what it reached, and the file is there."""

    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("planted")

    x = torch.tensor([1.0, 99.0], requires_grad=True)
    with nanscope.watch(out=tmp_path) as scope:
        monkeypatch.setattr(examine, name, broken)
        torch.exp(x).sum().backward()
        monkeypatch.undo()
    (incident,) = scope.verdict.incidents
    assert incident.loss == math.inf and list(scope.out.glob("*.safetensors"))
    assert [note.slug for note in incident.notes] == ["not_looked_into"] and "ZeroDivisionError: planted" in incident.notes[0].text
    if name != "to_save":  # what was recorded is in the file, and whoever reads that looks again
        assert (incident.cause, incident.origin.op) == ("exp_overflow", "exp")
    else:
        assert incident.sentence.startswith("it is not known where it went bad: looking into what was recorded failed.")


def examined(function: Callable[[], Tensor], *modules: nn.Module) -> tuple[Examiner, Recording]:
    """An examiner, and a backward pass as a step hands it over: recorded, and run."""
    tape = Tape()
    watch = ModuleWatch(lambda module: None, lambda: None, Failsafe())
    for module in modules:
        watch.seen.add(module)
    with TapeMode(tape):
        loss = function()
        program, tensors = tape.program(tape.value_of(loss))
    recording = Recording(program, tensors, loss.detach(), [], None)
    loss.backward()
    return Examiner(tape, watch, (), save_tokens=False, optimizers=Optimizers()), recording


def blank(**changes: Any) -> Snapshot:
    fields: dict[str, Any] = {"step": 3, "rank": 0, "loss": None, "grads": {}, "reached": Reached(), **changes}
    return Snapshot(program=Program((), (), -1), tensors={}, **fields)


HARMS = [  # exponents, factors of the ratio -> loss, bad gradients; None: nothing was harmed
    ([1.0, 2.0], [1.0, 1.0], None),
    ([1.0, 99.0], [1.0, 1.0], (INF, 1)),
    ([1.0, 99.0], [1.0, 0.0], (NAN, 1)),
]


@pytest.mark.parametrize(("exponents", "factors", "expected"), HARMS)
def test_a_hit_says_what_was_harmed(exponents: list[float], factors: list[float], expected: tuple[float, int] | None) -> None:
    """The loss, and how many of the gradients; nobody has looked yet where it came from."""
    x = torch.tensor(exponents, requires_grad=True)
    examiner, recording = examined(lambda: (torch.exp(x) * torch.tensor(factors)).sum())
    hit = examiner.loss(recording)
    if expected is None:
        assert hit is None
        return
    assert hit is not None and hit.loss_bad and hit.look is None and hit.seen == UNSEEN
    assert repr(hit.reached) == repr(Reached(expected[0], 1, expected[1]))


def test_bad_gradients_of_a_finite_loss_are_harm() -> None:
    """The loss itself is told to be fine."""
    x = torch.tensor([1.0, 99.0], requires_grad=True)
    examiner, recording = examined(lambda: torch.where(x > 50, 0.0, torch.exp(x)).sum())
    hit = examiner.loss(recording)
    assert hit is not None and not hit.loss_bad and (hit.reached.gradients, hit.reached.bad_gradients) == (1, 1)
    snapshot = examiner.snapshot(hit, blank(step=5))
    assert (snapshot.step, snapshot.program) == (5, recording.program) and snapshot.environment["dtype"] == "float32"
    incident = diagnose(snapshot)
    assert (incident.phase, incident.cause, incident.origin.index) == ("backward", "where_grad_trap", (1,))


@pytest.mark.parametrize(("scaled", "value", "bad"), [(True, 99.0, False), (False, 99.0, True), (True, NAN, True)])
def test_a_scaled_loss_may_overflow(scaled: bool, value: float, bad: bool) -> None:
    """A scaler looks for infinity itself; NaN is no matter of scale."""
    x = torch.tensor([value], requires_grad=True)
    examiner, recording = examined(lambda: torch.exp(x).sum())
    recording.scale = LossScale(256.0) if scaled else None
    hit = examiner.loss(recording)
    assert hit is not None and hit.loss_bad is bad and hit.reached.scaled is scaled


def test_what_was_absorbed_has_a_line() -> None:
    """An overflow that a bound replaced; None where nothing overflowed, or nothing was recorded."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def loss(exponent: float) -> Tensor:
        return (x * torch.exp(torch.tensor([1.0, exponent])).clamp(max=2.0)).sum()

    examiner, recording = examined(lambda: loss(99.0))
    location = examiner.absorbed(recording)
    assert location is not None and location.origin.op == "exp" and location.origin.site is not None
    examiner, recording = examined(lambda: loss(1.0))
    assert examiner.absorbed(recording) is None
    recording.program = None
    assert examiner.absorbed(recording) is None and examiner.asked(recording, blank()) is None


def test_a_step_that_was_asked_for_says_so() -> None:
    """Its program and tensors, and no observation."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    examiner, recording = examined(lambda: torch.exp(x).sum())
    snapshot = examiner.asked(recording, blank())
    assert snapshot is not None and snapshot.asked and snapshot.observation == UNSEEN and snapshot.program is recording.program


def test_a_gradient_that_was_changed_after_backward_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, as what somebody changed; with peers and nothing seen here, it came from one of them."""
    module = nn.Linear(2, 1, bias=False)
    examiner, recording = examined(lambda: module.weight.sum() * 1.0, module)
    gradient = torch.tensor([[1.0, NAN]])
    module.weight.grad = gradient
    hit = examiner.gradients([recording], [module.weight], [gradient])
    assert hit is not None and hit.seen.origin.op == CHANGED and (hit.reached.gradients, hit.reached.bad_gradients) == (1, 1)
    monkeypatch.setattr(examine, "has_peers", lambda: True)
    hit = examiner.gradients([recording], [module.weight], [gradient])
    assert hit is not None and hit.seen.kind is Kind.ARRIVED and hit.seen.origin.index == (0, 1)
    recording.program = None
    assert examiner.gradients([recording], [module.weight], [gradient]) is None, "nothing of this step was recorded"


def test_an_update_that_went_bad_is_made_once_more() -> None:
    """Loss and gradient were finite: the optimizer, the weight and the numbers are named."""
    module = nn.Linear(2, 1, bias=False)
    examiner, _ = examined(lambda: module.weight.sum() * 1.0, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=3e38)
    module.weight.grad = torch.tensor([[1e-9, 1e30]])
    optimizer.step()
    snapshot = examiner.update(optimizer, True, 0, lambda weight: False, blank(reached=Reached(0.5, 1, 0, 1, 1, "taken")))
    assert (snapshot.observation.optimizer, snapshot.observation.kind) == ("SGD", Kind.NONFINITE)
    incident = diagnose(snapshot)
    assert incident.phase == "optimizer" and incident.sentence.startswith("the update of SGD made ") and incident.origin.index == (0, 1)


def hidden_gradient(tmp_path: Path, hide: Callable[[nn.Linear], object]) -> nanscope.Verdict:
    """The gradient of what a model gives is NaN; `hide` makes hooks that keep it from the weights."""
    model = nn.Linear(4, 1)
    hide(model)
    with nanscope.watch(out=tmp_path) as scope:
        for step in (1, 2, 3):
            out = model(torch.randn(6, 4))
            loss = out.pow(2).mean()
            (loss + torch.sqrt(loss - loss) if step == 2 else loss).backward()
    return scope.verdict


HIDING = {
    "parameter": lambda model: [p.register_hook(torch.nan_to_num) for p in model.parameters()],
    "module": lambda model: (
        [model.register_full_backward_hook(lambda module, given, received: None)]
        + [p.register_hook(torch.nan_to_num) for p in model.parameters()]
    ),
}


@pytest.mark.parametrize("kind", HIDING)
def test_a_gradient_that_hooks_hide_is_no_all_clear(tmp_path: Path, kind: str) -> None:
    """Nobody knows what it would have done: the run is partly watched, and the sentence says of what."""
    verdict = hidden_gradient(tmp_path, HIDING[kind])
    assert [gap.slug for gap in verdict.gaps] == ["hidden-by-hook"] and not verdict.incidents
    assert "the gradient of out" in verdict.sentence


def test_hooks_that_hide_nothing_are_none_of_our_business(tmp_path: Path) -> None:
    """Where the gradient arrives it is an incident."""
    verdict = hidden_gradient(tmp_path, lambda model: model.weight.register_hook(lambda grad: grad * 2))
    assert [incident.micro_batch for incident in verdict.incidents] == [2] and verdict.gaps == ()


def test_a_gradient_behind_a_call_that_nobody_recorded(tmp_path: Path) -> None:
    """The loss is finite, no module and no optimizer has the parameter, and its gradient is NaN: that is no healthy run."""
    weight = nn.Parameter(torch.eye(3))
    weight.data[1, 1] = INF
    with nanscope.watch(out=tmp_path) as scope:
        torch.linalg.pinv(weight).sum().backward()
    assert scope.verdict.status is Status.NONFINITE and scope.verdict.incidents[0].reached["gradients"] == [1, 1]


def test_models_are_told_in_the_order_in_which_they_were_met() -> None:
    """Not in that of their addresses, which is another one in each run."""
    watch, models = ModuleWatch(lambda module: None, lambda: None, Failsafe()), [nn.Linear(1, 1) for _ in range(50)]
    for model in models[::-1]:
        watch.seen.add(model)
    watch.seen.add(models[-1])
    assert watch.outermost() == models[::-1]
    assert [one for _, one in watch.parameters().values()] == [one for model in models[::-1] for one in model.parameters()]
    del models[10:], model
    assert watch.outermost() == models[::-1]
