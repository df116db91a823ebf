"""Where a number runs to: told by ranks and medians, carried on no further than it was seen."""

from __future__ import annotations

import random

import pytest

from nanscope.snapshot.trend import WINDOWS, Trend, approach


def line(n: int, slope: float, noise: float = 0.0, seed: int = 0) -> list[tuple[float, float]]:
    """A rising line of n points with Gaussian scatter."""
    own = random.Random(seed)
    return [(step, slope * step + own.gauss(0.0, noise)) for step in range(n)]


@pytest.mark.parametrize("noise", [0.0, 0.5, 3.0])
def test_a_line_is_carried_on_to_the_edge(noise: float) -> None:
    """Half of the way has been seen: the other half is told, within the interval that the scatter leaves."""
    found = approach(line(45, 1.6, noise), 88.7)
    assert found is not None
    left = 88.7 / 1.6 - 44
    assert found.soonest <= found.steps <= found.latest
    assert found.steps == pytest.approx(left, abs=0.1 if not noise else 4.0)
    assert found.slope == pytest.approx(1.6, rel=0.05)


def test_nothing_is_told_beyond_what_was_seen() -> None:
    """A slope that would take longer to the edge than it was observed for says nothing yet."""
    points = line(60, 1.0)
    told = [n for n in range(2, 61) if approach(points[:n], 60.0) is not None]
    assert told[0] == 31, "30 steps are seen, and 30 are left"


@pytest.mark.parametrize("spike", [50.0, 1e6])
def test_a_spike_is_no_trend(spike: float) -> None:
    """However high: the slope is the median over all pairs, and the first of its kind is one point."""
    points = [(step, 5.0 + 0.1 * (step % 3)) for step in range(64)]
    for at in (63, 62, 40):
        points[at] = (at, spike)
        assert approach(points, 88.7) is None


def test_what_has_stopped_rising_is_not_warned_of() -> None:
    """A number that rose, and has stayed where it came to, is on its way to nothing."""
    points = [(step, min(60.0, 2.0 * step)) for step in range(64)]
    assert approach(points, 88.7) is None
    assert approach(points[:30], 88.7) is not None, "it was, while it rose"


def test_scatter_about_a_high_level_is_no_trend() -> None:
    """Near the edge, and going nowhere."""
    own = random.Random(3)
    points = [(float(step), 75.0 + own.gauss(0.0, 4.0)) for step in range(400)]
    assert not any(approach(points[n - 64 : n], 88.7) for n in range(64, 400))


def test_a_random_walk_far_from_the_edge_is_never_warned_of() -> None:
    """It has trends without end, and none of them covers half the way to an edge."""
    for seed in range(20):
        own, level, points = random.Random(seed), 0.0, []
        for step in range(300):
            level = abs(level + own.gauss(0.0, 0.5))
            points.append((float(step), level))
        assert not any(approach(points[max(0, n - 64) : n], 88.7) for n in range(8, 300))


def test_too_few_points_say_nothing() -> None:
    """Not even straight ones."""
    assert approach(line(min(WINDOWS) - 1, 10.0), 75.0) is None
    assert approach(line(min(WINDOWS), 10.0), 75.0) is not None


def test_steps_need_not_be_evenly_spaced() -> None:
    """One step in a hundred is looked at: the horizon is in steps, not in points."""
    points = [(100.0 * n, 2.0 * n) for n in range(16)]
    found = approach(points, 40.0)
    assert found is not None and found.slope == pytest.approx(0.02) and found.steps == pytest.approx(500.0)


def test_the_median_line_is_that_of_the_pairs() -> None:
    """Slope, level at the last point, and an interval that holds the slope."""
    trend = Trend.of([(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)])  # slopes 1, 1, 1, 10, 14.5, 28
    assert (trend.slope, trend.level) == (5.5, 14.25)  # at the end the points come to 16.5, 12, 7.5 and 30
    assert trend.low <= trend.slope <= trend.high
