"""The frameworks' own training steps under `nanscope.watch()`: verl's `TrainingWorker`, OpenRLHF's `ActorPPOTrainer`, SkyRL's policy worker,
and what of NeMo-RL and prime-rl runs without CUDA, where a checkout of them is on the path.

Each on a tiny random Qwen2 in processes of its own, bare and watched. What is healthy is silent, the zero loss of the first step included;
of every fault the line, the variable, the token, its mask, the step and the framework's own option are told. See tests/workers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("workers")))

from cases import Expected, told
from worker_cases import EXPECTED


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are kept."""
    return tmp_path_factory.mktemp("workers")


CASES = [pytest.param(one, id=str(one), marks=[pytest.mark.xfail(reason=one.known, strict=True)] if one.known else []) for one in EXPECTED]


@pytest.mark.parametrize("expected", CASES)
def test_what_is_said_of_a_framework_s_own_step(expected: Expected, out: Path) -> None:
    """Steps are counted as it takes them, its weights are those of the bare run, and the verdict is right."""
    if expected.missing:
        pytest.skip(expected.missing)
    first = told(EXPECTED, expected.driver, expected.ranks, out)[0][expected.case]
    assert expected.misses(first) == [], first.get("sentence")


def test_a_rank_that_trains_beside_a_bad_one_names_it(out: Path) -> None:
    """verl on FSDP2: its gradients came bad from the reduction, its worker dropped the step, and the rank and the line are known."""
    pytest.importorskip("verl")
    other = told(EXPECTED, "verl", 2, out)[1]["masked +200"]
    assert (other["status"], other["steps"], other["same"]) == ("non-finite", 3, True)
    assert [(i["rank"], i["step"], i["cause"]) for i in other["incidents"] if i["rank"] == 1] == [(1, 2, "allreduce_nan")], other[
        "sentence"
    ]
