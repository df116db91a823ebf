"""Nodes that begin one run together end it with one verdict, which one of them shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_member import ONE, RANKS

from nanscope.snapshot.record import RunRecord, now, records
from nanscope.snapshot.runs import latest
from nanscope.watching.job import Job
from nanscope.watching.nodes import Nodes

WAIT = """
import time
from pathlib import Path
while "waits" in sys.argv and not Path("go").exists():
    time.sleep(0.1)
"""
TRAIN = RANKS.replace("range(1, 4)", "range(1, 13)")


def begin(folder: Path, out: str, *command: str) -> subprocess.Popen[str]:
    """`nanscope run …` as on a machine of its own: another directory, another folder of temporary files."""
    (folder / "tmp").mkdir(parents=True)
    for name, text in (("one.py", ONE.replace("def train", f"{WAIT}def train")), ("ranks.py", TRAIN)):
        (folder / name).write_text(text)
    environ = {**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    line = [sys.executable, "-m", "nanscope", "run", "--json", "v.json", "--out", out, *command]
    return subprocess.Popen(line, cwd=folder, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.name == "nt", reason="processes are those of Unix")
@pytest.mark.parametrize("kind", ["store", "folder"])
def test_two_nodes_of_torchrun_are_one_run(tmp_path: Path, kind: str) -> None:
    """At an address, where nothing can be claimed, and on a shared disk: one directory, the same verdict and status, shown once."""
    out = f"file://{tmp_path}/runs" if kind == "store" else str(tmp_path / "runs")
    port = 29000 + os.getpid() % 900
    told = ("--nnodes", "2", "--rdzv-id", "a", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
    torchrun = ("--", sys.executable, "-m", "torch.distributed.run", *told)
    nodes = [begin(tmp_path / f"{rank}", out, *torchrun, "--node-rank", str(rank), "ranks.py", "bad") for rank in range(2)]
    said = [node.communicate(timeout=240)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [3, 3], "\n".join(said)
    verdicts = [json.loads((tmp_path / f"{rank}" / "v.json").read_text()) for rank in range(2)]
    assert [[group["ranks"] for group in verdict["ranks"]["groups"]] for verdict in verdicts] == [[[1], [0]]] * 2
    assert [verdict["gaps"] for verdict in verdicts] == [[], []]
    assert [text.count("● step 2 · rank 1") for text in said] == [1, 0] and "nanscope: node1: loss = torch.log" in said[1]
    (run,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir() and path.name[0] != "." and not path.is_symlink())
    assert {(one.rank, one.worker, one.node, one.member) for one in records(run)} == {
        (0, "node0", "node0", False), (0, "node1", "node1", False), (0, "", "node0", True), (1, "", "node1", True),
    }  # fmt: skip
    assert {path.name for path in run.iterdir()} > {
        *("history.rank0.jsonl", "history.rank1.jsonl", "report.html", "step-000002.rank0.safetensors", "step-000002.rank1.safetensors"),
    }
    left = [path for rank in range(2) for path in (tmp_path / f"{rank}" / "tmp" / f"nanscope-{os.getuid()}").rglob("*.json*")]
    assert left == []


@pytest.mark.skipif(os.name == "nt", reason="processes are those of Unix")
def test_a_run_that_is_named_by_hand_is_the_same_on_all_nodes(tmp_path: Path) -> None:
    """Also where the scripts themselves train; the same name once more is another run."""
    out, run = f"file://{tmp_path}/runs", tmp_path / "runs" / "mine-one"
    first = begin(tmp_path / "first", out, "--run-id", "mine", "one.py", "waits")
    while not list(run.glob("run.*")) and first.poll() is None:
        time.sleep(0.1)
    second = begin(tmp_path / "second", out, "--run-id", "mine", "one.py", "bad")
    while len(list(run.glob("run.*"))) < 2 and second.poll() is None:
        time.sleep(0.1)
    (tmp_path / "first" / "go").touch()
    said = [node.communicate(timeout=240)[1] for node in (first, second)]
    assert second.returncode == 3, "\n".join(said)
    assert len({record.node for record in records(run)}) == 2 and sum(record.steps for record in records(run)) == 6
    assert len(list(run.glob("step-000002.rank0.node-*.safetensors"))) == 1
    third = begin(tmp_path / "third", out, "--run-id", "mine", "one.py")
    assert third.wait(240) == 0 and latest(tmp_path / "runs") == tmp_path / "runs" / "mine-one-2"


def ended(folder: Path, node: str) -> RunRecord:
    """A node on which the run is over."""
    record = RunRecord(worker=node, node=node, status="", ended=now())
    record.write(folder)
    return record


def test_a_node_that_did_not_report_is_named(tmp_path: Path) -> None:
    """By its number where it has one; one that has begun and not ended, too."""
    looks: list[float] = []
    nodes = Nodes(tmp_path, "node0", Job("k", index=0, nodes=3))
    ended(tmp_path, "node0")
    running = replace(ended(tmp_path, "node2"), status="running")
    running.write(tmp_path)
    missing = nodes.missing(lambda: looks.append(time.monotonic()), 0.0)
    assert missing == "what node2 did after it last reported, and what node1 of 3 did, of which there is no file" and len(looks) == 1
    assert (
        Nodes(tmp_path, "node0", Job("k", nodes=3)).missing(lambda: None, 0.0).endswith("what 1 node of 3 did, of which there is no file")
    )

    def gather() -> None:
        for node in ("node1", "node2"):
            ended(tmp_path, node)

    assert nodes.missing(gather, 60.0) == ""


def test_one_node_shows_the_verdict(tmp_path: Path) -> None:
    """The first; where they have no numbers that of rank 0, or the first by name where no rank came so far."""
    assert [Nodes(tmp_path, f"node{index}", Job("k", index=index)).is_first() for index in range(2)] == [True, False]
    for node in ("node-a", "node-b"):
        ended(tmp_path, node)
    shows = [Nodes(tmp_path, node, Job("k")).is_first() for node in ("node-a", "node-b")]
    RunRecord(member=True, node="node-b").write(tmp_path)
    assert shows == [True, False] and [Nodes(tmp_path, node, Job("k")).is_first() for node in ("node-a", "node-b")] == [False, True]
