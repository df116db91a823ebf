"""The optimizers that step in a run, and what they are called where there are several: "AdamW of Critic"."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nanscope.text import number
from nanscope.watching.rates import Rates


class Optimizers:
    """Those that were seen to step, with what tells them apart. any: there was one, though it may be gone.

    spoilt: what is updated by those whose last update left something that is not finite, by id. rates: how fast they learn.
    """

    def __init__(self) -> None:
        self.any, self.rates = False, Rates()
        self._names: WeakKeyDictionary[torch.optim.Optimizer, str] = WeakKeyDictionary()
        self._updated: frozenset[int] = frozenset()  # what any of them has updated, by id; replaced, never changed
        # models, with what was updated when they were last asked for, and whether that was a part of them
        self._parts: WeakKeyDictionary[nn.Module, tuple[frozenset[int], bool]] = WeakKeyDictionary()
        self.spoilt: Set[int] = frozenset()  # replaced, never changed: other threads ask
        self._lock = threading.Lock()  # several threads may train

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(list(self._names))

    def add(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
        """One is about to step. modules: of which one may hold its parameters; looked at once an optimizer."""
        self.any = True
        if optimizer not in self._names:
            owner = _owner(optimizer, modules)
            name = type(optimizer).__name__ + (f" of {type(owner).__name__}" if owner is not None else "")
            with self._lock:
                self._updated = self._updated.union(map(id, updated_by(optimizer)))
                alike = sum(known == name or known.startswith(f"{name} #") for known in self._names.values())
                self._names[optimizer] = f"{name} #{alike + 1}" if alike else name

    def name(self, optimizer: torch.optim.Optimizer | None) -> str | None:
        """What one of several is called, None if there is no other."""
        return self._names.get(optimizer) if optimizer is not None and len(self._names) > 1 else None

    def wrote(self, optimizers: Iterable[torch.optim.Optimizer], bad: int) -> None:
        """They have stepped, and so many of what they update are not finite now."""
        if bad or self.spoilt:
            these = {id(parameter) for one in optimizers for parameter in updated_by(one)}
            self.spoilt = self.spoilt | these if bad else self.spoilt - these

    def parameters(self) -> list[Tensor]:
        """Return what those that are still there update."""
        return [parameter for one in self._names for parameter in updated_by(one)]

    def without(self, models: Iterable[nn.Module]) -> list[nn.Module]:
        """Return those models of which no optimizer has updated a part, though one may train others in the same run."""
        return [model for model in models if not self._has_a_part_of(model)]

    def _has_a_part_of(self, model: nn.Module) -> bool:
        updated, known = self._updated, self._parts.get(model)
        if known is None or known[0] is not updated:
            known = self._parts[model] = updated, any(id(parameter) in updated for parameter in model.parameters())
        return known[1]

    def of(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer | None:
        """Return the one that updates one of these, None if none of those seen does."""
        wanted = {id(parameter) for parameter in parameters}
        with self._lock:
            known = list(self._names)
        return next((one for one in known if any(id(parameter) in wanted for parameter in updated_by(one))), None)


def unusable(optimizer: torch.optim.Optimizer) -> dict[str, float | Tensor]:
    """Return those settings of an optimizer that are numbers and not finite, of each name the first."""
    found: dict[str, float | Tensor] = {}
    for group in optimizer.param_groups:
        for key, value in group.items():
            is_number = isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
            if key != "params" and is_number and not math.isfinite(float(value)):
                found.setdefault(key, value)
    return found


def settings_in_words(settings: Mapping[str, float | Tensor]) -> str:
    """Return settings as they are told: lr = inf."""
    return ", ".join(f"{key} = {number(float(value))}" for key, value in settings.items())


def updated_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return what an optimizer updates, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_left_alone(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> bool:
    """Does an optimizer of torch's pass a weight by, since it has no gradient?"""
    return weight.grad is None and is_torchs(optimizer)


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Is it one of torch's own?"""
    return type(optimizer).__module__.startswith("torch.optim.")


def _owner(optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> nn.Module | None:
    """Return the smallest module that the optimizer's first parameter is in: a wrapper of several holds it, too."""
    first = next(iter(updated_by(optimizer)), None)
    owners = [module for module in modules if any(one is first for one in module.parameters())]
    return min(owners, key=lambda module: sum(1 for _ in module.parameters()), default=None)
