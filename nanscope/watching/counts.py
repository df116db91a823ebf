"""The numbers of the running step: the loop's own count where it has one, else counted here from 1.

    step 412, update 2, micro-batch 3 of 4

A step is one try at an update, also where the trainer then does not take it. `update` tells steps apart that the loop gives one number.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Counter:
    """Where a trainer keeps its count. package: that its class comes from, "" for any. path: from the trainer on. finished: it counts
    the steps that are over, else it is the number of the running one. hides: it takes the gradients away after each micro-batch, and
    only its count says that a step is over; it is a module, and found when it is called."""

    package: str
    path: tuple[str, ...]
    finished: bool
    hides: bool = False
    skips: tuple[str, ...] = ()


COUNTERS = (
    Counter("", ("state", "global_step"), finished=True),  # transformers, TRL
    Counter("lightning", ("global_step",), finished=True),
    Counter("pytorch_lightning", ("global_step",), finished=True),
    Counter("deepspeed", ("global_steps",), finished=True, hides=True, skips=("skipped_steps",)),  # of its engine; those among them
    Counter("torchtitan", ("step",), finished=False),
    Counter("verl", ("global_steps",), finished=False),  # of several updates each
    Counter("skyrl", ("global_step",), finished=False),  # likewise
    Counter("skyrl_train", ("global_step",), finished=False),
)


GIVEN = 4096  # numbers that are remembered; a loop that counts anew gives them once more


class Tally:
    """What the threads of a run count together, so that no two steps are called the same. begun: steps, of all of them."""

    def __init__(self) -> None:
        self.begun = 0
        self._given: dict[int, int] = {}  # number → steps that have it
        self._lock = threading.Lock()
        self._said: int | None = None
        self._here = threading.local()

    def restart(self) -> None:
        """Another process begins, with steps of its own."""
        self.begun, self._lock = 0, threading.Lock()
        self._given.clear()

    def tell(self, number: int) -> None:
        """The loop of this thread says which step it is in, until it says another; others say the same that have said nothing."""
        self._said = self._here.said = number

    @property
    def told(self) -> int | None:
        """Which step this thread is in, None if nobody has said."""
        return getattr(self._here, "said", self._said)

    @property
    def said(self) -> int | None:
        """Which step this thread itself has said that it is in."""
        return getattr(self._here, "said", None)

    def begin(self, number: int | None) -> tuple[int, int]:
        """A step begins: return its number, and which one of that number it is. number: that its loop gives it."""
        with self._lock:
            self.begun += 1
            return self._give(self.begun if number is None else number)

    def again(self, number: int) -> int:
        """A step that has begun is given another number: return which one of that number it is."""
        with self._lock:
            return self._give(number)[1]

    def _give(self, number: int) -> tuple[int, int]:
        update = self._given[number] = self._given.pop(number, 0) + 1
        if len(self._given) > GIVEN:
            del self._given[next(iter(self._given))]
        return number, update


class Counts:
    """Counts the steps, micro-batches and backward passes of a thread. targets: what is watched; one may have a count of its own.

    number, update: of the running step. counted: nobody but us has numbered it. micro_batch: backward passes in it so far. backward: in the
    run, of this thread.
    """

    def __init__(self, targets: Iterable[Any], tally: Tally | None = None) -> None:
        self.number, self.update, self.counted = 0, 1, True
        self.micro_batch = self.backward = 0
        self._tally = Tally() if tally is None else tally
        self._counters: list[tuple[Callable[[], object], Counter]] = [
            (functools.partial(_itself, target), counter) for target in targets for counter in COUNTERS if _is_of(target, counter.package)
        ]
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._skipped: int | None = None  # steps, by the loop's own count, when this one began

    def meet(self, modules: Iterable[nn.Module]) -> None:
        """These were called: one of them may be, or hold, an engine that counts, though nobody said so."""
        for module in modules:
            if module not in self._met:
                self._met.add(module)
                hiding = [counter for counter in COUNTERS if counter.hides]
                found = ((part, counter) for part in module.modules() for counter in hiding if _is_of(part, counter.package))
                self._counters += [(weakref.ref(part), counter) for part, counter in found]

    @property
    def hides(self) -> bool:
        """Does only the loop's own count say that a step is over?"""
        return self._tally.told is None and any(counter.hides and target() is not None for target, counter in self._counters)

    @property
    def next(self) -> int:
        """The number of a step that would begin now."""
        own = self._own(self._tally.told)
        return self._tally.begun + 1 if own is None else own

    @property
    def moved(self) -> bool:
        """Has the loop's own count moved since the last backward pass began?"""
        return self._own(self._tally.said) not in (None, self.number)

    def open(self, beside: Counts | None = None) -> None:
        """A step begins. beside: it is the one that another thread is in."""
        self._skipped = self._skips()
        if beside is not None:
            self.number, self.update, self.counted, self.micro_batch = beside.number, beside.update, beside.counted, beside.micro_batch
            return
        own = self._own(self._tally.told)
        self.number, self.update = self._tally.begin(own)
        self.counted, self.micro_batch = own is None, 0

    @property
    def skipped(self) -> bool:
        """Does the loop say itself that it did not take this step, since its gradients were not finite?"""
        return self._skipped is not None and self._skips() not in (None, self._skipped)

    def begin(self) -> None:
        """A backward pass of it begins; a loop may count micro-batches, too."""
        own = self._own(self._tally.said)
        if own is not None and own != self.number:
            self.number, self.update, self.counted = own, self._tally.again(own), False
        self.micro_batch += 1
        self.backward += 1

    def _own(self, told: int | None) -> int | None:
        if told is not None:
            return told
        for target, counter in self._counters:
            found = _read(target, counter.path)
            if found is not None:
                return found + counter.finished
        return None

    def _skips(self) -> int | None:
        found = (_read(target, counter.skips) for target, counter in self._counters if counter.skips)
        return next((number for number in found if number is not None), None)


def _read(target: Callable[[], object], path: tuple[str, ...]) -> int | None:
    """Return a count, None if there is none."""
    try:
        found = functools.reduce(getattr, path, target())
    except Exception:  # noqa: BLE001 - a trainer may do anything when it is asked, and has no count before it trains
        return None
    return found if isinstance(found, int) else None


def _itself(target: object) -> object:
    return target


def _is_of(target: object, package: str) -> bool:
    """Is this an object of the package, or of a class that was derived from one of it?"""
    return not package or any(kind.__module__.partition(".")[0] == package for kind in type(target).__mro__)
