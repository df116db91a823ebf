"""The charts of the steps before an incident: what they end with, what is left out, and that they stay in their frame."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from loops import grpo_steps, policy, stale_at
from pages import checked
from verdicts import incident_of

import nanscope
from nanscope.report.draw import chart_of
from nanscope.report.history import Panel, Scale, Series, panels_of, thin
from nanscope.report.html import render_html
from nanscope.snapshot.history import Entry
from nanscope.verdict.incident import Verdict


def test_the_history_ends_with_the_bad_step() -> None:
    """The exponent of the incident itself is on the chart, above the limit that the entries tell."""
    incident = incident_of("history")
    panels = {panel.title: panel for panel in panels_of(incident)}
    assert list(panels) == ["loss", "gradient norm", "largest exponent", "headroom"]
    exponent = panels["largest exponent"]
    assert exponent.limit == pytest.approx(88.72, abs=0.01)
    masked = next(series for series in exponent.series if series.kind == "masked")
    assert [step for step, _ in masked.points] == [float(step) for step in range(1, 11)]
    assert masked.points[-1][1] > exponent.limit > masked.points[-2][1]
    assert math.isnan(panels["gradient norm"].series[0].points[-1][1])
    text = checked(Verdict((incident,))).text
    assert "exp overflows" in text and "88.72" in text


def test_every_series_comes_to_the_bad_step(tmp_path: Path) -> None:
    """The counted tokens of it are on the chart beside the masked one that overflowed, and its loss and its norm."""
    with nanscope.watch(out=tmp_path) as scope:
        grpo_steps(policy(), 5, stale_at(0, 3, step=4))
    (incident, *_) = scope.verdict.incidents
    panels = {panel.title: panel for panel in panels_of(incident)}
    ends = {(panel.title, series.name): series.points[-1][0] for panel in panels.values() for series in panel.series if series.points}
    assert incident.step == 5 and {"counted", "masked"} <= {name for _, name in ends}
    assert set(ends.values()) == {5.0}, ends


def test_a_run_without_a_mask_has_one_series() -> None:
    """Where the entries tell no masked tokens, the exponent of the incident belongs to the series of all tokens."""
    before = incident_of("history").history
    entries = tuple(dataclasses.replace(entry, log_ratio_max=entry.log_ratio_max_masked, log_ratio_max_masked=None) for entry in before)
    exponent = next(panel for panel in panels_of(incident_of("history", history=entries)) if panel.title == "largest exponent")
    assert [(series.name, len(series.points)) for series in exponent.series] == [("all tokens", 10), ("masked", 0)]
    assert exponent.series[0].points[-1][1] == pytest.approx(90.0)


def test_a_short_history_is_left_out() -> None:
    """Two steps are the least that a line needs."""
    assert panels_of(incident_of()) == ()
    entries = incident_of("history").history
    assert panels_of(incident_of("history", history=entries[:1])) == ()
    assert panels_of(incident_of("history", history=entries[:2], step=3))
    assert panels_of(incident_of("history", history=entries, step=0)) == ()


def test_what_is_no_number_is_left_out() -> None:
    """A history file is data of anyone: text, lists and booleans in it draw nothing."""
    odd_entries = [Entry("<b>", 0, 0.0), Entry(None, 0, 0.0), Entry(4, 0, 0.0, loss="<b>", grad_norm=[1], headroom=True)]  # type: ignore[arg-type]
    incident = incident_of("history", history=(*odd_entries, *incident_of("history").history))
    for panel in panels_of(incident):
        assert all(type(x) is float for series in panel.series for point in series.points for x in point)
    checked(Verdict((incident,)))


POINTS = st.lists(st.floats(), min_size=1, max_size=900).map(lambda values: [(float(n), v) for n, v in enumerate(values)])


@given(POINTS, st.integers(8, 200))
def test_thinning_keeps_what_matters(points: list[tuple[float, float]], limit: int) -> None:
    """Few points, in order, with both ends, the finite extremes, and a trace of what was not finite."""
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 2) and list(kept) == sorted(kept, key=lambda p: p[0])
    assert {repr(p) for p in kept} <= {repr(p) for p in points}
    assert repr(kept[0]) == repr(points[0]) and repr(kept[-1]) == repr(points[-1])
    if all(math.isfinite(v) for _, v in points):
        assert {min(v for _, v in kept), max(v for _, v in kept)} == {min(v for _, v in points), max(v for _, v in points)}
    else:
        assert any(not math.isfinite(v) for _, v in kept)


@example([(0.0, -1.7e308), (1.0, 1.7e308)], None)
@example([(0.0, 1e-320), (1.0, 1e300)], 0.0)
@given(POINTS, st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)))
def test_charts_stay_inside_their_frame(points: list[tuple[float, float]], limit: float | None) -> None:
    """Every finite point lies between 0 and 1, whatever the range of the values."""
    panel = Panel("loss", "", (Series("loss", "main", tuple(points)),), limit, "", points[-1][0])
    scale = Scale.of(panel)
    assert all(-1e-9 <= scale.x(x) <= 1 + 1e-9 for x, _ in points)
    assert all(-1e-9 <= scale.y(v) <= 1 + 1e-9 for _, v in points if math.isfinite(v))
    chart = chart_of(panel)
    assert "nan" not in chart.curves[0].line and "inf" not in chart.curves[0].line + chart.curves[0].marks


@pytest.mark.parametrize(("step", "late"), [(5, False), (9, True)])
def test_what_was_said_shortly_before_the_end_stands_to_its_left(step: int, late: bool) -> None:
    """There is no room to the right of it."""
    incident = incident_of("history")
    entries = tuple(dataclasses.replace(entry, forecast=entry.step == step) for entry in incident.history)
    page = render_html(Verdict((dataclasses.replace(incident, history=entries),)))
    words = set(re.findall(r'<span class="(said-words[^"]*)" style="[^"]*">said at (\d+)</span>', page))
    assert words == {("said-words late" if late else "said-words", str(step))}
