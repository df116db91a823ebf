"""Several ranks: the watched run is the bare one to the bit and to the collective, on bad steps, too; and what is said of it is true."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanscope.snapshot.runs import find_run
from nanscope.verdict.run import verdict_of

SCRIPT = Path(__file__).with_name("ranks.py")

First = tuple[int, str, str] | None  # of a rank's first incident: the rank that it names, cause, operator; None for a healthy run

MASK = (0, "empty_mask_mean", "div")
WHERE = (0, "where_grad_trap", "exp")
MODULE = (0, "unknown", "module")
UPDATE = (0, "unknown", "addcdiv")
NORM = "inf_grad_norm_clip", "linalg_vector_norm"
POISONED = (0, "poisoned_weights", "parameter")

# The step that rank 0 spoils is the third; a rank that the harm reaches a step later names its own incident of that.
CASES: dict[str, tuple[First, First]] = {
    "ddp:none": (None, None),
    "ddp:loss": (MASK, MASK),
    "ddp:edge": (WHERE, WHERE),
    "ddp:model": ((0, "exp_overflow", "exp"), (0, "exp_overflow", "exp")),
    "ddp:optimizer": ((0, "unknown", "mul"), (0, "uninitialized", "parameter")),
    "ddp:clip": ((0, *NORM), (1, *NORM)),
    "ddp:late": ((0, "unknown", "write"), POISONED),
    "ddp:edge_drop": (WHERE, WHERE),
    "fsdp2:edge_drop": (WHERE, WHERE),
    "fsdp1:loss": (MASK, MASK),
    "fsdp1:clip": ((0, *NORM), (1, *NORM)),
    "fsdp1_orig:model": (MODULE, MODULE),
    "fsdp1_orig:late": ((0, "unknown", "backward"), (1, "unknown", "module")),
    "fsdp2:none": (None, None),
    "fsdp2:loss": (MASK, MASK),
    "fsdp2:loss_all": (MASK, (1, *MASK[1:])),
    "fsdp2:edge": (WHERE, WHERE),
    "fsdp2:model": (MODULE, MODULE),
    "fsdp2:optimizer": (UPDATE, (1, "unknown", "module")),
    "fsdp2:clip": ((0, *NORM), (1, *NORM)),
    "fsdp2:late": ((0, "unknown", "write"), (1, "unknown", "module")),
    "tp:none": (None, None),
    "tp:loss_all": (MASK, (1, *MASK[1:])),
    "tp:edge_all": (WHERE, (1, *WHERE[1:])),
    "tp:model_all": (MODULE, (1, *MODULE[1:])),
    "tp:optimizer": ((0, "magnitude_overflow", "addcdiv"), (1, "unknown", "module")),
    "tp:clip_all": ((0, *NORM), (1, *NORM)),
    "tp_loss:loss_all": ((0, "unknown", "unknown"), (1, "unknown", "unknown")),
    "manual:loss": (MASK, MASK),
    "manual:late": ((0, "unknown", "write"), POISONED),
    "reducing:model": (MODULE, MODULE),
    "reducing:edge": (WHERE, WHERE),
}
SKIPS = ("ddp:loss", "fsdp2:loss", "fsdp2:late", "manual:late")  # with "skip"

Told = dict[str, tuple[dict[str, Any], dict[str, Any]]]  # by case, what each rank says


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are kept."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    """All cases, in one pair of processes: to import torch costs more than to train."""
    cases = [*(f"{case}:record" for case in CASES), *(f"{case}:skip" for case in SKIPS)]
    port, environment = str(free_port()), {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), port, str(folder), *cases],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    said: list[dict[str, dict[str, Any]]] = []
    try:
        for process in ranks:
            out, error = process.communicate(timeout=240)
            assert process.returncode == 0, error
            said.append({line["case"]: line for line in map(json.loads, filter(lambda text: text.startswith("{"), out.splitlines()))})
    finally:
        for process in ranks:
            process.kill()
    return {case: (said[0][case], said[1][case]) for case in cases}


@pytest.mark.parametrize("case", CASES)
def test_nothing_changes_and_nobody_is_asked(case: str, told: Told) -> None:
    """Weights, losses, generators and the count of collectives are those of the bare run, on either rank, whatever goes bad on one."""
    for line in told[f"{case}:record"]:
        assert "error" not in line, line["error"]
        assert line["watched"] == line["bare"] and line["bare"]["issued"] > 0
        assert (line["steps"], line["skipped"], line["gaps"]) == (4, 0, [])


@pytest.mark.parametrize("case", CASES)
def test_what_went_bad_is_found_on_the_ranks_that_it_reaches(case: str, told: Told) -> None:
    """The loss is located where its own program holds the fault; the rank that made it is named; healthy is said only where all was."""
    for line, expected in zip(told[f"{case}:record"], CASES[case], strict=True):
        first = (*line["incidents"][0][1:3], line["incidents"][0][4]) if line["incidents"] else None
        assert first == expected, line["sentence"]
        assert line["status"] == ("healthy" if expected is None else "non-finite")
        if expected in (MASK, WHERE):
            assert "ranks.py:" in line["sentence"] and line["incidents"][0][0] == 3


def test_weights_that_are_bad_are_blamed_where_the_model_cannot_be_run_again(told: Told) -> None:
    """The step after the harm, with sharded weights: their own part tells."""
    for case in ("fsdp1:loss", "fsdp2:loss", "tp:loss_all", "reducing:edge"):
        for line in told[f"{case}:record"]:
            assert line["incidents"][-1][0] == 4 and line["incidents"][-1][2] == "poisoned_weights"


def test_a_rank_that_is_reached_says_from_where(told: Told) -> None:
    """By all-reduce where its own backward was seen to be finite; where no rank can run the model alone, no more than that is said.

    Also where the trainer has dropped the gradients by then, and only their norm tells.
    """
    cases = ("ddp:loss", "manual:loss", "fsdp2:loss", "reducing:edge", "ddp:edge_drop", "fsdp2:edge_drop")
    own = {case: told[f"{case}:record"][1]["incidents"][1] for case in cases}
    assert {case: (i[1], i[2], i[4]) for case, i in own.items()} == {
        "ddp:loss": (1, "allreduce_nan", "all_reduce"),
        "manual:loss": (1, "allreduce_nan", "all_reduce"),
        "fsdp2:loss": (1, "allreduce_nan", "backward"),
        "reducing:edge": (1, "allreduce_nan", "backward"),
        "ddp:edge_drop": (1, "allreduce_nan", "all_reduce"),
        "fsdp2:edge_drop": (1, "allreduce_nan", "backward"),
    }


def test_a_nan_of_one_rank_after_the_reduction_is_not_blamed_on_it(told: Told) -> None:
    """What the tape saw written is told with its line."""
    for case in ("ddp:late", "fsdp2:late", "manual:late"):
        sentence = told[f"{case}:record"][0]["sentence"]
        assert "finite when backward and the ranks had done with it: it was written afterwards, ranks.py:" in sentence


def test_all_ranks_skip_what_all_of_them_see(told: Told) -> None:
    """A reduction brings the NaN to everybody: nobody steps, and the run goes on with healthy weights."""
    for case in ("ddp:loss", "fsdp2:loss"):
        for line in told[f"{case}:skip"]:
            assert line["skipped"] == 1 and {step for step, *_ in line["incidents"]} == {3}
            assert "skipped_alone" not in [slug for slug, _ in line["notes"]]
            assert "nan" not in line["watched"]["losses"].split(", ")[3]


def test_a_rank_that_skips_alone_is_told(told: Told) -> None:
    """It keeps its weights and the other one does not: that is no whole step, and the verdict says so."""
    for case in ("fsdp2:late", "manual:late"):
        alone, other = told[f"{case}:skip"]
        assert (alone["skipped"], other["skipped"]) == (1, 0)
        (text,) = [text for slug, text in alone["notes"] if slug == "skipped_alone"]
        assert text.startswith("step 3: rank 0 skipped its update, rank 1 made it")


MERGED: dict[str, tuple[list[tuple[int, str]], dict[str, tuple[int, ...]]]] = {  # causes that the run's report tells, and its ranks
    "ddp:none": ([], {"healthy": (0, 1)}),
    "ddp:loss": ([(0, "empty_mask_mean")], {"first": (0,), "same step": (1,)}),
    "ddp:late": ([(0, "unknown")], {"first": (0,), "later": (1,)}),
    "ddp:optimizer": ([(0, "unknown")], {"first": (0,), "later": (1,)}),
    "ddp:clip": ([(0, NORM[0])], {"first": (0, 1)}),
    "fsdp1_orig:late": ([(0, "unknown")], {"same step": (0,), "later": (1,)}),
    "fsdp2:loss": ([(0, "empty_mask_mean")], {"first": (0,), "same step": (1,)}),
    "fsdp2:loss_all": ([(0, "empty_mask_mean")], {"first": (0, 1)}),
    "fsdp2:model": ([(0, "unknown")], {"first": (0,), "same step": (1,)}),
    "fsdp2:optimizer": ([(0, "unknown")], {"first": (0,), "later": (1,)}),
    "tp:model_all": ([(0, "unknown")], {"first": (0, 1)}),
    "tp:optimizer": ([(0, "magnitude_overflow")], {"first": (0,), "later": (1,)}),
    "tp_loss:loss_all": ([(0, "unknown")], {"first": (0, 1)}),
    "manual:late": ([(0, "unknown")], {"first": (0,), "later": (1,)}),
}


@pytest.mark.parametrize("case", MERGED)
def test_the_report_of_a_run_tells_one_cause_and_who_followed(case: str, told: Told, folder: Path) -> None:
    """Whatever spreads the model over the ranks; what came from another rank is no incident of its own."""
    del told
    found = verdict_of(find_run(folder / f"{case.replace(':', '-')}-record")[0])
    assert found.ranks is not None and ([(i.rank, str(i.cause)) for i in found.causes], found.ranks.world) == (MERGED[case][0], 2)
    assert {str(group.standing): group.ranks for group in found.ranks.groups} == MERGED[case][1]


def test_the_report_is_made_by_the_command_line(told: Told, folder: Path) -> None:
    """And says who was first."""
    del told
    run = folder / "ddp-loss-record"
    done = subprocess.run(
        [sys.executable, "-m", "nanscope", "report", str(run), "-o", str(run / "merged.json")], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 3, done.stderr
    found = json.loads((run / "merged.json").read_text())
    assert [(i["step"], i["rank"], i["cause"]) for i in found["incidents"]] == [(3, 0, "empty_mask_mean"), (4, 0, "poisoned_weights")]
    assert found["sentence"].endswith("Rank 0 of 2 was first; 1 rank in the same step (by all-reduce) followed.")
