"""Several ranks: a NaN that came by all-reduce is told by the rank that made it, in every rank's verdict and in the merged report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ranks.py")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="module", params=["ddp", "manual"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """The run directory of two real processes, and what each says of the first incident."""
    folder = tmp_path_factory.mktemp("ranks")
    port = str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), port, str(folder), request.param],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = []
    for process in ranks:
        out, error = process.communicate(timeout=180)
        assert process.returncode == 0, error
        said.append(out.strip().split("|"))
    return folder, said


def test_every_rank_names_the_one_that_made_the_nan(run: tuple[Path, list[list[str]]]) -> None:
    """Rank 0's own loss is finite: it is told what rank 1 did, which op, and that all gradients went bad with it."""
    _, said = run
    for _, rank, step, cause, op, sentence in said:
        assert (rank, step, cause, op) == ("1", "2", "empty_mask_mean", "div")
        assert "ranks.py:" in sentence


def test_a_rank_without_a_fault_says_that_it_came_from_elsewhere(run: tuple[Path, list[list[str]]]) -> None:
    """In the merged report the origin comes first, then the rank that it reached, with its own cause; then the poisoned weights."""
    folder, _ = run
    done = subprocess.run(
        [sys.executable, "-m", "nanscope", "report", str(folder), "-o", str(folder / "merged.json")],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 3, done.stderr
    incidents = json.loads((folder / "merged.json").read_text())["incidents"]
    assert [(i["step"], i["rank"], i["cause"]) for i in incidents[:2]] == [(2, 1, "empty_mask_mean"), (2, 0, "allreduce_nan")]
    assert "it came by all-reduce" in incidents[1]["sentence"] and "rank 1" in incidents[1]["sentence"]
    assert {i["cause"] for i in incidents[2:]} == {"poisoned_weights"}
