"""What threads that train the same weights do with a step of these: it is handed on from one to the other, as it stands."""

from __future__ import annotations

from collections.abc import Set

from nanscope.capture.modules import ModuleWatch
from nanscope.capture.tape import Tape
from nanscope.watching.counts import Counts
from nanscope.watching.course import Course
from nanscope.watching.keeping import Keeper
from nanscope.watching.optimizers import Optimizers
from nanscope.watching.recordings import Recordings
from nanscope.watching.remains import Remains


class Relay:
    """What is with one thread: the course of the weights that it trains. tape, modules: its own."""

    def __init__(self, tape: Tape, modules: ModuleWatch, optimizers: Optimizers, remains: Remains, keeper: Keeper) -> None:
        self._tape, self._modules, self._optimizers = tape, modules, optimizers
        self._remains, self._keeper = remains, keeper

    @property
    def _course(self) -> Course:
        return self._keeper.course

    @property
    def counts(self) -> Counts:
        """The numbers of the running step."""
        return self._course.counts

    @property
    def _recordings(self) -> Recordings:
        return self._course.recordings

    def reaches(self, weights: Set[int]) -> bool:
        """Does a backward pass of the running step come to one of these weights? weights: by id."""
        return self._recordings.reach_to(weights)

    def made(self, weights: Set[int]) -> bool:
        """Have backward passes of the last step here made the gradient of one of these weights? weights: by id."""
        return self._recordings.made > 0 and self._recordings.reach_to(weights)

    @property
    def runs(self) -> bool:
        """Are there gradients that no optimizer has stepped on?"""
        return self._course.runs

    @property
    def is_nobodys(self) -> bool:
        """Are there some, of weights that no optimizer that was seen updates?"""
        return self.runs and self._optimizers.of(self._course.left.parameters) is None

    def rests(self) -> bool:
        """The thread has ended: is there something that another one would go on with, of weights that are still there?"""
        if not self.runs:
            self._recordings.let_go()
        return self.runs or self._recordings.reached_some()

    def goes_on_from(self, other: Relay) -> bool:
        """Is what was called here, and is about to be differentiated, what the step of another thread has come to?"""
        models = [] if self.runs else [model for call in self._modules.calls for model in call.models if other._recordings.reached(model)]
        return any(weight.requires_grad for model in models for weight in model.parameters())  # else they share what neither trains

    def take_over(self, other: Relay) -> None:
        """Go on with the step of another thread."""
        self._keeper.course, other._keeper.course = other._course, self._course
        self._recordings.trade_places(other._recordings)
        self._remains.learn(other._remains)
        self.measured_in(other)

    def join(self, other: Relay) -> None:
        """What another thread has differentiated is stepped on together with what was here."""
        self._course.join(other._course)

    def measured_in(self, other: Relay) -> None:
        """Another thread has measured the gradients of this one's step."""
        self._tape.clipping.join(other._tape.clipping)
        self._tape.agreed.join(other._tape.agreed)
