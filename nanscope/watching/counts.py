"""The numbers of the running step: the loop's own count where it has one, else counted here from 1.

    step 412, update 2, micro-batch 3 of 4

A step is one try at an update, also where the trainer then does not take it. `update` tells steps apart that the loop gives one number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Counter:
    """Where a trainer keeps its count. package: that its class comes from, "" for any. path: from the trainer on. finished: it counts
    the steps that are over, else it is the number of the running one."""

    package: str
    path: tuple[str, ...]
    finished: bool


COUNTERS = (
    Counter("", ("state", "global_step"), finished=True),  # transformers, TRL
    Counter("lightning", ("global_step",), finished=True),
    Counter("pytorch_lightning", ("global_step",), finished=True),
    Counter("deepspeed", ("global_steps",), finished=True),  # of its engine; the steps that it skips among them
    Counter("torchtitan", ("step",), finished=False),
    Counter("verl", ("global_steps",), finished=False),  # of several updates each
    Counter("skyrl", ("global_step",), finished=False),  # likewise
    Counter("skyrl_train", ("global_step",), finished=False),
)


class Counts:
    """Counts steps, micro-batches and backward passes. targets: what is watched; one of them may have a count of its own.

    number, update: of the running step. micro_batch: backward passes in it so far. backward: in the run. steps: that are over, in the run.
    """

    def __init__(self, targets: Iterable[Any]) -> None:
        self.number, self.update = 0, 1
        self.micro_batch = self.backward = self.steps = 0
        self._told: int | None = None
        self._counters = [(target, counter) for target in targets for counter in COUNTERS if _is_of(target, counter.package)]

    def tell(self, number: int) -> None:
        """The loop says which step it is in, until it says another."""
        self._told = number

    @property
    def next(self) -> int:
        """The number of a step that would begin now."""
        own = self._own()
        return self.steps + 1 if own is None else own

    @property
    def moved(self) -> bool:
        """Has the loop's own count moved since the last backward pass began?"""
        return self._own() not in (None, self.number)

    def open(self) -> None:
        """A step begins."""
        number, before = self.next, self.number
        self.update = self.update + 1 if number == before else 1
        self.number, self.micro_batch = number, 0

    def begin(self) -> None:
        """A backward pass of it begins; a loop may count micro-batches, too."""
        number = self.next
        self.update = self.update if number == self.number else 1
        self.number = number
        self.micro_batch += 1
        self.backward += 1

    def _own(self) -> int | None:
        if self._told is not None:
            return self._told
        for known in self._counters:
            try:
                found = functools.reduce(getattr, known[1].path, known[0])
            except Exception:  # noqa: BLE001 - a trainer may do anything when it is asked, and has no count before it trains
                continue
            if isinstance(found, int):
                return found + known[1].finished
        return None


def _is_of(target: object, package: str) -> bool:
    """Is this an object of the package, or of a class that was derived from one of it?"""
    return not package or any(kind.__module__.partition(".")[0] == package for kind in type(target).__mro__)
