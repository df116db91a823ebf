"""Several ranks: the watched run is the bare one to the bit and to the collective, on bad steps, too; and what is said of it is true."""

from __future__ import annotations

import importlib.util
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
INSIDE = (0, "exp_overflow", "exp")
UPDATE = (0, "bad_input", "addcdiv")
NORM = "inf_grad_norm_clip", "linalg_vector_norm"
POISONED = (0, "poisoned_weights", "parameter")

# The step that rank 0 spoils is the third; a rank that the harm reaches a step later names its own incident of that.
CASES: dict[str, tuple[First, First]] = {
    "ddp:none": (None, None),
    "ddp:loss": (MASK, MASK),
    "ddp:edge": (WHERE, WHERE),
    "ddp:model": (INSIDE, INSIDE),
    "ddp:optimizer": ((0, "bad_input", "mul"), POISONED),
    "ddp:clip": ((0, *NORM), (1, *NORM)),
    "ddp:late": ((0, "unknown", "write"), POISONED),
    "ddp:edge_drop": (WHERE, WHERE),
    "fsdp2:edge_drop": (WHERE, WHERE),
    "fsdp1:loss": (MASK, MASK),
    "fsdp1:clip": ((0, *NORM), (1, *NORM)),
    "fsdp1:optimizer": (UPDATE, (1, "unknown", "module")),
    "fsdp1:model": (INSIDE, INSIDE),
    "fsdp1_orig:model": (INSIDE, INSIDE),
    "fsdp1_orig:late": ((0, "unknown", "write"), (1, "unknown", "module")),
    "fsdp2:none": (None, None),
    "fsdp2:loss": (MASK, MASK),
    "fsdp2:loss_all": (MASK, (1, *MASK[1:])),
    "fsdp2:edge": (WHERE, WHERE),
    "fsdp2:model": (INSIDE, INSIDE),
    "fsdp2:optimizer": (UPDATE, (1, "unknown", "module")),
    "fsdp2:clip": ((0, *NORM), (1, *NORM)),
    "fsdp2:late": ((0, "unknown", "write"), (1, "unknown", "module")),
    "tp:none": (None, None),
    "tp:loss_all": (MASK, (1, *MASK[1:])),
    "tp:edge_all": (WHERE, (1, *WHERE[1:])),
    "tp:model_all": (INSIDE, (1, *INSIDE[1:])),
    "tp:optimizer": (UPDATE, (1, "unknown", "module")),
    "tp:clip_all": ((0, *NORM), (1, *NORM)),
    "tp_loss:loss_all": ((0, "unknown", "unknown"), (1, "unknown", "unknown")),
    "manual:loss": (MASK, MASK),
    "manual:late": ((0, "unknown", "write"), POISONED),
    "reducing:model": (INSIDE, INSIDE),
    "reducing:edge": (WHERE, WHERE),
    "pipeline:none": (None, None),
    "pipeline:loss": ((1, *MASK[1:]),) * 2,
    "pipeline:edge": ((1, *WHERE[1:]),) * 2,
    "pipeline:model": (INSIDE,) * 2,
    "pipeline:late": ((0, "unknown", "write"), (1, "unknown", "write")),
    "pipeline_1f1b:none": (None, None),
    "pipeline_1f1b:loss": ((1, *MASK[1:]),) * 2,
    "pipeline_1f1b:model": (INSIDE,) * 2,
}
OF_FOUR: dict[str, tuple[First, ...]] = {
    "ddp:loss": (MASK,) * 4,
    "fsdp2:optimizer": (UPDATE, *((rank, "unknown", "module") for rank in (1, 2, 3))),
    "hsdp:none": (None,) * 4,
    "hsdp:loss": (MASK,) * 4,
    "hsdp:edge": (WHERE,) * 4,
    "hsdp:model": (INSIDE,) * 4,
    "fsdp2_tp:model_all": tuple((rank, *INSIDE[1:]) for rank in range(4)),
    "fsdp2_tp:none": (None,) * 4,
    "fsdp2_tp:loss": (MASK, (1, *MASK[1:]), MASK, MASK),
    "fsdp2_tp:edge_all": tuple((rank, *WHERE[1:]) for rank in range(4)),
    "fsdp2_tp:clip": tuple((rank, *NORM) for rank in range(4)),
}
DEEPSPEED: dict[str, tuple[First, First]] = {  # ZeRO drops a step that overflowed, and counts it on a rank that made none of it, too
    "deepspeed0:none": (None, None),
    "deepspeed0:loss": (MASK, MASK),
    "deepspeed0:model": (INSIDE, INSIDE),
    "deepspeed1:loss": (MASK, MASK),
    "deepspeed1:model": (INSIDE, INSIDE),
    "deepspeed1:optimizer": (UPDATE, (1, *POISONED[1:])),
    "deepspeed2:optimizer": (UPDATE, (1, *POISONED[1:])),
    "deepspeed1:edge_all": (WHERE, (1, *WHERE[1:])),
    "deepspeed2:none": (None, None),
    "deepspeed2:loss_all": (MASK, (1, *MASK[1:])),
}
WORLDS: dict[int, dict[str, tuple[First, ...]]] = {
    2: {**CASES, **(DEEPSPEED if importlib.util.find_spec("deepspeed") else {})},
    4: OF_FOUR,
}
ALL = [(world, case) for world, cases in WORLDS.items() for case in cases]

# With "skip": at which steps each rank skips, and which of them refuses to.
SKIPS: dict[tuple[int, str], tuple[list[list[int]], set[int]]] = {
    (2, "ddp:none"): ([[], []], set()),
    (2, "ddp:loss"): ([[3], [3]], set()),
    (2, "ddp:loss_raw"): ([[3], [3]], set()),
    (2, "ddp_view:loss"): ([[3], [3]], set()),
    (2, "ddp_micro:loss"): ([[3], [3]], set()),
    (2, "ddp_micro:model"): ([[3], [3]], set()),
    (2, "ddp_hook:loss"): ([[], []], {0, 1}),
    (2, "ddp:late"): ([[4], [4]], {0}),  # rank 0 alone wrote NaN to its gradients, and by its weights it reaches all a step later
    (2, "fsdp1:loss"): ([[3], [3]], set()),
    (2, "fsdp2:loss"): ([[3], [3]], set()),
    (2, "fsdp2:loss_raw"): ([[], []], {0, 1}),
    (2, "fsdp2:late"): ([[4], [4]], {0}),
    (2, "tp:loss_all"): ([[3], [3]], set()),
    (2, "manual:loss"): ([[3], [3]], set()),
    (2, "manual:late"): ([[4], [4]], {0}),
    (2, "pipeline:loss"): ([[], []], {0, 1}),
    (4, "hsdp:loss"): ([[3]] * 4, set()),
    (4, "hsdp:loss_raw"): ([[]] * 4, {0, 1, 2, 3}),
    (4, "fsdp2_tp:loss"): ([[3]] * 4, set()),
}

# With "stop": how the run ends on each rank.
STOPS: dict[tuple[int, str], tuple[str, ...]] = {
    (2, "ddp:none"): ("", ""),
    (2, "ddp:loss"): ("NonFiniteError", "NonFiniteError"),
    (2, "fsdp2:loss"): ("NonFiniteError", "RuntimeError"),  # left alone in a collective: what its backend makes of that passes through
}

# With "repair": how many backward passes each rank mends. Nobody skips, unless the harm lies in the model.
REPAIRS: dict[tuple[int, str], list[int]] = {
    (2, "ddp:masked"): [1, 0],
    (2, "ddp:masked_all"): [1, 1],
    (2, "ddp_micro:masked"): [1, 0],
    (2, "ddp_view:masked"): [1, 0],
    (2, "fsdp1:masked"): [1, 0],
    (2, "fsdp2:masked"): [1, 0],
    (2, "fsdp2:masked_all"): [1, 1],
    (2, "ddp:model"): [0, 0],
    (2, "fsdp2:model"): [0, 0],
    (2, "ddp:none"): [0, 0],
    (2, "fsdp2:none"): [0, 0],
    (4, "hsdp:masked"): [1, 0, 0, 0],
}

Told = dict[tuple[int, str], list[dict[str, Any]]]  # by number of ranks and case, what each rank says


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


def run(world: int, folder: Path, cases: list[str]) -> Told:
    """All cases, in one group of processes: to import torch costs more than to train."""
    port, environment = str(free_port()), {**os.environ, "OMP_NUM_THREADS": "1"}
    folder.mkdir()
    said = [folder / f"said{rank}.txt" for rank in range(world)]  # a pipe that nobody empties holds up who writes to it
    ranks = []
    for rank, path in enumerate(said):
        with path.open("w") as out:
            command = [sys.executable, str(SCRIPT), str(rank), str(world), port, str(folder), *cases]
            ranks.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
    try:
        for process, path in zip(ranks, said, strict=True):
            assert process.wait(timeout=240) == 0, path.read_text()
    finally:
        for process in ranks:
            process.kill()
    found = [[json.loads(line) for line in path.read_text().splitlines() if line.startswith('{"case"')] for path in said]
    lines = [{line["case"]: line for line in own} for own in found]
    return {(world, case): [own[case] for own in lines] for case in cases}


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    """What all ranks of all cases say."""
    found: Told = {}
    for world, cases in WORLDS.items():
        skips = [case for ranks, case in SKIPS if ranks == world]
        stops = [case for ranks, case in STOPS if ranks == world]
        mends = [case for ranks, case in REPAIRS if ranks == world]
        modes = {"record": cases, "skip": skips, "stop": stops, "repair": mends}
        named = (f"{case}:{mode}" for mode, asked in modes.items() for case in asked)
        ordered = sorted(named, key=lambda case: "deepspeed" in case)
        found |= run(world, folder / str(world), ordered)
    return found


@pytest.mark.parametrize(("world", "case"), ALL)
def test_nothing_changes_and_nobody_is_asked(world: int, case: str, told: Told) -> None:
    """Weights, losses, generators and the count of collectives are those of the bare run, on each rank, whatever goes bad on one."""
    for line in told[world, f"{case}:record"]:
        assert "error" not in line, line["error"]
        assert line["watched"] == line["bare"] and line["bare"]["issued"] > 0
        assert (line["steps"], line["skipped"], line["gaps"]) == (4, 0, [])


@pytest.mark.parametrize(("world", "case"), ALL)
def test_what_went_bad_is_found_on_the_ranks_that_it_reaches(world: int, case: str, told: Told) -> None:
    """The loss is located where its own program holds the fault; the rank that made it is named; healthy is said only where all was."""
    for line, expected in zip(told[world, f"{case}:record"], WORLDS[world][case], strict=True):
        first = (*line["incidents"][0][1:3], line["incidents"][0][4]) if line["incidents"] else None
        assert first == expected, line["sentence"]
        assert line["status"] == ("healthy" if expected is None else "non-finite")
        if expected in (MASK, WHERE):
            assert "ranks.py:" in line["sentence"] and line["incidents"][0][0] == 3


def test_weights_that_are_bad_are_blamed_where_the_model_cannot_be_run_again(told: Told) -> None:
    """The step after the harm, with sharded weights: their own part tells."""
    for case in ("fsdp1:loss", "fsdp2:loss", "tp:loss_all", "reducing:edge"):
        for line in told[2, f"{case}:record"]:
            assert line["incidents"][-1][0] == 4 and line["incidents"][-1][2] == "poisoned_weights"


def test_a_rank_that_is_reached_says_from_where(told: Told) -> None:
    """By all-reduce where its own backward was seen to be finite; where no rank can run the model alone, no more than that is said.

    Also where the trainer has dropped the gradients by then, and only their norm tells.
    """
    cases = ("ddp:loss", "manual:loss", "fsdp2:loss", "reducing:edge", "ddp:edge_drop", "fsdp2:edge_drop")
    own = {case: told[2, f"{case}:record"][1]["incidents"][1] for case in cases}
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
        sentence = told[2, f"{case}:record"][0]["sentence"]
        assert "finite when backward and the ranks had done with it: it was written afterwards, ranks.py:" in sentence


@pytest.mark.parametrize(("world", "case"), SKIPS)
def test_all_ranks_skip_or_none(world: int, case: str, told: Told) -> None:
    """What a reduction has brought to all is skipped by all, and the run goes on with healthy weights; where one may be alone, it refuses."""
    steps, refusing = SKIPS[world, case]
    lines = told[world, f"{case}:skip"]
    for line in lines:
        assert "error" not in line, line["error"]
        assert line["bare"]["issued"] == line["watched"]["issued"]
    assert [line["skips"] for line in lines] == steps and [line["skipped"] for line in lines] == [len(skips) for skips in steps]
    assert {rank for rank, line in enumerate(lines) if "skip_refused" in [slug for slug, _ in line["notes"]]} == refusing
    assert {rank for rank, line in enumerate(lines) if any("nanscope [skip-refused]" in said for said in line["log"])} == refusing
    for line in lines:
        assert "skipped_alone" not in [slug for slug, _ in line["notes"]]
        if [3] in steps:
            assert "nan" not in line["watched"]["losses"].split(", ")[3]
        if not any(steps):
            assert line["watched"] == line["bare"]


@pytest.mark.parametrize(("world", "case"), REPAIRS)
def test_each_rank_mends_its_own_loss_and_asks_nobody(world: int, case: str, told: Told) -> None:
    """With a fault on one rank or on all: weights, generators and the count of collectives are those of the run whose loss is mended."""
    lines = told[world, f"{case}:repair"]
    for line in lines:
        assert "error" not in line, line["error"]
        assert line["watched"]["issued"] == line["bare"]["issued"] and not line["gaps"]
        if ":model" not in case:
            assert line["watched"]["weights"] == line["bare"]["weights"]
    assert [line["repaired"] for line in lines] == REPAIRS[world, case]
    assert [line["skipped"] for line in lines] == [int(":model" in case)] * world


@pytest.mark.parametrize(("world", "case"), STOPS)
def test_ranks_stop_where_they_see_it(world: int, case: str, told: Told) -> None:
    """Before the update; nobody waits for whoever has stopped longer than its own collectives do."""
    lines = told[world, f"{case}:stop"]
    assert tuple(line["stopped"] for line in lines) == STOPS[world, case]
    for line in lines:
        assert "error" not in line and line["steps"] == (2 if any(STOPS[world, case]) else 4)


def test_stages_of_a_pipeline_say_what_the_others_sent_them(told: Told) -> None:
    """A value goes on to the next stage and its gradient comes back: neither is blamed on the batch, nor on the stage's own backward."""
    for kind in ("pipeline", "pipeline_1f1b"):
        stages = [told[2, f"{kind}:{fault}:record"] for fault in ("loss", "model")]
        (handed,) = {tuple(i[1:]) for i in stages[0][0]["incidents"] if i[:2] == [3, 0]}
        (sent,) = {tuple(i[1:]) for i in stages[1][1]["incidents"] if i[:2] == [3, 1]}
        assert handed == (0, "allreduce_nan", "backward", "handed") and sent == (1, "allreduce_nan", "input", "received")
        assert any("in a pipeline from the next stage. rank 1: -(surrogate" in sentence for sentence in stages[0][0]["sentences"])
        assert any("what another rank sent to this one came in as +inf" in sentence for sentence in stages[1][1]["sentences"])


def test_the_element_of_a_sharded_weight_is_told_by_its_global_index(told: Told) -> None:
    """The second rank's first row is not the weight's first."""
    said = {(world, case): [line["sentence"] for line in told[world, f"{case}:record"]] for world, case in ALL}
    assert "the gradient of embed.weight is NaN at global index [0, 0] of [12, 8]" in said[2, "fsdp2:late"][0]
    assert ["at global index" in told[4, "hsdp:loss:record"][rank]["sentences"][1] for rank in (1, 2, 3)] == [True] * 3
    assert "global index [6, 0] of [12, 8]" in told[4, "hsdp:loss:record"][1]["sentences"][1]
    assert "the reduce-scatter of its shard's gradient brought it. rank 0: -(surrogate" in told[4, "hsdp:loss:record"][1]["sentences"][1]
    assert "global index [6, 4] of [12, 8]" in told[4, "fsdp2_tp:loss:record"][3]["sentences"][1]


def test_an_element_of_a_flat_weight_is_told_of_the_weight_that_lies_there(told: Told) -> None:
    """The first FSDP and DeepSpeed's ZeRO lay all weights end to end: a place in that helps nobody."""
    sentences = [line["sentences"][-2:] for line in told[2, "fsdp1:loss:record"]]
    assert "the weight embed.weight was already NaN at global index [0, 0] of [12, 8]" in sentences[0][1]
    assert "the gradient of hidden.weight is NaN at global index [5, 2] of [8, 8]" in sentences[1][0]
    for stage in (1, 2) if (2, "deepspeed1:optimizer:record") in told else ():
        first = told[2, f"deepspeed{stage}:optimizer:record"][0]["sentence"]
        assert "made module.embed.weight NaN at global index [0, 0] of [12, 8]" in first


def test_the_inside_of_a_model_that_no_rank_can_run_alone_is_told(told: Told) -> None:
    """The operation and the part of the model, from what autograd has kept; where that is not enough it is said why no more was seen."""
    cases = [(2, case) for case in ("fsdp1:model", "fsdp1_orig:model", "fsdp2:model", "tp:model_all", "reducing:model")]
    for case in (*cases, (4, "hsdp:model"), (4, "fsdp2_tp:model_all")):
        line = told[case[0], f"{case[1]}:record"][0]
        assert "exp overflowed to +inf at [0, 0, 0] of [2, 4, 8], in " in line["sentence"] and "burst (Burst)" in line["sentence"]
        assert {"not_run_again", "kept_by_autograd"} <= {slug for slug, _ in line["notes"]}
    for case in ("fsdp1:optimizer", "fsdp2:optimizer", "tp:optimizer"):  # the weight that is bad is another rank's part of it
        sentence = told[2, f"{case}:record"][1]["sentence"]
        assert "The model was not run again: it " in sentence and "came out of " in sentence


MERGED: dict[str, tuple[list[tuple[int, str]], dict[str, tuple[int, ...]]]] = {  # causes that the run's report tells, and its ranks
    "ddp:none": ([], {"healthy": (0, 1)}),
    "ddp:loss": ([(0, "empty_mask_mean")], {"first": (0,), "same step": (1,)}),
    "ddp:late": ([(0, "unknown")], {"first": (0,), "later": (1,)}),
    "ddp:optimizer": ([(0, "bad_input")], {"first": (0,), "later": (1,)}),
    "ddp:clip": ([(0, NORM[0])], {"first": (0, 1)}),
    "fsdp1_orig:late": ([(0, "unknown")], {"first": (0,), "later": (1,)}),
    "fsdp2:loss": ([(0, "empty_mask_mean")], {"first": (0,), "same step": (1,)}),
    "fsdp2:loss_all": ([(0, "empty_mask_mean")], {"first": (0, 1)}),
    "fsdp2:model": ([(0, "exp_overflow")], {"first": (0,), "same step": (1,)}),
    "fsdp2:optimizer": ([(0, "bad_input")], {"first": (0,), "later": (1,)}),
    "tp:model_all": ([(0, "exp_overflow")], {"first": (0, 1)}),
    "pipeline:loss": ([(1, "empty_mask_mean")] * 2, {"first": (1,), "same step": (0,)}),
    "pipeline:model": ([(0, "exp_overflow")] * 2, {"first": (0,), "same step": (1,)}),
    "tp:optimizer": ([(0, "bad_input")], {"first": (0,), "later": (1,)}),
    "tp_loss:loss_all": ([(0, "unknown")], {"first": (0, 1)}),
    "manual:late": ([(0, "unknown")], {"first": (0,), "later": (1,)}),
}


@pytest.mark.parametrize("case", MERGED)
def test_the_report_of_a_run_tells_one_cause_and_who_followed(case: str, told: Told, folder: Path) -> None:
    """Whatever spreads the model over the ranks; what came from another rank is no incident of its own."""
    del told
    found = verdict_of(find_run(folder / "2" / f"{case.replace(':', '-')}-record")[0])
    assert found.ranks is not None and ([(i.rank, str(i.cause)) for i in found.causes], found.ranks.world) == (MERGED[case][0], 2)
    assert {str(group.standing): group.ranks for group in found.ranks.groups} == MERGED[case][1]


def test_the_report_says_what_carried_it(told: Told, folder: Path) -> None:
    """Replicas share a reduction, shards one that scatters, the stages of a pipeline send to each other."""
    del told
    shards = dict.fromkeys(("fsdp2-loss", "fsdp1-loss"), "by reduce-scatter")
    carried = {"ddp-loss": "by all-reduce", **shards, "pipeline-loss": "sent by another stage", "pipeline-model": "sent by another stage"}
    for case, words in carried.items():
        found = verdict_of(find_run(folder / "2" / f"{case}-record")[0])
        assert found.sentence.endswith(f"1 rank in the same step ({words}) followed."), found.sentence


def test_the_report_is_made_by_the_command_line(told: Told, folder: Path) -> None:
    """And says who was first."""
    del told
    run = folder / "2" / "ddp-loss-record"
    done = subprocess.run(
        [sys.executable, "-m", "nanscope", "report", str(run), "-o", str(run / "merged.json")], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 3, done.stderr
    found = json.loads((run / "merged.json").read_text())
    assert [(i["step"], i["rank"], i["cause"]) for i in found["incidents"]] == [(3, 0, "empty_mask_mean"), (4, 0, "poisoned_weights")]
    assert found["sentence"].endswith("Rank 0 of 2 was first; 1 rank in the same step (by all-reduce) followed.")
