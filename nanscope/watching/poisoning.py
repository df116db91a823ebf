"""Which bad steps are only consequences: the weights were non-finite when they began, since an earlier step of the run.

A step is one if what was seen of it says so. Once one was looked at, and as long as those weights stay bad, a step whose loss is fed
non-finite values by the model is one, too, and nobody looks at it again: but for the first whose loss is not finite, where the loss of
those before it was. What goes wrong once more where the step did that spoilt them has brought nothing new, either.

An update that no optimizer of torch makes, or that is not over, is not seen: weights that are found bad after a step with a cause of its
own, with no good one between them, were spoilt by that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import Tensor

from nanscope.program.numbers import is_finite
from nanscope.program.program import Program
from nanscope.snapshot.observation import UNMADE, UNOPENED, Observation, Phase
from nanscope.snapshot.record import Aftermath
from nanscope.watching.recording import Recording

Place = tuple[str | None, int | None, str | None]  # file, line, operator
_FED = UNOPENED | {UNMADE}  # of an origin of which nobody knows more, weights that are bad are reason enough


def is_fed(program: Program, tensors: Mapping[int, Tensor]) -> bool:
    """Is a loss given something by a model that is not finite?"""
    return not all(bool(is_finite(tensors[leaf.id])) for leaf in program.leaves if leaf.diff and leaf.id in tensors)


class Poisoning:
    """Since when the weights of a thread are bad. aftermath: the consequences of each step that made them so, in the run."""

    def __init__(self, aftermath: list[Aftermath] | None = None) -> None:
        self.forget([] if aftermath is None else aftermath)

    def forget(self, aftermath: list[Aftermath]) -> None:
        """Begin anew, in another run."""
        self.aftermath = aftermath
        self._bad = WeakKeyDictionary[object, int]()  # optimizers with bad weights, and how many; this itself, if nobody has those
        self._since: int | None = None
        self._first = 0  # step that can be a consequence of it
        self._own: int | None = None  # the last step with a cause of its own
        self._found = False  # it was found in weights that were bad before
        self._looked = self._confirmed = False  # at a step since then; and it was a consequence
        self._ended = False  # a loss of theirs was not finite
        self._same = False  # as many of some weights were bad before their update as after it
        self._places = set[Place]()  # where steps with a cause of their own went wrong, since these weights are bad

    @property
    def lasts(self) -> bool:
        """Are weights bad since a step that is known?"""
        return self._since is not None

    def weights(self, step: int, bad: int, of: Collection[object] = ()) -> None:
        """After the update of a step, so many weights were non-finite. of: optimizers that have them, and others have others; nobody has
        all of them."""
        these = {*of} or {self}
        self._same = bad > 0 and all(self._bad.get(one) == bad for one in these)
        for one in {*these, self} if of else set(self._bad):
            self._bad.pop(one, None)
        self._bad.update(dict.fromkeys(these, bad) if bad else {})
        if not self._bad:
            self._since, self._own, self._looked, self._confirmed, self._ended = None, None, False, False, False
            self._places.clear()
        elif bad and (self._since is None or (self._own == step and self._since != step and not self._same)):
            self._since, self._first, self._looked, self._confirmed, self._ended = step, step + 1, False, False, False

    def fine(self) -> None:
        """A step was good: what nobody saw being spoilt is not."""
        self._own = None
        if self._since is not None and self._since == self._first:
            self._since, self._looked, self._confirmed, self._ended = None, False, False, False

    def doubtful(self, step: int) -> bool:
        """Has nobody looked yet at a step that began with these weights?"""
        return self._since is not None and self._first <= step and not self._looked

    def explains(self, step: int, recording: Recording | None, looking: bool, of_update: bool = False) -> int | None:
        """Return the step of which a further bad one is surely a consequence. looking: there is still room to look at it closely.
        of_update: nothing is bad but weights, after it."""
        same, self._same = of_update and self._same, False
        ends = recording is not None and not self._ended and not bool(is_finite(recording.loss))
        if looking and (ends or not self._confirmed):
            return None
        if recording is None or recording.program is None or same:
            return self._decided(step, True)
        return self._decided(step, is_fed(recording.program, recording.tensors))

    def of(self, step: int, seen: Observation, loss: float | None = None, fed: bool = False) -> int | None:
        """Return the step of which one that was looked at is a consequence, None if it has a cause of its own. loss: what it was. fed: the
        model has given it what is not finite."""
        own = None if self._own == step and self._found else self._own  # of weights that a step found bad its update is no cause
        if self._since is None and own is not None and seen.phase is Phase.WEIGHTS:
            self._since = self._first = own
        self._found = seen.phase is Phase.WEIGHTS
        self._looked = self._looked or self.doubtful(step)
        place = seen.origin.file, seen.origin.line, seen.origin.op
        found = self._decided(step, seen.phase is Phase.WEIGHTS or seen.origin.op in _FED or (fed and place in self._places))
        if found is None and seen.origin.line is not None:
            self._places.add(place)
        self._confirmed = self._confirmed or found is not None
        self._ended = self._ended or (loss is not None and not math.isfinite(loss))
        return found

    def _decided(self, step: int, fed: bool) -> int | None:
        if self._since is not None and self._first <= step and fed:
            return self._since
        self._own = step
        return None

    def add(self, step: int, of: int) -> None:
        """Count a consequence; what follows within the step itself is a part of that."""
        if step == of:
            return
        for index, known in enumerate(self.aftermath):
            if known.of == of:
                self.aftermath[index] = replace(known, last=step, count=known.count + 1)
                return
        self.aftermath.append(Aftermath(of, step, step, 1))
