"""Trainers as people use them, unmodified, under `nanscope.watch()`: TRL, `transformers.Trainer`, accelerate, Lightning and Fabric, torchrl,
Stable-Baselines3, DeepSpeed, and loops of plain torch.

Each on a tiny random model in a process for each package, bare and watched, healthy and with one fault of each phase. What is healthy is
silent; of every fault the step, the line or the module, the phase, the cause and how far it got are told. See tests/workers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("workers")))

from cases import Expected, told
from trainer_cases import EVERY_TIME, EXPECTED

NIGHTLY = bool(os.environ.get("NANSCOPE_NIGHTLY"))
ASKED = EXPECTED if NIGHTLY else tuple(one for one in EXPECTED if one.driver not in ("trl", "transformers") or one.trainer in EVERY_TIME)


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are kept."""
    return tmp_path_factory.mktemp("trainers")


def marks(one: Expected) -> list[pytest.MarkDecorator]:
    """A case that is known to be wrong, and one that is not asked for every time."""
    known = [pytest.mark.xfail(reason=one.known, strict=True)] if one.known else []
    return [*known, pytest.mark.nightly] if NIGHTLY or one not in ASKED else known


@pytest.mark.parametrize("expected", [pytest.param(one, id=str(one), marks=marks(one)) for one in EXPECTED])
def test_what_is_said_of_a_trainer(expected: Expected, out: Path) -> None:
    """A healthy run is left alone, bit for bit; each fault is told as what it is."""
    if expected.missing:
        pytest.skip(expected.missing)
    found = told(ASKED, expected.driver, expected.ranks, out)[0][expected.case]
    assert expected.misses(found) == [], found.get("sentence")
