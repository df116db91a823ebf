"""Torch's own samples of every operator, with a number planted that does not belong there: no harm is missed, and what made it is named.

By day one case in so many, at night all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import NIGHTLY
from tests.opinfos import EXTREME, PLANTED, Case, Outcome, cases, outcome

DAY = 97  # one case in so many
UNSEEN = frozenset(("chalf",))  # in dtypes that no program holds


def outcomes(all_cases: list[Case], folder: Path) -> list[Outcome]:
    """Of what does harm without us."""
    picked = all_cases if NIGHTLY else all_cases[::DAY]
    found = [seen for number, case in enumerate(picked) if (seen := outcome(case, folder / str(number))) is not None]
    assert len(found) > len(picked) // 10
    print(f"{len(found)} of {len(picked)} comparable")
    return found


def told(found: list[Outcome]) -> str:
    return "\n".join(f"{seen.case}: {seen.verdict.sentence}" for seen in found)


def test_what_comes_in_bad_is_found_behind_every_operator(tmp_path: Path) -> None:
    """NaN or an infinity in the first operand: never healthy, never without a cause, and loss and gradients are those of an unwatched run.

    An −inf may be a mask: of what that is, only that it is seen.
    """
    found = outcomes(cases(PLANTED), tmp_path)
    assert not (wrong := [seen for seen in found if seen.missed or not seen.identical]), told(wrong)
    unknown = [seen for seen in found if seen.unknown and seen.case.plant != "-inf" and seen.case.op not in UNSEEN and not seen.came_in]
    assert not unknown, told(unknown)


@pytest.mark.parametrize("everywhere", [False, True], ids=["in one place", "everywhere"])
def test_what_an_operator_makes_of_a_finite_number_is_found(tmp_path: Path, everywhere: bool) -> None:
    """0, −1, numbers next to the end of float32, and subnormal ones: never healthy, and the operator is named."""
    found = outcomes(cases(EXTREME, everywhere=everywhere), tmp_path)
    assert not (wrong := [seen for seen in found if seen.missed or not seen.identical]), told(wrong)
    unnamed = [seen for seen in found if seen.op in ("unknown", "opaque") and seen.case.op not in UNSEEN | NOT_RUN_AGAIN]
    assert not unnamed, told(unnamed)


NOT_RUN_AGAIN = frozenset(("polygamma", "special.polygamma"))  # of numbers so large that a replay refuses them
