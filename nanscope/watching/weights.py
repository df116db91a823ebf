"""The weights after an update: is what the step has written still finite? And what is left of them when the block ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanscope.capture.failsafe import Failsafe
from nanscope.program.numbers import count_bad
from nanscope.snapshot.observation import Observation, Phase
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.watching.course import Course
from nanscope.watching.examine import Examiner
from nanscope.watching.gradients import Gradients
from nanscope.watching.keeping import Keeper
from nanscope.watching.logbook import Logbook
from nanscope.watching.optimizers import updated_by
from nanscope.watching.readable import readable
from nanscope.watching.recording import Recording
from nanscope.watching.remains import AT_END, Remains


class Weights:
    """Asked when an optimizer has stepped, when the loop has written to its weights itself, and when the block ends."""

    def __init__(
        self, remains: Remains, gradients: Gradients, keeper: Keeper, examiner: Examiner, logbook: Logbook, failsafe: Failsafe
    ) -> None:
        self._remains, self._gradients = remains, gradients
        self._keeper, self._examiner, self._logbook, self._failsafe = keeper, examiner, logbook, failsafe

    @property
    def _course(self) -> Course:
        return self._keeper.course

    def after(self, optimizers: Sequence[torch.optim.Optimizer], first: bool) -> tuple[int, int]:
        """They have stepped: return how many weights they update, and how many of these are not finite. first: they had no state before."""
        weights = self._of(optimizers)
        buffers = self._remains.buffers()
        bad = count_bad([*weights, *buffers])
        spoilt = count_bad(buffers) if bad and buffers else 0
        bad -= spoilt
        if not spoilt:
            self._remains.buffers_are_fine(self._course.counts.number)
        elif not (bad or self._course.foreign or self._course.bad):  # else a later step tells it, that is fine otherwise
            self._failsafe("remains", self._keep_buffer)
        self._remains.optimizers.wrote(optimizers, bad)
        self._remains.optimizers.rates.stepped(optimizers, self._course.counts.number)
        self._are(bad, _all_of(optimizers), optimizers)
        for one in optimizers if bad else ():
            if not (self._course.bad or self._course.foreign):
                self._gradients.overwritten(one)
        if bad and not (self._course.bad or self._course.foreign):
            self._keep_update(optimizers, first, len(weights), bad)
        return len(weights), bad

    def after_own_update(self, inside: bool = False) -> None:
        """The loop has written to its weights itself, and no optimizer asks. inside: a backward pass, in hooks."""
        weights = readable(self._remains.updated(), "weights", self._logbook.gap)
        bad = count_bad(weights)
        find = self._examiner.update_by_hook if inside else self._examiner.own_update
        describe = find() if bad and not self._course.bad else None
        if describe is not None:
            self._keeper.save(self._last(), Reached(self._loss(), None, None, len(weights), bad), describe)
        elif bad and self._course.bad:
            self._keeper.mark(weights=len(weights), bad_weights=bad)
        if self._course.bad or not bad:  # else the next step tells it: they were written to after the update
            self._are(bad, self._remains.updated())

    def bad(self) -> bool:
        """Is one of those not finite that are updated?"""
        return count_bad(readable(self._remains.updated(), "weights", self._logbook.gap)) > 0

    def or_buffers_bad(self) -> bool:
        """Is one of those not finite, or a buffer that was?"""
        return self.bad() or self._remains.has_bad_buffers()

    def left(self) -> Observation | None:
        """Return the first weight or buffer that is bad when the block ends, None if none is that nobody has told: whoever goes on begins
        with that."""
        course = self._course
        told = any(snapshot.found.past.found == AT_END for snapshot in self._logbook.snapshots)
        known = told or course.foreign or course.poisoning.lasts or (course.bad and not course.closed)
        return None if known else self._remains.bad()

    def keep_left(self, found: Observation | None) -> None:
        """Keep what is left of one, if anything is."""
        if found is not None:
            self._keeper.save(None, Reached(), lambda blank: self._noted(replace(blank, observation=found, found=found)))

    def _noted(self, snapshot: Snapshot) -> Snapshot:
        """With a word of where it does not come from, where that is all that is known."""
        fine = "" if self._logbook.bad_steps > 1 else "every step that was seen was fine, and "
        own = "; what is done with gradients of torch.autograd.grad is no step" if self._examiner.tape.gave_gradients else ""
        note = ("left_behind", f"{fine}no update that was seen wrote it{own}")
        return replace(snapshot, notes=(*snapshot.notes, note)) if snapshot.found.phase is Phase.WEIGHTS else snapshot

    def _keep_buffer(self) -> None:
        """A buffer is bad, and nothing else: which call of this step has written that?"""
        spoilt, recordings = self._remains.bad_buffer(), self._course.recordings
        if spoilt is not None:
            describe = functools.partial(self._examiner.buffer, spoilt.seen, spoilt.owner, spoilt.name, recordings)
            self._keeper.save(self._last(), Reached(self._loss()), lambda blank: self._noted(describe(blank)))
            self._remains.buffers_are_told()

    def _are(self, bad: int, weights: Sequence[Tensor], of: Sequence[torch.optim.Optimizer] = ()) -> None:
        """After the update of this step so many of these weights are non-finite. of: who has updated them."""
        course = self._course
        course.poisoning.weights(course.counts.number, bad, of)
        if not bad:
            self._remains.fine(course.counts.number, weights)

    def _keep_update(self, optimizers: Sequence[torch.optim.Optimizer], first: bool, total: int, bad: int) -> None:
        """Loss and gradients were finite, the update was not."""
        optimizer = next(one for one in optimizers if count_bad(self._of([one])))
        grads = [weight.grad for weight in updated_by(optimizer) if weight.grad is not None]
        reached = Reached(self._loss(), len(grads), count_bad(readable(grads, "gradients", self._logbook.gap)), total, bad, "taken")
        self._keeper.save(
            self._last(),
            reached,
            functools.partial(self._examiner.update, optimizer, first, self._course.left.until.calls, self._remains.was_fine),
        )

    def _of(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
        return readable(self._remains.but_masks(_all_of(optimizers)), "weights", self._logbook.gap)

    def _last(self) -> Recording | None:
        return self._course.recordings[-1] if self._course.recordings else None

    def _loss(self) -> float | None:
        last = self._last()
        return last.value if last is not None else None


def _all_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    return [weight for one in optimizers for weight in updated_by(one)]
