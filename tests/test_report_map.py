"""The map of the offending tensor: what it marks, how it is cut and coloured, and how it is drawn on the page."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
from pages import checked
from verdicts import incident_of

from nanscope.report.draw import outline
from nanscope.report.html import render_html
from nanscope.report.map import grid_of
from nanscope.verdict.incident import Picture, Verdict


def picture(height: int, width: int, row: int, column: int, value: float = 120.0, **changes: Any) -> Picture:
    values = tuple(tuple(value if (r, c) == (row, column) else 0.1 * c for c in range(width)) for r in range(height))
    masked = tuple(tuple(c >= width - 2 for c in range(width)) for _ in range(height))
    return dataclasses.replace(Picture("log_ratio", values, masked, row, column, 0, 0, height, width), **changes)


def test_the_map_marks_what_overflows() -> None:
    """An exponent beyond the limit of its dtype is marked although it is finite; the origin is ringed and named."""
    incident = incident_of(picture=picture(4, 9, 2, 7), tokens=None)
    grid = grid_of(incident, 32, 72)
    assert grid is not None and grid.limit == pytest.approx(88.72, abs=0.01)
    assert [(r, c) for r in range(4) for c in range(9) if grid.bad[r][c]] == [(2, 7)]
    assert grid.ring == (2, 7) and grid.count == "1 of 36 shown is beyond the limit, masked"
    page = checked(Verdict((incident,)))
    assert len(page.all("rect", "ring")) == 1 and "[1, 2] 120" in page.text and "4 rows × 9 tokens" in page.text


def test_a_cut_map_is_said_and_keeps_the_origin() -> None:
    """Row and column numbers are those of the whole tensor."""
    incident = incident_of(picture=picture(64, 100, 40, 80, first_row=3, rows=90))
    grid = grid_of(incident, 16, 32)
    assert grid is not None and grid.ring is not None
    assert grid.first_row + grid.ring[0] == 43 and grid.first_column + grid.ring[1] == 80
    assert grid.cut == "rows 35–50 of 90, tokens 64–95 of 100"
    assert "rows 35–50 of 90" not in checked(Verdict((incident_of(picture=picture(3, 4, 1, 1)),))).text


def test_colours_diverge_around_zero() -> None:
    """Sign and size choose the colour; outliers do not wash out the rest; nothing finite takes the colour of harm."""
    values = ((-2.0, -1.0, 0.0, 1.0, 2.0, math.nan, -math.inf),)
    grid = grid_of(incident_of("input", picture=Picture("x", values, None, 0, 5, 0, 0, 1, 7)), 32, 72)
    assert grid is not None
    assert [grid.level(0, c) for c in range(7)] == [-5, -2, 0, 2, 5, None, None]
    assert grid.bad == ((False,) * 5 + (True, True),)
    values = (tuple([1.0] * 40 + [1e30]),)
    grid = grid_of(incident_of("input", picture=Picture("x", values, None, 0, 3, 0, 0, 1, 41)), 32, 72)
    assert grid is not None and grid.saturated and grid.scale == 1.0 and grid.level(0, 40) == 5


def test_numbers_stand_at_the_middle_of_their_cells() -> None:
    """Along both axes, with the room that the ring takes around the cells; so does what is said of the origin."""
    page = render_html(Verdict((incident_of(picture=picture(3, 8, 1, 6), tokens=None),)))
    left, top, width, height = map(float, re.search(r'class="cells" viewBox="(\S+) (\S+) (\S+) (\S+)"', page).groups())  # type: ignore[union-attr]
    assert (left, top, width, height) == (-0.35, -0.35, 8.7, 3.7)
    sides = {side: re.findall(rf'style="{side}:([\d.]+)%">(\d+)</span>', page) for side in ("left", "top")}
    for side, first, whole, count in (("left", left, width, 8), ("top", top, height, 3)):
        assert [(round(first + whole * float(at) / 100, 2), int(n)) for at, n in sides[side][:count]] == [
            (n + 0.5, n) for n in range(count)
        ]
    (flag,) = re.findall(r'class="flag"><span class="\w+" style="left:([\d.]+)%"', page)
    assert left + width * float(flag) / 100 == pytest.approx(6.5, abs=0.01)


@pytest.mark.parametrize("size", [0.0, 1e-320, 5e-324, 1.7e308])
def test_colours_at_the_ends_of_the_range(size: float) -> None:
    """Zeros, subnormals and the largest number have a colour."""
    incident = incident_of("input", picture=Picture("x", ((size, -size),), None, 0, 0, 0, 0, 1, 2))
    grid = grid_of(incident, 32, 72)
    assert grid is not None and grid.level(0, 0) == (5 if size else 0)
    checked(Verdict((incident,)))


@pytest.mark.parametrize("values", [(), ((),), ((None, None),), ((1.0,), (1.0, 2.0))])
def test_odd_pictures_do_not_stop_the_page(values: Any) -> None:
    """Empty, ragged, or with holes."""
    checked(Verdict((incident_of(picture=Picture("x", values, None, 3, 9, 0, 0, 1, 2)),)))


def test_the_outline_covers_exactly_its_cells() -> None:
    """Runs are joined, and nothing else is covered."""
    cells = {(0, 0), (0, 1), (0, 2), (1, 1), (3, 5), (3, 6)}
    runs = re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", outline(cells))
    assert len(runs) == 3
    assert {(int(row), int(column) + n) for column, row, length in runs for n in range(int(length))} == cells


def test_what_is_bad_is_counted_in_the_whole() -> None:
    """Not in what is shown: one bad token and ten thousand are told apart."""
    found = incident_of("forward masked")
    grid = grid_of(found, 1, 2)
    assert found.tokens is not None and grid is not None
    assert grid.count == f"1 of {found.tokens.rows * found.tokens.columns} beyond the limit, all masked"
