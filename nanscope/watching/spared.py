"""What a loss scaler spares the weights: a loss that has left half precision is an incident only if something stays bad.

overflow_skipped: step 1: self.conv(x) overflowed to +inf …; the scaler skipped the step, and all weights and buffers are finite

Who scales a loss expects half precision to overflow now and then, and such a step to be skipped. Whether that was all is known when the
step is over: statistics of a norm may have kept what the weights were spared. A loss that is bad in any other way is an incident at once,
and so is one that leaves half precision in step after step: no scale is too high for that, and nothing is trained any more.
"""

from __future__ import annotations

from collections.abc import Callable

from nanscope.causes import Cause
from nanscope.snapshot.observation import Phase
from nanscope.snapshot.step import Snapshot, Stepped
from nanscope.verdict.rules import cause_of
from nanscope.verdict.sentence import what
from nanscope.watching.course import Held
from nanscope.watching.examine import Examiner, Hit
from nanscope.watching.keeping import Keeper
from nanscope.watching.logbook import Logbook

IN_A_ROW = 3  # steps, of which the last is an incident
LOOKED_AT = 8  # skipped steps of a run of which it is found out what overflowed


class Spared:
    """Asked when a loss is found to be bad, and when its step is over. is_bad: is a weight or a buffer not finite? acts: what is bad is
    acted upon at once."""

    def __init__(self, keeper: Keeper, examiner: Examiner, logbook: Logbook, is_bad: Callable[[], bool], acts: bool) -> None:
        self._keeper, self._examiner, self._logbook, self._is_bad, self._acts = keeper, examiner, logbook, is_bad, acts
        self._found = 0
        self._in_a_row = 0

    def takes(self, hit: Hit) -> bool:
        """Is it known what to do about a loss? If it has left half precision, nothing until the step is over; else it is kept."""
        course, scale = self._keeper.course, hit.recording.scale
        if self._acts or course.bad or course.search.stuck or not hit.loss_bad or scale is None or scale.scaler is None:
            return False
        if self._found >= LOOKED_AT:
            course.held.append(Held(hit.recording, hit.reached, None))
            return True
        snapshot = self._examiner.snapshot(hit, self._keeper.blank(hit.recording, hit.reached))
        if has_left_half_precision(snapshot):
            self._found += 1
            course.held.append(Held(hit.recording, hit.reached, snapshot))
        else:
            self._keeper.save(hit.recording, hit.reached, lambda blank: snapshot)
        return True

    def settle(self, stepped: Stepped | None) -> None:
        """The step is over. stepped: what became of it, None if an optimizer takes it, or if that is not known."""
        course = self._keeper.course
        held, course.held = course.held, []
        if not held:
            self._in_a_row = self._in_a_row if stepped is Stepped.BY_SCALER else 0
            return
        self._in_a_row += 1
        once = stepped is Stepped.BY_SCALER and self._in_a_row < IN_A_ROW
        number, fine = course.counts.number, once and not course.bad and not self._is_bad()
        for one in held:
            if not fine:
                self._keep(one)
            elif one.snapshot is None:
                self._logbook.gap(
                    "skipped-by-scaler", "why the loss of a step was not finite that the scaler skipped, after many such", number
                )
            else:
                after = "the scaler skipped the step, and all weights and buffers are finite"
                self._logbook.note("overflow_skipped", f"step {number}: {what(one.snapshot.found)}; {after}", number)

    def _keep(self, one: Held) -> None:
        snapshot = one.snapshot
        if snapshot is None:
            self._keeper.keep(Hit(one.recording, one.reached, loss_bad=True))
        else:
            self._keeper.save(one.recording, one.reached, lambda blank: snapshot)


def has_left_half_precision(snapshot: Snapshot) -> bool:
    """Was it a value of the forward pass that float16 does not hold?"""
    return snapshot.found.phase is Phase.FORWARD and cause_of(snapshot.found) is Cause.FP16_OVERFLOW
