"""Where a number runs to: a robust trend over the last steps, carried on no further than it was seen.

    found = approach([(1, 2.1), (2, 3.9), …], edge=88.7)
    found.slope, found.steps       1.6 a step, the edge in about 12 steps; None where nothing is on its way to it

Notable: nothing here is fitted to a run. The slope is the median over all pairs of points, its interval and whether there is a trend at
all are told by the ranks of the points alone (H. Theil 1950, P. K. Sen 1968; M. G. Kendall's S), so a spike or a plateau moves neither. A
trend is carried on as many steps as it was observed for, and its younger half must say the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import itemgetter
from statistics import median

Point = tuple[float, float]  # step, value
_VALUE = itemgetter(1)

WINDOWS = (8, 16, 32, 64)  # points that a trend is looked for in, the youngest ones; of fewer than the last, also in all
SURE = 3.0  # standard deviations of Kendall's S, and of the slope's interval


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through points. slope: a step. level: of the line at the last point. low, high: of the slope, at `SURE`."""

    slope: float
    level: float
    low: float
    high: float

    @staticmethod
    def of(points: Sequence[Point]) -> Trend:
        """Return the median line through points with ascending steps, two at least."""
        pairs = list(combinations(points, 2))
        slopes = sorted((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairs)
        slope, n = median(slopes), len(points)
        spread = SURE * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)  # of S, the pairs that rise less those that fall
        first, last = max(0, math.floor((len(slopes) - spread) / 2)), min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2))
        end = points[-1][0]
        return Trend(slope, median(y - slope * (x - end) for x, y in points), slopes[first], slopes[last])


@dataclass(frozen=True, slots=True)
class Approach:
    """A number on its way to an edge. slope: a step. steps: to the edge, at least 1; soonest, latest: by the interval of the slope. over:
    how many steps the trend was observed for."""

    slope: float
    steps: float
    soonest: float
    latest: float
    over: float


def approach(points: Sequence[Point], edge: float) -> Approach | None:
    """Return how a number runs up to an edge, None if it does not.

    points: finite, with ascending steps. Of the windows over which it does the one that was observed longest speaks.
    """
    if len(points) < WINDOWS[0] or edge - points[-1][1] > 2 * (points[-1][1] - min(points, key=_VALUE)[1]):
        return None  # as `_may_reach`, for any window: this is asked of every gauge in every step
    whole = min(len(points), WINDOWS[-1])
    for size in sorted({whole, *WINDOWS}, reverse=True):
        if WINDOWS[0] <= size <= whole and (found := _over(points[-size:], edge)) is not None:
            return found
    return None


def _over(window: Sequence[Point], edge: float) -> Approach | None:
    observed = window[-1][0] - window[0][0]
    if not _may_reach(window, edge, observed):
        return None
    whole, young = Trend.of(window), Trend.of(window[len(window) // 2 :])
    if whole.low <= 0 or not _within(whole, edge, observed) or not _within(young, edge, observed):
        return None
    steps, soonest, latest = (max(1.0, (edge - whole.level) / slope) for slope in (whole.slope, whole.high, whole.low))
    return Approach(whole.slope, steps, soonest, latest, observed)


def _within(trend: Trend, edge: float, steps: float) -> bool:
    return trend.slope > 0 and edge - trend.level <= trend.slope * steps


def _may_reach(window: Sequence[Point], edge: float, observed: float) -> bool:
    """Is a closer look worth the time? Whoever is to go the rest of the way in the time that was observed has come half of it."""
    part = max(1, len(window) // 4)
    old, new = (median(y for _, y in points) for points in (window[:part], window[-part:]))
    return new > old and edge - new <= 2 * (new - old)
