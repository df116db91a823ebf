"""The charts of the steps before an incident, ready to be drawn by any renderer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanscope.report.clean import is_finite_number, real, two
from nanscope.snapshot.history import Entry
from nanscope.verdict.incident import Incident


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: (step, value) with the steps ascending. kind: "main" or "masked"."""

    name: str
    kind: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the history. limit: a line to stay below (above, if it is 0). incident: the step that went wrong. log: scale of y.

    said: steps at which something was said to be about to happen.
    """

    title: str
    unit: str
    series: tuple[Series, ...]
    limit: float | None
    limit_name: str
    incident: float | None
    log: bool = False
    said: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """The axes of a panel: what lies at which end, and where a point lies between them, from 0 to 1."""

    first: float
    last: float
    low: float
    high: float
    log: bool

    @staticmethod
    def of(panel: Panel) -> Scale:
        """Return axes that hold every finite point and the limit."""
        steps = [step for line in panel.series for step, _ in line.points]
        sizes = [value for line in panel.series for _, value in line.points if math.isfinite(value)]
        bounds = [*sizes, *([] if panel.limit is None else [panel.limit])] or [0.0]
        return Scale(min(steps), max(steps), min(bounds), max(bounds), panel.log)

    def x(self, step: float) -> float:
        """Where a step lies, from left to right."""
        return (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5

    def y(self, value: float) -> float:
        """Where a finite value lies, from bottom to top."""
        low, high, v = (math.log10(n) if self.log else n / 4 for n in (self.low, self.high, value))  # /4: the distance must not overflow
        return (v - low) / (high - low) if high > low else 0.5


def panels_of(incident: Incident, points: int = 200) -> tuple[Panel, ...]:
    """Return the charts of the steps up to an incident, the bad step itself last; a chart of fewer than two steps is left out."""
    step = real(incident.step)
    entries = [entry for entry in _in_order(incident.history) if step is None or (entry.step <= step and entry.rank == incident.rank)]
    last = _last_point(incident)  # what the line of the bad step does not say
    return _Charts(tuple(entries), step, last, real(incident.origin.limit), points).panels() if len(entries) >= 2 else ()


def panels_of_run(entries: Sequence[Entry], points: int = 200) -> tuple[Panel, ...]:
    """Return the charts of a run without incidents, of two steps at least."""
    known = tuple(_in_order(entries))
    if len(known) < 2:
        return ()
    return _Charts(known, None, {}, None, points).panels()


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    return sorted((entry for entry in entries if is_finite_number(entry.step)), key=lambda entry: entry.step)


@dataclass(frozen=True, slots=True)
class _Charts:
    """Steps to be drawn. step: the one that went bad, None if none did. last: what is known of it beside its line. limit: of its exponent.
    points: the most of one line."""

    entries: tuple[Entry, ...]
    step: float | None
    last: dict[str, float]
    limit: float | None
    points: int

    def panels(self) -> tuple[Panel, ...]:
        """Return the charts that have two points at least."""
        split = any(real(entry.log_ratio_max_masked) is not None for entry in self.entries)
        if not split and "log_ratio_max_masked" in self.last:  # the run saw no mask, so the one series is of all tokens
            self.last["log_ratio_max"] = self.last["log_ratio_max_masked"]
        limit = next((found for entry in reversed(self.entries) if (found := _limit(entry)) is not None), self.limit)
        norm, apart = self._series("gradient norm", "grad_norm"), self._series("mean", "mismatch_mean")
        exponents = (
            self._series("counted" if split else "all tokens", "log_ratio_max"),
            self._series("masked", "log_ratio_max_masked", "masked"),
        )
        gaps = (apart, self._series("largest", "mismatch_max", "masked"))
        shares = (self._series("effective sample size", "mismatch_ess"), self._series("left out", "mismatch_dropped", "masked"))
        panels = (
            self._panel("loss", "", (self._series("loss", "loss"),)),
            self._panel("gradient norm", "", (norm,), log=_wide(norm)),
            self._panel("largest exponent", "nat", exponents, limit, "exp overflows"),
            self._panel("headroom", "nat", (self._series("headroom", "headroom"),), 0.0, "overflow"),
            self._panel("|Δ| between sampler and trainer", "nat", gaps),
            self._panel("weights against the sampler", "share of tokens", shares),
        )
        return tuple(panel for panel in panels if max(len(line.points) for line in panel.series) >= 2)

    def _panel(
        self, title: str, unit: str, series: tuple[Series, ...], limit: float | None = None, name: str = "", log: bool = False
    ) -> Panel:
        said = tuple(float(entry.step) for entry in self.entries if entry.forecast)
        return Panel(title, unit, series, limit, name, self.step, log, said)

    def _series(self, name: str, field: str, kind: str = "main") -> Series:
        found = [(float(entry.step), value) for entry in self.entries if (value := real(getattr(entry, field))) is not None]
        if field in self.last and self.step is not None and found and found[-1][0] < self.step:
            found.append((self.step, self.last[field]))
        return Series(name, kind, thin(found, self.points))


def _last_point(incident: Incident) -> dict[str, float]:
    """What is known of the bad step itself: its entry is written after the snapshot."""
    place, found = incident.origin, {}
    loss, gradients = real(incident.loss), two(incident.reached.get("gradients"))
    if loss is not None:
        found["loss"] = loss
    if gradients is not None and gradients[0]:
        found["grad_norm"] = math.nan
    limit = real(place.limit)
    if limit is not None and place.operands:
        value = real(place.operands[0][1])
        if value is not None and math.isfinite(value):
            found["log_ratio_max_masked" if place.masked else "log_ratio_max"] = value
            found["headroom"] = limit - value
    return found


def _limit(entry: Entry) -> float | None:
    highest = [value for value in (real(entry.log_ratio_max), real(entry.log_ratio_max_masked)) if value is not None]
    left = real(entry.headroom)
    found = left + max(highest) if left is not None and highest else None
    return found if found is not None and math.isfinite(found) else None


def _wide(series: Series) -> bool:
    sizes = [value for _, value in series.points if math.isfinite(value)]
    return bool(sizes) and min(sizes) > 0 and max(sizes) > 50 * min(sizes)


def thin(points: Sequence[tuple[float, float]], limit: int) -> tuple[tuple[float, float], ...]:
    """Return at most `limit` points: of every stretch the lowest and the highest, the non-finite ones first, and both ends."""
    if len(points) <= limit:
        return tuple(points)

    def height(index: int) -> float:
        return points[index][1] if math.isfinite(points[index][1]) else math.inf

    stretches = max(1, (limit - 2) // 2)
    kept = {0, len(points) - 1}
    for n in range(stretches):
        stretch = range(n * len(points) // stretches, (n + 1) * len(points) // stretches)
        kept |= {min(stretch, key=height), max(stretch, key=height)}
    return tuple(points[index] for index in sorted(kept))
