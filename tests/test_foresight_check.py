"""`check` against the 79 known bugs of 63 programs: each is found at its line, on a healthy batch, and of the mended twins nothing is said."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from foresight import formulas
from foresight.corpus import Bug, Program
from foresight.subjects import BUGS, PROGRAMS

from nanscope.foresight.pushes import Severity
from nanscope.foresight.search import check
from nanscope.watching.checking import recorded

pytestmark = pytest.mark.filterwarnings("ignore")
LINES = Path(formulas.__file__).read_text(encoding="utf-8").splitlines()
DAY = ("2a", "4", "9b", "11a", "23", "28b")  # of every kind of operator one


def asked(bugs: Iterable[Bug]) -> list[pytest.MarkDecorator]:
    """What is not asked for every time."""
    return [] if any(bug.name in DAY for bug in bugs) else [pytest.mark.nightly]


@pytest.mark.parametrize(("bug", "program"), [pytest.param(*pair, id=pair[0].name, marks=asked([pair[0]])) for pair in BUGS])
def test_a_known_bug_is_found_on_a_healthy_batch(bug: Bug, program: Program) -> None:
    """Its operator and its line, with a trigger that was executed."""
    found = check(recorded(program.loss, program.batch()))
    assert not found.healed
    lines = {(hazard.origin.op, LINES[(hazard.origin.line or 1) - 1].strip()) for hazard in found.hazards}
    assert (bug.op, bug.line) in lines


@pytest.mark.parametrize("program", [pytest.param(one, id=one.script, marks=asked(one.bugs)) for one in PROGRAMS])
def test_of_a_mended_twin_nothing_is_said_that_training_can_reach(program: Program) -> None:
    """What −inf of a batch does is not counted: no loss survives that."""
    found = check(recorded(program.mended, program.batch()))
    finite = [hazard for hazard in found.only([Severity.REACHABLE]).hazards if abs(hazard.trigger.value) < float("inf")]
    assert [hazard.trigger.words for hazard in finite] == []
