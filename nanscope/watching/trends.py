"""The last numbers of each gauge of a run, by the step that they are of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from nanscope.snapshot.trend import WINDOWS, Point

MOST = 256  # gauges: a run that makes code as it goes has more and more of them


@dataclass(slots=True)
class Trends:
    """step: how many are over. told: gauges of which it was said where they run, or that they run to nothing bad."""

    step: int = 0
    told: set[Hashable] = field(default_factory=set)
    _points: dict[Hashable, list[Point]] = field(default_factory=dict)

    def add(self, gauge: Hashable, value: float) -> Sequence[Point]:
        """Take what a gauge says of the running step, the largest of its micro-batches; return its last points."""
        points = self._points.get(gauge)
        if points is None:
            if len(self._points) >= MOST:
                del self._points[next(iter(self._points))]
            points = self._points[gauge] = []
        if points and points[-1][0] == self.step:
            value = max(value, points.pop()[1])
        points.append((self.step, value))
        del points[: -max(WINDOWS)]
        return points

    def close(self) -> None:
        """The step is over."""
        self.step += 1
