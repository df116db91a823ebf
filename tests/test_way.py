"""The chain beside its source: each link leads to its line, and only lines around them are shown."""

from __future__ import annotations

import dataclasses
import math

from verdicts import incident_of

from nanscope.report.clean import LIMITS
from nanscope.report.way import AROUND, BESIDE, way_of
from nanscope.snapshot.observation import Link


def test_every_link_leads_to_its_line() -> None:
    """An anchor is that of a line which is shown, and of the line that the link names."""
    incident = incident_of("forward masked")
    way = way_of(incident, LIMITS[0], 1)
    lines = {line.anchor: line.number for listing in way.listings for line in listing.lines if line.anchor}
    linked = [stop for stop in way.stops if stop.anchor]
    assert len(linked) >= 3 and len(set(lines)) == len(lines)
    for stop in linked:
        assert stop.item.at is not None and lines[stop.anchor] == str(stop.item.at[1])


def test_the_origin_is_marked_once() -> None:
    """In its own file, with its expression."""
    way = way_of(incident_of("forward masked"), LIMITS[0], 1)
    marked = [line for listing in way.listings for line in listing.lines if line.marked]
    assert len(marked) == 1 and marked[0].hit == "torch.exp(log_ratio)"


def test_lines_far_from_every_link_are_left_out() -> None:
    """A line of dots stands for them, and another file has a listing of its own."""
    incident = incident_of("forward masked")
    file, own = incident.origin.file or "", incident.origin.line or 0
    near = tuple((n, f"line {n}") for n in range(own + 1, own + 60))
    links = (Link("far[0]", own + 40, math.nan, False, file), Link("other[0]", 5, math.nan, False, "/somewhere/else.py"))
    lines = ((file, near), ("/somewhere/else.py", tuple((n, f"other {n}") for n in range(1, 30))))
    changed = dataclasses.replace(incident, chain=links, lines=lines)
    first, second = way_of(changed, LIMITS[0], 1).listings
    numbers = [int(line.number) for line in first.lines if line.number]
    assert max(numbers) == own + 40 + BESIDE and own + AROUND in numbers and own + 20 not in numbers
    assert [line.before for line in first.lines if not line.number] == ["⋯"]
    assert second.title == "else.py" and [line.number for line in second.lines] == [str(n) for n in range(3, 8)]


def test_without_source_the_chain_stands_alone() -> None:
    """Nothing is linked to."""
    way = way_of(incident_of("observed only"), LIMITS[0], 1)
    assert way.listings == () and not any(stop.anchor for stop in way.stops)
