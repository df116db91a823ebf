"""The course of one set of weights: its running step, and what outlives that.

It is with the thread that last differentiated for these weights, and goes along where another one does it next.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from nanscope.snapshot.step import Reached, Snapshot
from nanscope.watching.counts import Counts
from nanscope.watching.left import Leavings
from nanscope.watching.line import Line
from nanscope.watching.oddities import Sizes
from nanscope.watching.poisoning import Poisoning
from nanscope.watching.recording import Recording
from nanscope.watching.recordings import Recordings
from nanscope.watching.scale import Search
from nanscope.watching.trends import Trends


@dataclass(frozen=True, slots=True)
class Held:
    """A loss that was bad, of which it is told when its step is over. snapshot: None where nobody has looked at it."""

    recording: Recording
    reached: Reached
    snapshot: Snapshot | None


@dataclass(slots=True)
class Course:
    """What is known of it. left: of the gradients, since the backward pass before.

    closed: no step runs. bad: the running one is known to be; ruined: by what, where all of it is finite; stopped: who trains was told.
    foreign: weights were already spoilt by gradients that were not made here.
    raised: a backward pass of the step has raised, and training has not gone on since. steppers: the optimizers that step.
    took: those that have since the last backward pass, and whose gradients are left over from that. wrote: how many weights one has updated
    in the step, and how many of these are bad. held: see `Spared`. trends: of what the gauge has read.
    """

    counts: Counts
    recordings: Recordings
    poisoning: Poisoning
    line: Line = field(default_factory=Line)
    left: Leavings = field(default_factory=Leavings)
    closed: bool = True
    bad: bool = False
    ruined: str = ""
    stopped: bool = False
    foreign: bool = False
    raised: bool = False
    steppers: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    took: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    wrote: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = field(default_factory=WeakKeyDictionary)
    search: Search = field(default_factory=Search)
    sizes: WeakKeyDictionary[torch.optim.Optimizer, Sizes] = field(default_factory=WeakKeyDictionary)
    held: list[Held] = field(default_factory=list)
    trends: Trends = field(default_factory=Trends)

    @property
    def runs(self) -> bool:
        """Are there gradients that no optimizer has stepped on?"""
        return not self.closed and self.recordings.made > 0

    def end(self) -> None:
        """No step runs, and nothing of one is held."""
        self.recordings.clear()
        self.left.forget()
        self.held.clear()
        self.closed, self.raised, self.line = True, False, Line()
        self.fine()

    def fine(self) -> None:
        """Nothing is known against the step."""
        self.bad, self.ruined, self.stopped = False, "", False
        self.wrote.clear()

    def spoilt(self, ruined: str) -> None:
        """The step is bad. ruined: by what, where all that is bad in it is finite."""
        self.ruined = ruined if not self.bad or (self.ruined and ruined) else ""
        self.bad = True

    def join(self, other: Course) -> None:
        """What another thread has differentiated for these weights belongs to this step, and they are one from now on."""
        if other.runs:
            self.recordings.join(other.recordings)
            self.line.join(other.line)
            if other.bad:
                self.spoilt(other.ruined)
            self.held += other.held
            self.counts.micro_batch = max(self.counts.micro_batch, self.recordings.made)
        other.end()
        other.poisoning = self.poisoning
