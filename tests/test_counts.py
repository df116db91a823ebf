"""The numbers of a step: the loop's own where it has one, the same wherever it is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanscope
from nanscope.errors import NanscopeError
from nanscope.watching.counts import Counts


def one(optimizer: torch.optim.Optimizer, model: nn.Module, bad: bool = False) -> None:
    """One optimizer step."""
    optimizer.zero_grad()
    model(torch.full((2, 3), math.nan if bad else 1.0)).mean().backward()
    optimizer.step()


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def test_the_loop_s_own_count_stands_everywhere(tmp_path: Path) -> None:
    """History, file, headline, note: `scope.step(n)` says the number from there on, also in a run that is resumed."""
    model, optimizer = linear()
    with nanscope.watch(out=tmp_path, save_steps=(1001,), on_nonfinite="skip") as scope:
        for step in range(1000, 1004):
            scope.step(step)
            scope.tag(response_ids=torch.zeros(2, 6, dtype=torch.long))
            one(optimizer, model, bad=step == 1002)
    assert [entry.step for entry in scope.history.entries] == [1000, 1001, 1002, 1003] and scope.steps == 4
    (incident,) = scope.verdict.incidents
    assert incident.step == 1002 and incident.headline.startswith("step 1002 · ")
    assert Path(str(incident.snapshot)).name == "step-001002.rank0.safetensors"
    assert [path.name for path in scope.saved] == ["batch-001001.rank0.safetensors"]
    assert "step 1000:" in scope.notes[0].text


def test_steps_that_share_a_number_are_told_apart(tmp_path: Path) -> None:
    """A loop that counts rollouts has several updates to one number: no two incidents share a headline or a file."""
    model, optimizer = linear()
    with nanscope.watch(out=tmp_path, on_nonfinite="skip") as scope:
        for rollout in (7, 8):
            scope.step(rollout)
            for update in range(3):
                one(optimizer, model, bad=rollout == 7 and update > 0)
    assert [(entry.step, entry.update) for entry in scope.history.entries] == [(7, None), (7, 2), (7, 3), (8, None), (8, 2), (8, 3)]
    found = scope.verdict.incidents
    assert [i.headline.split(" · ")[0] for i in found] == ["step 7, update 2", "step 7, update 3"] and scope.bad_steps == 2
    assert [Path(str(i.snapshot)).name for i in found] == [f"step-000007.rank0.update{n}.safetensors" for n in (2, 3)]
    assert [i.reached["stepped"] for i in found] == ["skipped"] * 2


def test_micro_batches_are_named(tmp_path: Path) -> None:
    """Which one of how many, in headline, file and history; the number of the backward pass in the run goes along."""
    model, optimizer = linear()
    with nanscope.watch(out=tmp_path) as scope:
        for step in (1, 2):
            for micro in (1, 2, 3):
                model(torch.full((2, 3), math.nan if (step, micro) in {(2, 2), (2, 3)} else 1.0)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    heads = [incident.headline.split(" · ")[0] for incident in scope.verdict.incidents]
    assert heads == ["step 2, micro-batch 2 of 3", "step 2, micro-batch 3 of 3"] and scope.bad_steps == 1
    assert [entry.micro_batches for entry in scope.history.entries] == [3, 3]
    again = [nanscope.load(path) for path in sorted(scope.out.glob("*.safetensors"))]
    assert [(s.part, s.backward, s.reached.micro_batches, s.place) for s in again] == [(2, 5, 3, heads[0]), (3, 6, 3, heads[1])]
    assert [path.name for path in sorted(scope.out.glob("*.safetensors"))] == [
        f"step-000002.rank0.part{part}.safetensors" for part in (2, 3)
    ]


class Critic(nn.Linear):
    """A value function."""


def test_of_several_optimizers_the_headline_says_which(tmp_path: Path) -> None:
    """One iteration has two steps, each counted: class and module tell them apart, or the order in which they first stepped."""
    actor, critic, other = nn.Linear(3, 1), Critic(3, 1), Critic(3, 1)
    models = (actor, critic, other)
    optimizers = [torch.optim.SGD(actor.parameters(), lr=0.0)] + [torch.optim.AdamW(m.parameters(), lr=0.0) for m in (critic, other)]
    with nanscope.watch(out=tmp_path) as scope:
        for iteration in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                one(optimizer, model, bad=iteration == 1)
    heads = [incident.headline for incident in scope.verdict.incidents]
    assert [head.split(" · ")[0] for head in heads] == ["step 4", "step 5", "step 6"]
    names = ["SGD of Linear", "AdamW of Critic", "AdamW of Critic #2"]
    assert [head.split(" · ")[-1] for head in heads] == [f"{name} stepped" for name in names]
    assert [entry.optimizer for entry in scope.history.entries] == [None, *names[1:], *names]
    assert [incident.reached["optimizer"] for incident in scope.verdict.incidents] == names


def test_a_count_that_moves_ends_a_step_whose_gradients_nobody_can_see(tmp_path: Path) -> None:
    """Optimizers that shard take the gradients away during backward: a step that they skip ends with the loop's count."""
    model, optimizer = linear()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    with nanscope.watch(out=tmp_path) as scope:
        for step in (1, 2, 3):
            scope.step(step)
            for _ in range(2):
                model(torch.full((2, 3), math.nan if step == 2 else 1.0)).mean().backward()
            if step != 2:
                optimizer.step()
    assert [(e.step, e.micro_batches, e.stepped) for e in scope.history.entries] == [
        (1, 2, None),
        (2, 2, "skipped by the trainer"),
        (3, 2, None),
    ]
    assert {incident.step for incident in scope.verdict.incidents} == {2}


class Engine(nn.Module):
    """Takes the gradients away after each backward pass, and steps at every second one on what it has gathered."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.global_steps, self.passes = model, 40, 0
        self.kept = {p: torch.zeros_like(p) for p in model.parameters()}
        self.sharded = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.adam = torch.optim.AdamW(self.sharded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x)
        return out

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        for parameter, kept in self.kept.items():
            kept += parameter.grad
            parameter.grad = None

    def step(self) -> None:
        self.passes += 1
        if self.passes % 2:
            return
        if all(bool(kept.isfinite().all()) for kept in self.kept.values()):
            for part, kept in zip(self.sharded, self.kept.values(), strict=True):
                part.grad = kept.clone()
            self.adam.step()
        for kept in self.kept.values():
            kept.zero_()
        self.global_steps += 1


def test_an_engine_that_takes_the_gradients_away_says_when_a_step_is_over(tmp_path: Path) -> None:
    """Nobody named it: it is found when it is called, and its number is the step's, also of one that it skips."""
    engine = Engine(linear()[0])
    with nanscope.watch(out=tmp_path) as scope:
        for step in (41, 42, 43):
            for micro in (1, 2):
                engine.backward(engine(torch.full((2, 3), math.nan if (step, micro) == (42, 1) else 1.0)).mean())
                engine.step()
    assert [(e.step, e.update, e.micro_batches, e.stepped) for e in scope.history.entries] == [
        (41, None, 2, None),
        (42, None, 2, "skipped by the trainer"),
        (43, None, 2, None),
    ]
    assert [(incident.step, incident.micro_batch, incident.cause) for incident in scope.verdict.incidents] == [(42, 1, "bad_input")]


class Trap(nn.Linear):
    """Drops what overflows, of rows that are not 1; only its backward meets it again."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = super().forward(rows)
        raised = torch.exp(x + 1e3 * (rows[:, :1] - 1))
        return torch.where(raised < math.inf, raised, x)


class DeepSpeedEngine(Engine):
    """It counts what it skips."""

    skipped_steps = 0

    @property
    def module(self) -> nn.Module:
        return self.model

    def step(self) -> None:
        bad = not all(bool(kept.isfinite().all()) for kept in self.kept.values())
        super().step()
        self.skipped_steps += bad and not self.passes % 2


@pytest.mark.parametrize("counting", [True, False])
def test_a_step_that_an_engine_says_it_skipped_is_looked_into(tmp_path: Path, counting: bool) -> None:
    """Its loss was fine, and its gradients are gone: the backward pass is made once more, and the call in the model is told."""
    model = Trap(3, 2)
    engine = (DeepSpeedEngine if counting else Engine)(model)
    with nanscope.watch(out=tmp_path) as scope:
        for step in (41, 42, 43):
            for _ in range(2):
                engine.backward(engine(torch.full((2, 3), 2.0 if step == 42 else 1.0)).mean())
                engine.step()
    told = [(incident.step, incident.cause, incident.origin.variable) for incident in scope.verdict.incidents]
    assert told == ([(42, "where_grad_trap", "raised")] if counting else []), told


@dataclass
class State:
    """What a trainer counts."""

    global_step: int = 40


def of(package: str, name: str, **counts: Any) -> Any:
    """A trainer as one derives it from a class of that package."""
    return type(name, (type("Trainer", (), {"__module__": f"{package}.trainer"}),), counts)()


TRAINERS: dict[
    str, tuple[Callable[[], Any], Callable[[Any], None], int]
] = {  # how it is made, how it counts a step, the running step's number
    "transformers": (lambda: of("mine", "T", state=State()), lambda t: setattr(t.state, "global_step", t.state.global_step + 1), 41),
    "lightning": (lambda: of("lightning", "T", global_step=40), lambda t: setattr(t, "global_step", t.global_step + 1), 41),
    "deepspeed": (lambda: of("deepspeed", "E", global_steps=40), lambda t: setattr(t, "global_steps", t.global_steps + 1), 41),
    "torchtitan": (lambda: of("torchtitan", "T", step=40), lambda t: setattr(t, "step", t.step + 1), 40),
    "verl": (lambda: of("verl", "T", global_steps=40), lambda t: setattr(t, "global_steps", t.global_steps + 1), 40),
    "skyrl": (lambda: of("skyrl", "T", global_step=40), lambda t: setattr(t, "global_step", t.global_step + 1), 40),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_that_counts_is_asked(name: str) -> None:
    """Each in its own way: of the steps that are over, or of the running one."""
    make, count, first = TRAINERS[name]
    trainer = make()
    counts = Counts((object(), trainer))
    seen = []
    for _ in range(2):
        counts.open()
        counts.begin()
        seen.append(counts.number)
        assert not counts.moved
        count(trainer)
        assert counts.moved
    assert seen == [first, first + 1]


class Unready:
    """A trainer that has no count yet."""

    __module__ = "lightning.trainer"

    @property
    def global_step(self) -> int:
        raise RuntimeError("not attached")


@dataclass
class Other:
    """Something with a count that means something else."""

    step: int = 9
    global_step: int = 9
    state: dict[str, int] = field(default_factory=lambda: {"global_step": 9})


@pytest.mark.parametrize(
    "target", [Other(), of("mine", "T", global_step=9), of("verl", "T", global_steps=None), Unready(), nn.Linear(1, 1)]
)
def test_what_is_no_known_trainer_is_not_asked(target: object) -> None:
    """A number called `step` may count anything: steps are counted here, from 1."""
    counts = Counts((target,))
    for expected in (1, 2):
        counts.open()
        counts.begin()
        counts.begin()
        assert (counts.number, counts.update, counts.micro_batch) == (expected, 1, 2)
    assert counts.backward == 4


@pytest.mark.parametrize("number", [True, 1.5, "7", None, torch.tensor([1, 2])])
def test_a_step_is_a_whole_number(number: Any) -> None:
    """Anything else is refused at once."""
    with pytest.raises(NanscopeError, match="whole number"):
        nanscope.watch().step(number)


def test_a_whole_number_may_be_a_tensor(tmp_path: Path) -> None:
    """What counts in torch or numpy is taken as it is."""
    model, optimizer = linear()
    with nanscope.watch(out=tmp_path) as scope:
        scope.step(torch.tensor(12))  # type: ignore[arg-type]
        one(optimizer, model)
    assert [entry.step for entry in scope.history.entries] == [12]
