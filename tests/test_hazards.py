"""docs/hazards.md is what `check` says of the losses that are installed here, and what it says is what the atlas says."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from hazards.page import NAMES, SUMMARY, Found, find, parts, reason, rule, written
from hazards.steps import asked, missing, version

from nanscope.frameworks.paths import LossPath

PAGE = Path(__file__).parents[1] / "docs" / "hazards.md"
DAY = (
    "trl.dapo",
    "liger.grpo",
    "verl.vanilla",
    "skyrl.regular",
    "openrlhf.ppo",
    "nemo_rl.clipped_pg",
    "prime_rl.default",
    "torchtitan.dapo",
)
PATHS = [
    pytest.param(path, id=path.name, marks=[] if path.name in DAY else [pytest.mark.nightly])
    for framework in NAMES
    for path in asked(framework)
]


@cache
def found(path: LossPath) -> Found:
    """Return what is found of a loss; the test is skipped where its framework is not there in the version of the page."""
    why = missing(path.framework)
    if why is not None:
        pytest.skip(f"{NAMES[path.framework]} does not import here: {why}")
    told = parts(PAGE.read_text(encoding="utf-8"))[path.framework][0]
    if version(path.framework) not in told:
        pytest.skip(f"the page knows another version of {NAMES[path.framework]} than {version(path.framework)}")
    return find(path)


@pytest.mark.parametrize("path", PATHS)
def test_the_page_counts_what_check_finds(path: LossPath) -> None:
    """The line of a loss on the page is the one that is written of it now."""
    line = found(path).row
    assert line in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", PATHS)
def test_check_says_of_a_recorded_step_what_the_atlas_says_of_the_loss(path: LossPath) -> None:
    """A fault harms the loss or a gradient where `check` finds a hazard, and nowhere else; what differs has a reason."""
    assert [cell.words for cell in found(path).cells if not cell.agrees and reason(cell) == "**open**"] == []


def test_the_page_is_as_it_is_written() -> None:
    """Nobody has typed on it: it comes out again of its parts."""
    page = PAGE.read_text(encoding="utf-8")
    assert written(parts(page)) == page and set(parts(page)) == set(NAMES)


def test_the_totals_are_those_of_the_lines() -> None:
    """Of every framework: how many losses, how many without a reachable hazard, and the hazards of each severity."""
    for framework, (line, agrees, section) in parts(PAGE.read_text(encoding="utf-8")).items():
        rows = re.findall(rf"^\| {framework.replace('_', '.*')}\..* \| (\d+) \| (\d+) \| (\d+) \|$", section, re.MULTILINE)
        counts = [sum(int(row[place]) for row in rows) for place in range(3)]
        free = sum(row[0] == "0" for row in rows)
        assert [len(rows), free, *counts] == [int(cell) for cell in line.split(" | ")[2:-2]]
        cells, agree, differ = (int(cell) for cell in agrees.strip(" |").split(" | ")[1:])
        assert cells == agree + differ and differ == section.count(" in the atlas, and check ")
    assert rule(SUMMARY).count("---") == 9
