"""Who was first, and who followed, from bad steps in short."""

from __future__ import annotations

import pytest

from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.observation import Came
from nanscope.verdict.standing import Standing, groups_of, say_ranks, told_of

FIRST, SAME, LATER = Standing.FIRST, Standing.SAME_STEP, Standing.LATER
MADE, REDUCED, WEIGHTS, MODEL = Came.MADE, Came.REDUCED, Came.WEIGHTS, Came.MODEL


def bad(step: int, rank: int, came: Came = MADE, of: int | None = None, site: str = "", spoilt: bool = False) -> BadStep:
    return BadStep(step=step, rank=rank, came=came, of=of, site=site, spoilt=spoilt)


CASES: dict[str, tuple[list[BadStep], list[tuple[int, int]], dict[Standing, tuple[int, ...]]]] = {  # what is told, and the table
    "one rank": ([bad(3, 1)], [(3, 1)], {FIRST: (1,)}),
    "all-reduce": ([bad(3, 0, REDUCED), bad(3, 1), bad(3, 2, REDUCED)], [(3, 1)], {FIRST: (1,), SAME: (0, 2)}),
    "nobody made it": ([bad(3, 0, REDUCED), bad(3, 2, REDUCED)], [(3, 0)], {SAME: (0, 2)}),
    "a consequence": ([bad(3, 1, spoilt=True), bad(4, 1, WEIGHTS, 3), bad(4, 0, WEIGHTS, 3)], [(3, 1), (4, 1)], {FIRST: (1,), LATER: (0,)}),
    "only consequences": ([bad(4, 0, WEIGHTS, 3), bad(4, 1, WEIGHTS, 3)], [(4, 0)], {SAME: (0, 1)}),
    "a gathered shard": ([bad(3, 0, spoilt=True), bad(4, 1, MODEL), bad(5, 1, MODEL)], [(3, 0)], {FIRST: (0,), LATER: (1,)}),
    "a model much later": ([bad(3, 0, spoilt=True), bad(9, 1, MODEL)], [(3, 0), (9, 1)], {FIRST: (0,), LATER: (1,)}),
    "weights were clean": ([bad(3, 0), bad(4, 1, MODEL)], [(3, 0), (4, 1)], {FIRST: (0,), LATER: (1,)}),
    "reduced a step later": ([bad(3, 0, spoilt=True), bad(4, 1, REDUCED)], [(3, 0)], {FIRST: (0,), LATER: (1,)}),
    "the same model": ([bad(3, 0, MODEL, site="x", spoilt=True), bad(3, 1, MODEL, site="x", spoilt=True)], [(3, 0)], {FIRST: (0, 1)}),
    "the same line": ([bad(3, 0, site="a.py:1"), bad(3, 1, site="a.py:1")], [(3, 0)], {FIRST: (0, 1)}),
    "another line": ([bad(3, 0, site="a.py:1"), bad(3, 1, site="b.py:1")], [(3, 0), (3, 1)], {FIRST: (0, 1)}),
    "unknown lines": ([bad(3, 0), bad(3, 1)], [(3, 0), (3, 1)], {FIRST: (0, 1)}),
    "weights from a file": ([bad(1, 0, WEIGHTS, site="w"), bad(1, 1, WEIGHTS, site="w")], [(1, 0)], {FIRST: (0, 1)}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_told_and_how_the_ranks_stand(name: str) -> None:
    """Whatever order the files come in."""
    found, told, standings = CASES[name]
    for order in (found, found[::-1]):
        assert [(one.step, one.rank) for one in told_of(order)] == told
        groups = groups_of(order, (), (), 0).groups
        assert {group.standing: group.ranks for group in groups} == standings


def test_ranks_without_a_bad_step_are_told_apart() -> None:
    """Healthy is who has ended; who has not is not, and of some there is nothing."""
    ranks = groups_of([bad(3, 1)], healthy=[0, 1], not_ended=[0, 1, 2, 3], world=6)
    assert [(str(group.standing), group.ranks) for group in ranks.groups] == [
        ("first", (1,)), ("healthy", (0,)), ("not ended", (2, 3)), ("never heard of", (4, 5)),
    ]  # fmt: skip
    assert groups_of([], [0, 1], [], 2).sentence == "" and groups_of([bad(3, 1)], [], [], 0).sentence == "Rank 1 was first"


def test_ranks_in_words() -> None:
    """Stretches, and not a thousand numbers."""
    assert say_ranks([7], 16) == "rank 7 of 16" and say_ranks([3, 0, 1, 2, 9]) == "ranks 0–3, 9"
    assert say_ranks(range(0, 100, 2), 100) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, … of 100"
