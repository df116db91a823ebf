"""The outlook of a run: what its gauge says of each step, and, where that runs towards an edge, one line before it gets there.

    nanscope [forecast]: step 38: ref_log_ratio at masked tokens gains 1.6 nats a step: at this pace exp overflows in about 12 steps …

A number that the loss cannot be harmed with is followed, too, until it is seen on the running step, driven over its edge, that it cannot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nanscope.capture.gauge import Beside, Dials, Gauge, read_gauge, topmost
from nanscope.capture.reading import Extremes, Spot
from nanscope.capture.tape import Tape
from nanscope.errors import NanscopeError, ProgramError
from nanscope.frameworks.live import objective_of
from nanscope.frameworks.losses import LOSSES, framework_settings
from nanscope.locate.trace import Trace
from nanscope.objective.settings import Correction
from nanscope.snapshot.step import Snapshot
from nanscope.snapshot.trend import Approach, Point, approach
from nanscope.verdict.forecast import Forecast, Runaway, best_fix, foresee, harm_of
from nanscope.watching.course import Course
from nanscope.watching.cruise import Familiar
from nanscope.watching.examine import Examiner
from nanscope.watching.keeping import Keeper
from nanscope.watching.logbook import Logbook
from nanscope.watching.recording import Recording

SQUARED = 64.0  # bits: a norm above 2^64 has a square above the range of float32, and bfloat16
WHOLE = 128.0  # bits: of that range


class Outlook:
    """Reads the gauge of one thread's steps, and follows it."""

    def __init__(self, tape: Tape, keeper: Keeper, examiner: Examiner, logbook: Logbook) -> None:
        self._tape, self._keeper, self._examiner, self._logbook = tape, keeper, examiner, logbook
        self._gauge = Gauge()
        self.dials: Dials | None = None  # of the last program that was read

    @property
    def _course(self) -> Course:
        return self._keeper.course

    def read(self, recording: Recording, found: Familiar | None) -> None:
        """A backward pass begins: compute what there is to read, and take it where that waits for nothing. found: where to read it, where
        its loss is not written down."""
        recording.beside, self.dials = self._tape.beside, None
        beside = Beside(recording.beside, lambda: correction_of(recording))
        if recording.unwritten is not None and found is not None:
            gauged = read_gauge(found.dials, found.values, beside, found.known.dialled.unseen)
        elif recording.program is not None:
            gauged = self._gauge.read(recording.program, self._tape.tensor, beside)
            self.dials = self._gauge.dials
        else:
            return
        if gauged.numbers is not None and recording.waits and gauged.numbers.device == recording.loss.device:
            recording.gauged = gauged
        elif gauged.numbers is not None and gauged.numbers.is_cpu:
            recording.gauged = gauged
            self.take(recording, gauged.numbers.tolist())

    def take(self, recording: Recording, numbers: Sequence[float]) -> None:
        """The numbers of a recording have come to the host."""
        if recording.gauged is not None and recording.reading is None and numbers:
            recording.reading = recording.gauged.told(numbers)
            self._course.line.add_reading(recording.reading)

    def judge(self, recording: Recording) -> None:
        """A backward pass has ended in which all is well: does an exponent of its loss run to where exp overflows?"""
        for one in recording.reading.extremes if recording.reading is not None else ():
            for masked, value in ((False, one.highest), (True, one.highest_masked)):
                if value is not None and math.isfinite(value) and value < one.limit:
                    gauge = one.spot, masked
                    found = self._approach(gauge, self._course.trends.add(gauge, value), one.limit)
                    if found is not None:
                        self._course.trends.told.add(gauge)
                        self._foretell(recording, one, masked, value, found)

    def close(self) -> None:
        """The step is over: does loss, gradient norm, or what is inside the models run to the end of its range?"""
        line, trends = self._course.line, self._course.trends
        norm = line.norm if line.before is None else line.before
        sizes = (
            ("the loss", line.loss, WHOLE, "it overflows float32"),
            ("the gradient norm", norm, SQUARED, "its square overflows float32"),
        )
        for name, size, edge, end in sizes if not self._course.bad else ():
            if size is not None and math.isfinite(size) and size:
                bits = math.log2(abs(size))
                self._follow(name, bits, edge, Runaway(name, None, bits, edge, "bit", end))
        if line.room is not None and math.isfinite(line.room):
            room = Runaway(f"the headroom of {line.room_at}", None, line.room, 0.0, "bit", "it overflows")
            self._follow("room", -line.room, 0.0, room, sign=-1.0)
        trends.close()

    def _follow(self, gauge: str, value: float, edge: float, runaway: Runaway, sign: float = 1.0) -> None:
        found = self._approach(gauge, self._course.trends.add(gauge, value), edge)
        if found is not None:
            self._course.trends.told.add(gauge)
            self._tell(Forecast(self._course.counts.number, runaway, replace(found, slope=sign * found.slope)), None)

    def _approach(self, gauge: object, points: Sequence[Point], edge: float) -> Approach | None:
        return None if gauge in self._course.trends.told or self._course.bad else approach(points, edge)

    def _foretell(self, recording: Recording, one: Extremes, masked: bool, value: float, found: Approach) -> None:
        """Drive the exponent over its limit on this very step: say what would come of it, unless that is nothing."""
        split = one.highest_masked is not None
        runaway = _runaway(one.spot, masked if split else None, value, one.limit)
        forecast = Forecast(self._course.counts.number, runaway, found)
        snapshot = self._keeper.healthy(recording)
        if snapshot is None or not snapshot.program.calls:
            self._tell(forecast, None)
            return
        try:
            trace = Trace.of(snapshot.program, snapshot.tensors, backward=False)
            spot = topmost(snapshot.program, trace.values, one.spot, masked)
            if spot is None:  # it was not kept: cut away with what is over the vocabulary
                self._tell(forecast, snapshot)
                return
            incident = foresee(snapshot, spot[0], trace.values[spot[0]], spot[1], one.limit)
        except ProgramError:
            self._tell(forecast, snapshot)
            return
        if incident is not None:
            self._tell(replace(forecast, harm=harm_of(incident), fix=best_fix(incident), incident=incident), snapshot)

    def _tell(self, forecast: Forecast, snapshot: Snapshot | None) -> None:
        known = self._course.line.forecast
        self._course.line.forecast = forecast.short if known is None else f"{known}; {forecast.short}"
        self._logbook.foretell(forecast, snapshot)


def _runaway(spot: Spot, masked: bool | None, value: float, limit: float) -> Runaway:
    where = f"{spot.function.rsplit('.', 1)[-1]}, line {spot.line}" if spot.file else ""
    where = f"{Path(spot.file).name}, line {spot.line}" if spot.file and spot.function == "<module>" else where
    return Runaway(spot.name or "the exponent", masked, value, limit, "nat", f"{spot.op} overflows", where, spot.file, spot.line)


def correction_of(recording: Recording) -> Correction | None:
    """Return the correction between sampler and trainer that the framework's settings ask for as they are now, None if there is none."""
    objective = objective_of(recording.glimpses)
    if objective.get("key") not in LOSSES:
        return None
    try:
        return framework_settings(objective["key"], **objective["settings"]).correction
    except NanscopeError:  # settings that are read wrongly, or those of another release
        return None
