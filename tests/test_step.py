"""A running step, gate by gate: what is entered in the history, what is held back, and which step it is."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import clipped_loss, log_probs, policy
from torch import Tensor, nn

import nanscope
from nanscope.replay.tries import replay
from nanscope.watching.acting import OnNonFinite


def test_skip_leaves_the_optimizer_state_and_the_gradients_as_they_were(tmp_path: Path) -> None:
    """A skipped step is no step: neither weights nor moments nor step counts move, and `.grad` is still there afterwards."""
    model = policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with nanscope.watch(out=tmp_path, on_nonfinite="skip") as scope:
        for bad in (False, True):
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).square().sum().backward()
            if bad:
                next(model.parameters()).grad[0, 0] = math.nan  # type: ignore[index]
            before = [p.detach().clone() for p in model.parameters()], str(optimizer.state_dict())
            optimizer.step()
    after = [p.detach() for p in model.parameters()], str(optimizer.state_dict())
    assert scope.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True)) and before[1] == after[1]
    assert all(p.grad is not None for p in model.parameters())


def test_a_grad_scaler_that_skips_is_healthy(tmp_path: Path) -> None:
    """Scaled gradients may overflow: the scaler looks at them itself and does not step."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(torch.randn(6, 8)).float(), torch.arange(6))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scope.verdict.healthy


def test_two_optimizers_make_one_step(tmp_path: Path) -> None:
    """Actor and critic that step after one backward pass are one step of the run."""
    actor, critic = policy(), policy()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (actor, critic)]
    ids = torch.tensor([[1, 2, 3]])
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            (actor(ids).mean() + critic(ids).mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert scope.steps == 3


def test_gradient_accumulation_names_the_micro_batch_that_did_it(tmp_path: Path) -> None:
    """Of several backward passes before one optimizer step, the bad one is described."""
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 20, (2, 5))
    with nanscope.watch(out=tmp_path) as scope:
        for micro in range(4):
            logps = log_probs(model(ids[:, :-1]), ids[:, 1:])
            old = logps.detach().clone()
            if micro == 2:
                old[1, micro] = -200.0
            loss = torch.exp(logps - old).mean() / 4
            loss.backward()
        optimizer.step()
    assert scope.steps == 1
    assert scope.verdict.incidents[0].origin.index == (1, 2)


def test_healthy_steps_are_saved_on_request(tmp_path: Path) -> None:
    """Each backward pass of the step, replayable bit for bit, no incident, and the run goes as it would have gone."""

    def weights(**options: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model = policy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with nanscope.watch(out=tmp_path / str(len(options)), **options) as scope:
            for _ in range(3):
                ids = torch.randint(0, 20, (2, 5))
                logps = log_probs(model(ids[:, :-1]), ids[:, 1:])
                clipped_loss(logps, logps.detach().clone(), torch.tensor([1.0, -0.5]), torch.ones(2, 4)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert scope.verdict.healthy
        saved.append(scope.saved)
        return [parameter.detach() for parameter in model.parameters()]

    saved: list[list[Path]] = []
    plain, asked = weights(), weights(save_steps=(2, 9))
    assert all(torch.equal(a, b) for a, b in zip(plain, asked, strict=True))
    assert saved[0] == [] and [path.name for path in saved[1]] == ["batch-000002.rank0.safetensors"]
    snapshot = nanscope.load(saved[1][0])
    assert snapshot.asked and snapshot.step == 2
    replayed = replay(snapshot)
    assert replayed.reproduces is True and replayed.location is None


def test_a_loss_that_is_computed_inside_the_step_is_seen(tmp_path: Path) -> None:
    """LBFGS and its like call back for loss and gradient: steps are counted, and a bad loss in the closure is located."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    gain = torch.tensor([1.0, 1.0])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        ratio = torch.exp((model(torch.ones(2, 3)).squeeze(-1).abs() + 0.1) * gain)
        loss = ratio.square().mean()
        loss.backward()
        return loss

    with nanscope.watch(out=tmp_path) as scope:
        optimizer.step(closure)
        assert scope.steps == 1 and scope.verdict.healthy
        gain[1] = 1e4
        optimizer.step(closure)
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.origin.op, incident.origin.variable) == (2, "exp", "ratio")


@pytest.mark.parametrize("named", [False, True])
def test_of_a_step_with_a_closure_only_that_is_recorded(tmp_path: Path, named: bool) -> None:
    """What L-BFGS computes itself, the more the longer its memory is, is no loss; and the closure is called as it was given."""
    torch.manual_seed(0)
    lengths = []
    for memory in (1, 50):
        weight = nn.Parameter(torch.tensor([-1.5, 2.0]))
        optimizer = torch.optim.LBFGS([weight], lr=0.1, max_iter=30, history_size=memory, tolerance_change=0, tolerance_grad=0)
        calls: list[float] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (weight.exp() - weight).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            calls.append(float(loss))
            return loss

        with nanscope.watch(out=tmp_path) as scope:
            before = scope._tape.length
            optimizer.step(closure=closure) if named else optimizer.step(closure)
            lengths.append((scope._tape.length - before) / len(calls))
            assert not scope._mode.sleeping and len(calls) > 20
        assert scope.steps == 1 and scope.verdict.healthy
    assert lengths[1] <= lengths[0] + 1, lengths


def test_a_closure_that_raises_or_is_called_later_leaves_the_tape_awake(tmp_path: Path) -> None:
    """Whatever becomes of the step, what comes after it is seen."""
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    kept: list[Callable[[], object]] = []

    def refuse() -> float:
        raise ValueError("no")

    class Keeps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            kept.append(closure)
            return super().step(closure)

    keeps = Keeps([weight], lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        with pytest.raises(ValueError, match="no"):
            optimizer.step(refuse)
        weight.exp().sum().backward()
        keeps.step(lambda: 1.0)
        kept[0]()
        assert not scope._mode.sleeping
        loss = torch.exp(weight * 200.0).sum()
        loss.backward()
    assert scope.verdict.incidents[0].origin.op == "exp"


def train(scope: nanscope.Scope, losses: list[float | list[float]]) -> None:
    """One step per entry, of one backward pass or several, each with the loss that it says."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for entry in losses:
        optimizer.zero_grad()
        for loss in entry if isinstance(entry, list) else [entry]:
            (weight * loss).sum().backward()
        optimizer.step()


def test_each_step_is_one_line_of_history(tmp_path: Path) -> None:
    """Its number, the sum of its micro-batches, the norm of its gradient, and whether it was bad."""
    with nanscope.watch(out=tmp_path) as scope:
        train(scope, [1.0, [2.0, 3.0], 4.0, math.nan])
    entries = [json.loads(line) for line in (scope.out / "history.rank0.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
    assert [entry["loss"] for entry in entries] == [1.0, 5.0, 4.0, "nan"]
    assert [entry["grad_norm"] for entry in entries] == [1.0, 5.0, 4.0, "nan"]
    assert [entry.get("nonfinite", False) for entry in entries] == [False, False, False, True]
    assert all(entry["seconds"] >= 0 and entry["rank"] == 0 for entry in entries)


def test_the_history_says_how_much_room_exp_had(tmp_path: Path) -> None:
    """The largest exponent of the step, and the nats that were left."""
    weight = nn.Parameter(torch.tensor([1.0, 30.0]))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with nanscope.watch(out=tmp_path) as scope:
        log_ratio = weight * 1.0
        torch.exp(log_ratio).mean().backward()
        optimizer.step()
    (entry,) = scope.history.entries
    assert entry.log_ratio_max == 30.0 and entry.headroom == pytest.approx(58.72, abs=0.01)


def spoil(model: nn.Module, how: str) -> None:
    """Make gradients bad after backward, in a way that the tape follows or does not."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            if how == "mul":
                parameter.grad.mul_(math.inf).mul_(0.0)
            elif how == "data":
                parameter.grad.data.numpy()[...] = math.nan
            else:
                parameter.grad = torch.full_like(parameter.grad, math.nan)


@pytest.mark.parametrize("mode", ["record", "skip", "stop"])
@pytest.mark.parametrize("how", ["mul", "data", "new"])
def test_a_gradient_that_goes_bad_after_backward_is_an_incident_in_every_mode(tmp_path: Path, mode: OnNonFinite, how: str) -> None:
    """Whatever of it can be explained: counted, saved, and never healthy."""
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.suppress(nanscope.NonFiniteError), nanscope.watch(out=tmp_path, on_nonfinite=mode, limit=1) as scope:
        for step in range(1, 4):
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).square().sum().backward()
            if step == 2:
                spoil(model, how)
            optimizer.step()
    assert scope.skipped == (mode == "skip") and not scope.verdict.healthy
    incident = scope.verdict.incidents[0]
    became = {"record": "taken", "skip": "skipped", "stop": "stopped"}[mode]
    assert incident.step == 2 and incident.reached["gradients"] == [3, 3] and incident.reached["stepped"] == became
    assert (scope.out / "step-000002.rank0.safetensors").is_file()


def element(model: nn.Module) -> None:
    *_, parameter = model.parameters()
    assert parameter.grad is not None
    parameter.grad[0] = math.nan


def hooked(model: nn.Module) -> None:
    list(model.parameters())[-1].register_hook(lambda grad: grad * math.nan)


def unseen_write(model: nn.Module) -> None:
    spoil(model, "data")


SPOILT = [  # when, how -> what is said of it
    (False, element, "finite when backward was over: it was written between backward and the optimizer's step, test_step.py:"),
    (
        True,
        hooked,
        "while backward, made once more, gives finite numbers: a hook on a tensor changed it, test_step.py:",
    ),
    (
        False,
        unseen_write,
        "while backward, made once more, gives finite numbers: a hook, or code between backward and the optimizer's step",
    ),
]


@pytest.mark.parametrize(("before", "spoils", "words"), SPOILT)
@pytest.mark.parametrize("clip", [False, True])
def test_nan_that_somebody_writes_into_a_gradient_is_told_as_what_it_is(
    tmp_path: Path, clip: bool, before: bool, spoils: Callable[[nn.Module], None], words: str
) -> None:
    """It is in the gradient of that weight, backward did not make it, and where the write was seen its line is named."""
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        if before:
            spoils(model)
        model(torch.tensor([1, 2])).square().sum().backward()
        if not before:
            spoils(model)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    (incident,) = scope.verdict.incidents
    first, *_, last = dict(model.named_parameters())
    place = "" if clip and spoils is not element else " at [0"  # of which a clip has left nothing
    assert incident.sentence.startswith(f"the gradient of {first if spoils is unseen_write else last} is NaN{place}")
    assert words in incident.sentence
    if spoils is element:
        assert "= math.nan" in dict(incident.origin.source)[incident.origin.line or 0]


def test_nan_in_the_gradient_of_a_model_that_cannot_run_again_is_not_laid_at_a_door(tmp_path: Path) -> None:
    """Backward or somebody after it: which, nobody knows."""

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.runs = nn.Linear(2, 1), iter([1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x) * next(self.runs)
            return out

    model = Once()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        model(torch.ones(3, 2)).sum().backward()
        unseen_write(model)
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert "it came in the backward of the model or of compiled code, or was written after it" in incident.sentence


def test_a_step_that_is_skipped_without_a_backward_pass_is_an_incident(tmp_path: Path) -> None:
    """Gradients set by hand: nothing can be said of them, but that the step was skipped."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with nanscope.watch(out=tmp_path, on_nonfinite="skip") as scope:
        weight.grad = torch.tensor([math.nan])
        optimizer.step()
    assert (scope.skipped, scope.bad_steps, scope.verdict.status) == (1, 1, "non-finite")
    assert [path.name for path in scope.out.glob("*.safetensors")] == ["step-000001.rank0.safetensors"]


def test_gradients_set_by_hand_are_a_step_beside_another_model(tmp_path: Path) -> None:
    """A strategy that learns from its own noise, after a value function that was differentiated: what it divided is told."""
    value, policy = nn.Linear(2, 1), nn.Linear(2, 1)
    fit, follow = torch.optim.SGD(value.parameters(), lr=0.1), torch.optim.SGD(policy.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        value(torch.ones(3, 2)).sum().backward()
        fit.step()
        with torch.no_grad():
            gains = policy(torch.ones(3, 2)).squeeze(1).round()
            scores = (gains - gains.mean()) / gains.std()
            policy.weight.grad = scores[:2].unsqueeze(0)
            follow.step()
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.cause, incident.origin.op) == (2, "zero_div_zero", "div"), incident.sentence


def test_a_bad_step_that_cannot_be_described_is_saved_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own failure loses no incident."""
    with nanscope.watch(out=tmp_path) as scope:
        monkeypatch.setattr(type(scope._step._examiner), "described", None)
        monkeypatch.setattr(type(scope._step._examiner), "gradients", None)
        monkeypatch.setattr(type(scope._step._examiner), "loss", lambda self, recording: None)
        train(scope, [1.0, math.nan])
    assert scope.bad_steps == 1 and scope.verdict.incidents[0].step == 2
    assert [path.name for path in scope.out.glob("*.safetensors")] == ["step-000002.rank0.safetensors"]


@dataclass
class State:
    """What a trainer counts."""

    global_step: int


@dataclass
class Trainer:
    """What a trainer looks like from outside."""

    state: State


def test_a_resumed_trainer_goes_on_counting(tmp_path: Path) -> None:
    """The number of a step is the one that its log will say."""
    trainer = Trainer(State(100))
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with nanscope.watch(trainer, out=tmp_path, save_steps=(102,)) as scope:
        for factor in (1.0, 1.0, math.nan):
            (weight * factor).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            trainer.state.global_step += 1
    assert [entry.step for entry in scope.history.entries] == [101, 102, 103] and scope.steps == 3
    assert [incident.step for incident in scope.verdict.incidents] == [103]
    assert [path.name for path in scope.saved] == ["batch-000102.rank0.safetensors"]


def test_a_step_that_is_asked_for_and_bad_is_an_incident(tmp_path: Path) -> None:
    """It is saved as what it is, once."""
    with nanscope.watch(out=tmp_path, save_steps=(2,)) as scope:
        train(scope, [1.0, math.nan])
    assert scope.saved == [] and [path.name for path in scope.out.glob("*.safetensors")] == ["step-000002.rank0.safetensors"]


def test_every_backward_pass_of_a_step_that_is_asked_for_is_saved(tmp_path: Path) -> None:
    """One file each, numbered."""
    with nanscope.watch(out=tmp_path, save_steps=(2,)) as scope:
        train(scope, [1.0, [2.0, 3.0], 1.0])
    assert [path.name for path in scope.saved] == ["batch-000002.rank0.safetensors", "batch-000002.rank0.part2.safetensors"]
    assert [nanscope.load(path).reached.loss for path in scope.saved] == [2.0, 3.0] and scope.verdict.healthy


def test_skip_holds_back_and_gives_back(tmp_path: Path) -> None:
    """The optimizer finds no gradients, afterwards they are there again; the next step is taken."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with nanscope.watch(out=tmp_path, on_nonfinite="skip") as scope:
        for factor in (math.nan, 1.0):
            optimizer.zero_grad()
            (weight * factor).sum().backward()
            optimizer.step()
            assert weight.grad is not None and repr(float(weight.grad)) == repr(factor)
    assert float(weight.detach()) == 0.5 and scope.skipped == 1 and [entry.stepped for entry in scope.history.entries] == ["skipped", None]
    (incident,) = scope.verdict.incidents
    assert incident.reached == {"loss": True, "gradients": [1, 1], "weights": [0, 1], "stepped": "skipped"}


@pytest.mark.parametrize(("mode", "stepped", "weights"), [("record", "taken", 1), ("skip", "skipped", 0)])
def test_what_became_of_the_step_stands_in_its_file(tmp_path: Path, mode: OnNonFinite, stepped: str, weights: int) -> None:
    """Taken or skipped, and how many weights went bad."""
    with nanscope.watch(out=tmp_path, on_nonfinite=mode) as scope:
        train(scope, [1.0, math.nan])
    assert scope.bad_steps == 1
    reached = nanscope.load(str(scope.paths[0])).reached
    assert (reached.stepped, reached.bad_weights, reached.weights) == (stepped, weights, 1)


def test_a_bad_gradient_that_backward_was_given_is_told_as_that(tmp_path: Path) -> None:
    """What is finite was differentiated with a NaN: neither its own program nor the model made that."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with nanscope.watch(out=tmp_path) as scope:
        model(torch.ones(4, 3)).backward(torch.tensor([[1.0, math.nan]] * 4))
        optimizer.step()
    incident = scope.verdict.incidents[0]
    assert (incident.phase, incident.origin.op, incident.origin.index, incident.origin.shape) == ("backward", "handed", (0, 1), (4, 2))
    assert "the gradient of an output is NaN at [0, 1] of [4, 2], when the backward pass began" in incident.sentence


@pytest.mark.parametrize("healthy", [True, False])
def test_a_value_that_backward_was_given_a_gradient_for_is_looked_into(tmp_path: Path, healthy: bool) -> None:
    """It is no loss, and its own forward pass tells where it went bad."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with nanscope.watch(out=tmp_path) as scope:
        value = torch.exp(model(torch.ones(4, 3)) * 0 + (1.0 if healthy else 200.0))
        value.backward(torch.ones(4, 2))
        optimizer.step()
    assert [(i.phase, i.origin.op, i.cause) for i in scope.verdict.incidents] == ([] if healthy else [("forward", "exp", "exp_overflow")])


def test_gradients_that_nobody_made_here_are_an_incident(tmp_path: Path) -> None:
    """Set by hand, or by a backward pass before the block: nobody knows the origin, and the weights that they spoil are no other one."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with nanscope.watch(out=tmp_path) as scope:
        weight.grad = torch.tensor([math.nan])
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert [note.slug for note in scope.notes] == ["foreign_gradients"] and scope.verdict.status == "non-finite" and scope.bad_steps == 1
    assert (incident.phase, incident.cause, incident.origin.role) == ("weights", "poisoned_weights", "weights")
    assert (incident.reached["gradients"], incident.reached["weights"]) == ([1, 1], [1, 1])
    assert "no backward pass that was watched made it" in scope.verdict.sentence and "no non-finite" not in scope.verdict.sentence
    assert "no loss" not in scope.verdict.sentence  # which nobody knows


def test_an_absorbed_overflow_is_told_once_for_each_line(tmp_path: Path) -> None:
    """Every step has it, and one note says so."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(3):
            ratio = torch.exp(torch.tensor([1.0, 99.0]))
            (weight * ratio.clamp(max=2.0)).sum().backward()
            optimizer.step()
    assert scope.verdict.healthy and [note.slug for note in scope.notes] == ["nonfinite_absorbed"]
    assert "ratio was +inf at [1]" in scope.notes[0].text and "step 1)" in scope.notes[0].text


def test_a_block_without_an_optimizer_is_looked_at_when_it_ends(tmp_path: Path) -> None:
    """A gradient that was spoilt after backward has nobody else to find it."""
    weight = nn.Parameter(torch.ones(1))
    with nanscope.watch(weight_of(weight), out=tmp_path) as scope:
        (weight * 2.0).sum().backward()
        assert weight.grad is not None
        weight.grad.mul_(math.inf)
    assert scope.bad_steps == 1 and scope.verdict.incidents[0].reached["stepped"] == "none"


def weight_of(parameter: nn.Parameter) -> nn.Module:
    """A module that owns a parameter."""
    module = nn.Module()
    module.weight = parameter
    return module


def test_the_hooks_of_a_backward_pass_that_raised_go_with_it(tmp_path: Path) -> None:
    """What it hooked must not be called, nor held, from then on."""

    held = []

    def fails(grad: torch.Tensor) -> None:
        held.append(scope._step._current)
        raise ValueError("the trainer's own")

    x = torch.ones(3, requires_grad=True)
    with nanscope.watch(out=tmp_path) as scope:
        doubled = x * 2
        handle = doubled.register_hook(fails)  # type: ignore[no-untyped-call]
        with pytest.raises(ValueError, match="own"):
            doubled.sum().backward()
        handle.remove()
        assert len(held) == 1 and not held[0].hooks
        (x * 3).sum().backward()
    assert [gap.slug for gap in scope.verdict.gaps] == ["backward-raised"] and not scope.bad_steps


def test_a_backward_pass_that_raised_is_one_gap(tmp_path: Path) -> None:
    """Also where it could not be made once more, and training goes on."""
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(2):
            values = torch.sigmoid(torch.ones(3, requires_grad=True))
            with torch.no_grad():
                values.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                values.sum().backward()
    (gap,) = scope.verdict.gaps
    assert (gap.slug, gap.count) == ("backward-raised", 2)


def raises_at_nan(grad: Tensor) -> None:
    if not bool(torch.isfinite(grad).all()):
        raise FloatingPointError("bad gradient")


def train_raising(kind: str, caught: bool, fault: Callable[[Tensor], Tensor] = torch.log) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.register_hook(raises_at_nan if kind == "hook" else lambda grad: None)
    for step in range(1, 6):
        loss = fault(model(torch.randn(8, 4)).abs() * (step != 3)).mean()
        optimizer.zero_grad()
        try:
            with torch.autograd.set_detect_anomaly(kind == "anomaly"):
                loss.backward()
        except (FloatingPointError, RuntimeError):
            if not caught:
                raise
            loss.item()
            continue
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("caught", [True, False])
@pytest.mark.parametrize("kind", ["hook", "anomaly"])
@pytest.mark.parametrize(("fault", "op", "phase"), [(torch.log, "log", "forward"), (torch.sqrt, "sqrt", "backward")])
def test_what_a_backward_pass_met_that_raised_is_an_incident(
    tmp_path: Path, kind: str, caught: bool, fault: Callable[[Tensor], Tensor], op: str, phase: str
) -> None:
    """Located as any other, whether training ends by the error or drops the step, which is then a step that the trainer skipped."""
    ended = contextlib.nullcontext() if caught else pytest.raises((FloatingPointError, RuntimeError), match="bad gradient|nan values")
    with ended, nanscope.watch(out=tmp_path) as scope:
        train_raising(kind, caught, fault)
    assert [(i.step, i.phase, i.origin.op) for i in scope.verdict.incidents] == [(3, phase, op)]
    assert not scope.verdict.gaps and not scope.notes
    assert scope.verdict.incidents[0].reached["stepped"] == ("skipped by the trainer" if caught else "none")
    if caught:
        assert [(e.step, e.nonfinite) for e in scope.history.entries] == [(n, n == 3) for n in range(1, 6)]


def test_stop_lets_the_error_of_a_backward_pass_pass_and_stops_when_training_goes_on(tmp_path: Path) -> None:
    """What is raised is what the trainer knows; who catches it is stopped at the next gate."""
    with pytest.raises(FloatingPointError, match="bad gradient"), nanscope.watch(out=tmp_path, on_nonfinite="stop"):
        train_raising("hook", caught=False)
    with pytest.raises(nanscope.NonFiniteError), nanscope.watch(out=tmp_path, on_nonfinite="stop"):
        train_raising("hook", caught=True)


@pytest.mark.parametrize("caught", [True, False])
def test_a_backward_pass_that_raised_for_another_reason_is_a_gap_where_training_goes_on(tmp_path: Path, caught: bool) -> None:
    """What it would have come to was not seen; a run that ends by it has nothing more to come to."""

    def fails(grad: Tensor) -> None:
        raise ValueError("the trainer's own")

    x = torch.ones(3, requires_grad=True)
    with contextlib.suppress(ValueError), nanscope.watch(out=tmp_path) as scope:
        doubled = x * 2
        doubled.register_hook(fails)  # type: ignore[no-untyped-call]
        with contextlib.suppress(*[ValueError] if caught else []):
            doubled.sum().backward()
    assert [gap.slug for gap in scope.verdict.gaps] == (["backward-raised"] if caught else []) and not scope.bad_steps


def test_gradients_that_were_elsewhere_when_a_loss_was_bad_are_counted_when_they_are_back(tmp_path: Path) -> None:
    """A sharded model keeps those of all micro-batches but the last one elsewhere; its trainer drops the step, and no optimizer asks."""
    model, kept, last = nn.Linear(3, 2), dict[nn.Parameter, Tensor](), [False]

    def keep(weight: nn.Parameter) -> None:
        assert weight.grad is not None
        kept[weight] = weight.grad + kept.get(weight, 0.0)
        weight.grad = kept.pop(weight) if last[0] else None

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(keep)  # type: ignore[arg-type]
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(2):
            for last[0] in (False, True):
                x = torch.full((4, 3), math.nan if step == 1 and not last[0] else 1.0)
                loss = torch.exp(model(x)).mean()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            model.zero_grad()
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.micro_batch, incident.reached["gradients"]) == (2, 1, [2, 2])
