"""What goes wrong in the running step is counted, described, and kept; what becomes of it is added when it is seen."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanscope.capture.failsafe import Failsafe
from nanscope.snapshot.history import TAIL
from nanscope.snapshot.observation import UNSEEN, Observation
from nanscope.snapshot.step import Reached, Snapshot, Stepped
from nanscope.verdict.incident import NonFiniteError
from nanscope.watching.course import Course
from nanscope.watching.examine import Examiner, Hit
from nanscope.watching.logbook import Logbook
from nanscope.watching.recording import Recording


class Keeper:
    """Keeps what the examiner finds in the logbook. course: of which the step is. told: adds what is known of bad weights from before.
    late: its thread had computed something before it was watched. stops: training is to end at a bad step.
    """

    def __init__(
        self,
        course: Course,
        examiner: Examiner,
        logbook: Logbook,
        failsafe: Failsafe,
        told: Callable[[Snapshot], Snapshot],
        *,
        late: bool,
        stops: bool,
    ) -> None:
        self.course, self.late, self._told, self.stops = course, late, told, stops
        self._examiner, self._logbook, self._failsafe = examiner, logbook, failsafe

    def keep(self, hit: Hit | None) -> None:
        """Keep what was found, if anything was."""
        if hit is not None:
            self.save(hit.recording, hit.reached, functools.partial(self._examiner.snapshot, hit), hit.seen)

    def save(
        self, recording: Recording | None, reached: Reached, describe: Callable[[Snapshot], Snapshot], seen: Observation = UNSEEN
    ) -> None:
        """Count a bad step, and have it described and kept if there is room for it. seen: what no program shows."""
        course, counts = self.course, self.course.counts
        another, of_update = not course.bad, bool(reached.bad_weights)
        course.spoilt(str(seen.kind) if seen.suspect else "")
        if self._logbook.count(counts.number, recording, another, course.poisoning, of_update):
            kept = [self.blank(recording, reached)]
            self._failsafe("explain", lambda: kept.append(describe(kept[0])))
            self._failsafe("remains", lambda: kept.append(self._told(kept[-1])))
            if not course.poisoning.lasts:  # else it is known what wrote it
                self._failsafe("edited", lambda: kept.append(self._examiner.edited(kept[-1]) or kept[-1]))
            self._failsafe("token-texts", lambda: kept.append(self._examiner.worded(kept[-1])))
            if self.late and kept[-1].found.origin.line is None:
                thread = threading.current_thread().name
                self._logbook.gap("other-thread", f"what thread {thread} had computed before it was seen to train", counts.number)
            self._logbook.keep(kept[-1], course.poisoning)

    def unexplained(self) -> None:
        """A step that is bad and of which nobody can say why is bad all the same."""
        if not self.course.bad:
            recording = self.course.recordings[-1] if self.course.recordings else None
            self.save(recording, Reached(recording.value if recording else None), lambda blank: blank)

    def asked(self, recording: Recording) -> None:
        """Keep a step that nothing is wrong with."""
        snapshot = self.healthy(recording)
        if snapshot is not None:
            self._logbook.keep_asked(snapshot)

    def healthy(self, recording: Recording) -> Snapshot | None:
        """Return a step that nothing is wrong with, None if its loss was not recorded."""
        return self._examiner.asked(recording, self.blank(recording, Reached(recording.value)))

    def mark(self, **changes: Any) -> None:
        """Add to what this step's incidents reached."""
        plain = {name: str(value) if isinstance(value, Stepped) else value for name, value in changes.items()}
        self._logbook.mark(self.course.counts.number, self.course.counts.update, **plain)

    def mark_gradients(self, total: int, bad: int) -> None:
        """So many gradients reached an optimizer, and were not finite."""
        if self.course.bad and self._logbook.snapshots:
            reached = self._logbook.snapshots[-1].reached
            self.mark(gradients=max(total, reached.gradients or 0), bad_gradients=max(bad, reached.bad_gradients or 0))

    def note_gone(self) -> None:
        """What made the gradients bad may be a backward pass that was let go of."""
        if self.course.recordings.gone:
            text = "the first backward passes of a step whose gradients went bad, which were not held any more when that was seen"
            self._logbook.gap("not-held", f"{text} (a larger budget= holds more)", self.course.counts.number)

    def stop_if_asked(self) -> None:
        """End training. Raises NonFiniteError if that was asked for."""
        if not self.stops:
            return
        self.course.stopped = True
        self.mark(stepped=Stepped.STOPPED)
        verdict = self._logbook.verdict()
        path = self._logbook.paths[-1] if self._logbook.paths else None
        message = f"{verdict.sentence}\nsnapshot: {path or 'not written'}"
        raise NonFiniteError(message, verdict=verdict, snapshot=str(path) if path else None)

    def blank(self, recording: Recording | None, reached: Reached) -> Snapshot:
        """Return what is known of the running step before anything in it is looked at."""
        counts = self.course.counts
        part = recording.micro_batch if recording is not None else 1
        blank = self._logbook.blank(counts.number, recording.loss if recording is not None else None, part, reached)
        running = self.course.line.entry(counts, blank.rank, Stepped.TAKEN, True, self.course.ruined)  # as far as it is known
        return replace(
            blank, update=counts.update, backward=counts.backward - counts.micro_batch + part, history=(*blank.history, running)[-TAIL:]
        )
