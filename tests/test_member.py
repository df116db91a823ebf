"""Processes that a watched run starts: each is watched, each has files of its own name, and there is one verdict and one status of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanscope.snapshot.record import records
from nanscope.snapshot.runs import latest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are those of Unix")

ONE = """
import os, sys, torch
def train(bad=False, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        loss = model(torch.randn(6, 4)).pow(2).mean()
        if step == 2 and bad:
            loss = torch.log(loss * 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if __name__ == "__main__":
    train("bad" in sys.argv)
    if "die" in sys.argv:
        os.kill(os.getpid(), 9)
"""

RANKS = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 4):
    loss = model(torch.randn(6, 4)).pow(2).mean()
    if step == 2 and dist.get_rank() == 1 and "bad" in sys.argv:
        loss = torch.log(loss * 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""

AGAIN = """
import os, sys, torch
torch.manual_seed(0)
model, first = torch.nn.Linear(4, 1), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
last = 3 if first else 2
for step in range(1, last + 1):
    loss = model(torch.randn(6, 4)).pow(2).mean()
    if step == last and os.environ["RANK"] == "0":
        loss = torch.log(loss * 0) if first else loss * 0 / (loss * 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
sys.exit(first)
"""

# One process of each kind, begun at once, since most of their time is torch's: a shell's, a grandchild, spawned, forked, killed, silent.
FAMILY = """
import multiprocessing, os, subprocess, sys
def of_spawn():
    from one import train
    train()
def grandchild():
    subprocess.run(["sh", "-c", f"{sys.executable} one.py bad"], env={**os.environ, "NANSCOPE_ROLE": "critic"}, check=True)
if __name__ == "__main__":
    kinds = (("spawn", of_spawn), ("forkserver", of_spawn), ("spawn", grandchild))
    processes = [multiprocessing.get_context(kind).Process(target=act) for kind, act in kinds]
    for process in processes:
        process.start()
    killed = subprocess.Popen([sys.executable, "one.py", "die"])
    silent = subprocess.Popen([sys.executable, "-c", "import torch"])
    bare = subprocess.run([sys.executable, "-c", "import sys; print([name for name in sys.modules if 'nanscope' in name])"])
    from one import train
    train(steps=4)
    if os.fork() == 0:
        train()
        sys.exit(0)
    os.wait()
    for process in processes:
        process.join()
    print("ended", killed.wait(), silent.wait())
"""


@dataclass(frozen=True, slots=True)
class Told:
    """What a run gave. names: of the files in its directory."""

    status: int
    out: str
    err: str
    verdict: Mapping[str, Any]
    run: Path
    names: frozenset[str]


def told(folder: Path, *command: str, **environ: str) -> Told:
    """`nanscope run …` in a process of its own."""
    folder.mkdir(exist_ok=True)
    for name, text in (("one.py", ONE), ("ranks.py", RANKS), ("family.py", FAMILY)):
        (folder / name).write_text(text)
    environ = {
        **os.environ,
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **environ,
    }
    line = [sys.executable, "-m", "nanscope", "run", "--out", "runs", "--json", "v.json", *command]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, env=environ, check=False)
    run = latest(folder / "runs")
    assert run is not None and (folder / "v.json").is_file(), done.stderr
    verdict = json.loads((folder / "v.json").read_text())
    return Told(done.returncode, done.stdout, done.stderr, verdict, run, frozenset(path.name for path in run.iterdir()))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A run whose script starts a process of each kind."""
    return told(tmp_path_factory.mktemp("family"), "family.py")


def test_each_process_writes_under_its_own_name(family: Told) -> None:
    """A child by its kind or role, a child of a child, a forked one; and who does not train leaves nothing."""
    histories = {name.removeprefix("history.").removesuffix(".jsonl") for name in family.names if name.startswith("history.")}
    workers = {"SpawnProcess-1", "ForkServerProcess-2", "critic", "one", "family"}
    assert histories == {"rank0", *(f"rank0.{name}" for name in workers)}
    assert {record.worker for record in records(family.run)} == {"", *workers}
    assert "ended -9 0" in family.out and "\n[]\n" in f"\n{family.out}"


def test_the_verdict_of_all_is_told_once(family: Told) -> None:
    """With the child's file, role and status; the others say what they saw in one line of the log at most."""
    assert family.status == 3 and family.verdict["status"] == "non-finite"
    assert [(one["step"], one["worker"]) for one in family.verdict["incidents"] if one["consequence_of"] is None] == [(2, "critic")]
    assert family.err.count("● step 2 · critic") == 1 and "step 2 on critic: " in family.err
    assert "4 steps of 6 processes watched" in family.err
    assert sum(line.startswith("nanscope [") for line in family.err.splitlines()) == 2  # the cause, and that the rest follows


def test_a_process_that_was_killed_is_named(family: Told) -> None:
    """With its last step; what it had written stands."""
    (gap,) = family.verdict["gaps"]
    assert (
        gap["slug"] == "unfinished"
        and gap["text"].startswith("what one did after step 3")
        and gap["text"].endswith("it was killed, or left by os._exit")
    )


def test_a_forked_process_counts_its_own_steps(family: Told) -> None:
    """From 1, and nothing of its parent's is in its book."""
    by_name = {record.worker: record for record in records(family.run)}
    assert (by_name[""].steps, by_name["family"].steps, by_name["family"].backwards) == (4, 3, 3)
    assert not by_name[""].member and by_name["family"].member


@pytest.mark.parametrize(
    "command", [("torchrun",), ("python", "-m", "torch.distributed.run")], ids=["a console script", "a module of python"]
)
def test_the_ranks_of_a_launcher_are_one_run(tmp_path: Path, command: tuple[str, ...]) -> None:
    """The bad rank is the cause, the other one what it reached."""
    found = told(tmp_path, "--", *command, "--nproc-per-node", "2", "ranks.py", "bad")
    assert found.status == 3, found.err
    assert found.names >= {"run.json", "run.rank0.json", "run.rank1.json", "history.rank0.jsonl", "history.rank1.jsonl", "report.html"}
    first = found.verdict["incidents"][0]
    assert (first["step"], first["rank"], first["cause"]) == (2, 1, "log_zero")
    assert [group["ranks"] for group in found.verdict["ranks"]["groups"]] == [[1], [0]]
    assert found.err.count("log(0) = −inf. The logarithm of 0") == 1
    assert found.run.name.endswith("-ranks" if command == ("torchrun",) else "-torch.distributed.run")


def test_ranks_that_are_started_again_are_told_apart(tmp_path: Path) -> None:
    """An elastic launcher starts all of them anew: what the first attempt met comes first, though its step has the larger number."""
    (tmp_path / "again.py").write_text(AGAIN)
    found = told(tmp_path, "--", "torchrun", "--nproc-per-node", "2", "--max-restarts", "1", "again.py")
    assert found.status == 3, found.err
    assert found.names >= {"run.rank1.json", "run.rank0.attempt-2.json", "run.rank1.attempt-2.json"}
    assert [(one["step"], one.get("worker"), one["cause"]) for one in found.verdict["incidents"]] == [
        (3, None, "log_zero"),
        (2, "attempt-2", "zero_div_zero"),
    ]
    assert {record.restarts for record in records(found.run) if record.worker} == {1}


def test_accelerate_is_one_run(tmp_path: Path) -> None:
    """A launcher that starts a launcher; all is well."""
    pytest.importorskip("accelerate")
    asked = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    found = told(tmp_path, "--", "accelerate", "launch", *asked, "--main_process_port", "0", "ranks.py")
    assert (found.status, found.verdict["status"]) == (0, "healthy"), found.err
    assert "3 steps of 2 processes watched" in found.err


def test_the_launcher_of_deepspeed_is_one_run(tmp_path: Path) -> None:
    """It starts a launcher, which starts the ranks."""
    pytest.importorskip("deepspeed")
    found = told(tmp_path, "--", "deepspeed", "--num_gpus", "2", "ranks.py", "bad", DS_ACCELERATOR="cpu")
    assert (found.status, found.verdict["status"], found.verdict["gaps"]) == (3, "non-finite", []), found.err
    assert [group["ranks"] for group in found.verdict["ranks"]["groups"]] == [[1], [0]]


OWN = """
import nanscope
from one import train
with nanscope.watch(out="mine") as scope:
    train(True)
print(scope.out)
train()
"""


def test_a_watch_of_its_own_takes_over_within_the_run(tmp_path: Path) -> None:
    """It alone writes while it lasts, into the run's directory; afterwards the process is watched on."""
    found = told(tmp_path, "--", "sh", "-c", f"{sys.executable} -c '{OWN}'; exit 5")
    assert found.status == 5 and found.out == f"{found.run}\n" and not (tmp_path / "mine").exists()
    assert {"history.rank0.run.jsonl", "history.rank0.run-2.jsonl"} < found.names
    assert [record.steps for record in records(found.run) if record.member] == [3, 3]


def test_a_watch_of_the_leading_script_takes_over_within_the_run(tmp_path: Path) -> None:
    """What goes bad in its block is said once and told once; before it and after it the script is watched as it was."""
    (tmp_path / "own.py").write_text(OWN.replace("import nanscope\n", "import nanscope\nfrom one import train\ntrain(steps=1)\n"))
    found = told(tmp_path, "own.py")
    assert found.status == 3 and found.out == f"{found.run}\n" and not (tmp_path / "mine").exists(), found.err
    assert found.err.count("nanscope [bad-step]: step 2 on main: ") == found.err.count("● step 2 · ") == 1
    assert {record.worker: record.steps for record in records(found.run)} == {"": 1, "main": 3, "main-2": 3}
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.is_dir() and not path.is_symlink()] == [found.run.name]


UNSEEN = """
import subprocess, sys
train = "import sys; sys.path.insert(0, '.'); from one import train; train(True)"
subprocess.run([sys.executable, "-I", "-c", train], check=True)
if "two" in sys.argv:
    subprocess.run([sys.executable, "-c", "import sys; sys.modules['nanscope'] = None;" + train], check=True)
"""


def test_a_process_that_cannot_be_watched_trains_all_the_same(tmp_path: Path) -> None:
    """One that takes no notice of its environment, and one without nanscope: neither is broken, and nothing is called healthy."""
    (tmp_path / "unseen.py").write_text(UNSEEN)
    found = told(tmp_path, "unseen.py", "two")
    assert (found.status, found.verdict["status"]) == (4, "unwatched")
    assert {gap["slug"] for gap in found.verdict["gaps"]} == {"child-processes", "child-unwatched"}
