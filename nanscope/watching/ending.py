"""When is a step over that no optimizer takes, and what became of it?

A trainer that meets a bad norm zeroes the gradients and goes on; a GradScaler does not call the optimizer; a loop may write to the
weights itself.
"""

from __future__ import annotations

from torch import Tensor

from nanscope.capture.modules import ModuleWatch
from nanscope.capture.tape import Tape
from nanscope.program.numbers import count_bad
from nanscope.snapshot.step import Stepped
from nanscope.watching.course import Course
from nanscope.watching.left import Fate, Leavings
from nanscope.watching.optimizers import Optimizers


class Ending:
    """Asked when another backward pass begins, or when the block ends."""

    def __init__(self, tape: Tape, modules: ModuleWatch, optimizers: Optimizers) -> None:
        self._tape, self._modules, self._optimizers = tape, modules, optimizers

    def became(self, course: Course, last: bool, raised: bool = False) -> Stepped | None:
        """Return what became of the running step, None if it still runs. last: no other backward pass follows; raised: by an exception.

        Gradients may also be dropped within one: by who takes them apart (gradient surgery), or pushes the weights before a second pass
        (SAM). So it is over only where it was bad, scaled, or measured, where the model has run since, or where the loop has counted on.
        """
        left, fate, counted = course.left, course.left.fate(), course.counts.moved
        scale = next((recording.scale for recording in reversed(course.recordings) if recording.scale is not None), None)
        if (last or fate is not Fate.KEPT) and scale is not None and scale.backed_off():
            return Stepped.BY_SCALER
        if last and self._moved_by_hand(left):
            return Stepped.BY_HAND
        measured = self.norm_is_bad()
        if course.counts.hides and not counted:
            return None
        if (fate is Fate.KEPT and not (last and measured and not raised)) or (fate is Fate.UNSEEN and not (counted or measured)):
            return None
        bad = course.bad or measured
        if self._moved_by_hand(left):
            return Stepped.BY_HAND
        if self._moved(left) and not bad:
            return None
        if bad or scale is not None or counted or self._tape.clipping.norms or self._modules.calls:
            return Stepped.BY_TRAINER if self._optimizers.any else Stepped.NONE
        return None

    def _moved_by_hand(self, left: Leavings) -> bool:
        """Has the loop written to weights that no optimizer has?"""
        return self._optimizers.of(left.parameters) is None and self._moved(left)

    def _moved(self, left: Leavings) -> bool:
        """Has somebody written to the weights since the backward pass?"""
        return left.weights_moved() or any(self._tape.storages.was_written(parameter, left.until.calls) for parameter in left.parameters)

    def norm_is_bad(self) -> bool:
        """Has the trainer taken a norm of its gradients that is not finite, or asked whether they are, and they were not? The norm of a
        sharded tensor is not read: it takes all ranks."""
        asked = any(not bool(finite) for finite in self._tape.questions.finite)
        return asked or count_bad([norm for norm in self._tape.clipping.norms if type(norm) is Tensor]) > 0

    def norm_may_be_bad(self) -> bool:
        """Does no norm say that the gradients were finite?"""
        return self.norm_is_bad() or not self._tape.clipping.norms

    def norm(self, left: Leavings) -> float | None:
        """Return the norm that the trainer took of the gradients before it dropped them, None if it was not seen. left: of them."""
        norms, measured = self._tape.clipping.norms, self._tape.clipping.measured
        seen = any((one.address, one.size) in measured for one in left)
        return float(norms[-1]) if seen and type(norms[-1]) is Tensor and norms[-1].numel() == 1 else None
