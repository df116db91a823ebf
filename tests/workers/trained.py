"""A trainer as people use it, watched: one fault of each phase, planted beside it, and the count of what the fault did.

A driver of a trainer (`trl_trainer.py`, …) says how it is built and started. Nothing of the trainer is patched: a fault sits in the data, in a
module of the model, in a weight or in the learning rate.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from telling import BAD, Case, Ran, bits, tell
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import nanscope

T = TypeVar("T")
FAULTS = ("healthy", "input", "forward", "backward", "optimizer", "weights")
WEIGHT = (1, 2)  # of a weight, the element that goes bad
HUGE = 1e3  # nat; exp overflows in every format


class Clock:
    """Which fault it is, and how many steps were taken. A module that knows the time holds this, and nothing else."""

    def __init__(self, fault: str) -> None:
        self.fault, self.taken = fault, 0

    def __deepcopy__(self, memo: object) -> Clock:
        return self  # a copy of the model has the same fault

    def now(self, fault: str) -> bool:
        """Is it this fault, and its step?"""
        return self.fault == fault and self.taken == BAD - 1


class Plant:
    """One fault, and when it is there: in the step after the first one.

    counts: which optimizer's steps count, where a trainer has several. between: by fault, what happens between the first step and the second.
    harm: by step, of the gradients and weights that its optimizer got and left, how many are not finite, and all; of one optimizer.
    drops: the trainer takes no bad step, so that its steps and those of the optimizer have different numbers.
    """

    def __init__(self, fault: str) -> None:
        self.clock, self.fetched = Clock(fault), 0
        self.counts: Callable[[Optimizer], bool] = lambda optimizer: True
        self.between: dict[str, Callable[[], object]] = {}
        self.harm: dict[str, dict[str, list[int]]] = {}
        self.optimizers: set[int] = set()
        self.drops = False

    def spoilt(self, batch: T, spoil: Callable[[T], object], each: int = 1) -> T:
        """Return a batch, spoilt if it is of the bad step and the fault is one of the input. each: batches a step."""
        self.fetched += 1
        if self.clock.fault == "input" and self.fetched == (BAD - 1) * each + 1:
            spoil(batch)
        return batch

    def poison(self, fault: str, weight: Tensor) -> None:
        """Let a weight go bad between two steps."""

        def write() -> None:
            with torch.no_grad():
                weight[WEIGHT] = math.nan

        self.between[fault] = write

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Count steps of optimizers; while it is the second one's turn, plant what sits in no batch and no layer."""
        rates: dict[int, list[float]] = {}

        def before(optimizer: Optimizer, *_: object) -> None:
            if self.counts(optimizer) and self.clock.now("optimizer"):
                rates[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
                for group in optimizer.param_groups:
                    group["lr"] = math.inf

        def after(optimizer: Optimizer, *_: object) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            grads = [p.grad for p in parameters if p.grad is not None]
            self.harm[str(len(self.harm) + 1)] = {"gradients": count(grads), "weights": count(parameters)}
            self.optimizers.add(id(optimizer))
            for group, rate in zip(optimizer.param_groups, rates.pop(id(optimizer), ()), strict=False):
                group["lr"] = rate
            if self.counts(optimizer):
                self.clock.taken += 1
                if self.clock.taken == BAD - 1 and self.clock.fault in self.between:
                    self.between[self.clock.fault]()

        hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def count(tensors: list[Tensor]) -> list[int]:
    """Return how many are not finite, and all."""
    return [sum(not bool(torch.isfinite(tensor).all()) for tensor in tensors), len(tensors)]


class Activation(nn.Module):
    """The activation of a model, in which a fault of the model sits."""

    def __init__(self, plant: Plant) -> None:
        super().__init__()
        self.clock = plant.clock

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.clock.now("forward"):  # and not while it generates
            steep = torch.exp(x + HUGE)
            x = x * steep
        if torch.is_grad_enabled() and self.clock.now("backward"):
            raised = torch.exp(x + HUGE)
            x = torch.where(raised < math.inf, raised, x)
        return nn.functional.silu(x)


def faulty(model: nn.Module, plant: Plant) -> nn.Module:
    """Put the faulty one in the place of the last activation of a transformer."""
    *_, last = (module for module in model.modules() if hasattr(module, "act_fn"))
    last.act_fn = Activation(plant)
    return model


class Net(nn.Module):
    """A small model, of which every element counts. As trainers of transformers want it, it returns its loss with labels."""

    def __init__(self, plant: Plant, inputs: int = 3, outputs: int = 1) -> None:
        super().__init__()
        self.first, self.act_fn, self.last = nn.Linear(inputs, 8), Activation(plant), nn.Linear(8, outputs)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        predicted = self.last(self.act_fn(self.first(x)))
        if labels is None:
            return predicted
        return {"loss": (predicted - labels).square().mean(), "logits": predicted}


def batches(plant: Plant, count: int, each: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and targets; a NaN among the rows of the bad step is the fault of the input. each: batches a step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x, y = torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)
        yield plant.spoilt((x, y), lambda rows: rows[0].__setitem__((2, 1), math.nan), each)


@dataclass(frozen=True, slots=True)
class Ready:
    """A trainer that is ready to train. watched: what `nanscope.watch` is given. models: all that is trained, and all that is not."""

    train: Callable[[], object]
    models: tuple[nn.Module, ...]
    watched: tuple[Any, ...] = ()


Build = Callable[[Plant, Path], Ready]


def run(builds: Mapping[str, Build], case: Case, out: Path, watched: bool) -> Ran:
    """Train one case. A trainer that ends with an exception ends so in both runs."""
    torch.manual_seed(0)
    plant, error = Plant(case.fault), ""
    ready = builds[case.settings["trainer"]](plant, out / "trainer")
    scope = nanscope.watch(*ready.watched, out=out) if watched else None
    try:
        with scope or contextlib.nullcontext(), plant.planted():
            ready.train()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    held = (tensor for model in ready.models for tensor in (*model.parameters(), *model.buffers()))
    return Ran(scope, bits(held), plant.harm if len(plant.optimizers) == 1 and not plant.drops else {}, error)


def main(builds: Mapping[str, Build], framework: str, entry: str, frameworks: Mapping[str, str] | None = None) -> None:
    """Print what is told of each case that the command line names. builds: by the trainer's name."""
    cases = (
        Case(f"{name}: {fault}", fault, {"trainer": name}, (frameworks or {}).get(name, ""), name) for name in builds for fault in FAULTS
    )
    tell(lambda case, out, watched: run(builds, case, out, watched), cases, framework, entry)
