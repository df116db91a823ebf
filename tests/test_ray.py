"""Ray: a real cluster, which was there before the driver; its workers take part in the driver's run, and one verdict is told of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanscope.integrations import ray as door
from nanscope.integrations.ray_worker import ALSO, INVITED
from nanscope.watching.invitation import MEMBER, Invitation

INVITATION = Invitation("/runs/a", "/runs", "a")

DRIVER = """
import sys
import ray, torch

def train(bad):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = model(torch.randn(6, 4)).pow(2).mean()
        if step == bad:
            loss = torch.log(loss * 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

@ray.remote(num_cpus=0)
class Trainer:
    def train(self, bad):
        train(bad)
    def fail(self):
        train(-1)
        raise RuntimeError("the reward model is down")

@ray.remote(num_cpus=0)
class Sampler:
    def sample(self):
        with torch.no_grad():
            return float(torch.nn.Linear(4, 1)(torch.randn(6, 4)).sum())

ray.init(address=sys.argv[1], log_to_driver=True{more})
actor = Trainer.options(name=f"actor-{{sys.argv[2]}}").remote()
critic, sampler = Trainer.remote(), Sampler.remote()
ray.get([actor.train.remote(2 if sys.argv[2] == "bad" else -1), sampler.sample.remote(), critic.train.remote(-1)])
if sys.argv[2] == "fails":
    ray.get(critic.fail.remote())
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster whose workers know nothing of a run."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield made.address
    made.shutdown()


def drive(folder: Path, cluster: str, what: str, *command: str, more: str = "") -> tuple[int, str, Path | None]:
    """Run the driver; return its status, what it said, and the directory of the run."""
    (folder / "driver.py").write_text(DRIVER.format(more=more))
    done = subprocess.run(
        [sys.executable, *command, "driver.py", cluster, what],
        cwd=folder, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
    run = folder / "nanscope-runs" / "latest"
    return done.returncode, done.stderr + done.stdout, run.resolve() if run.exists() else None


RUN = ("-m", "nanscope", "run", "--ray", "--json", "verdict.json")


def test_the_driver_ends_with_the_verdict_of_all_workers(cluster: str, tmp_path: Path) -> None:
    """The actor that went bad is named by its name, the other one by its class; the one that only samples leaves no file."""
    status, said, run = drive(tmp_path, cluster, "bad", *RUN)
    assert status == 3, said
    assert run is not None and sorted(path.name for path in run.glob("history*")) == [
        "history.rank0.Trainer.jsonl",
        "history.rank0.actor-bad.jsonl",
    ]
    assert "step 3 on actor-bad" in said and "driver.py:12" in said and "4 steps of 2 processes watched" in said
    told = json.loads((tmp_path / "verdict.json").read_text())
    assert told["status"] == "non-finite" and told["gaps"] == []


def test_workers_that_ray_ends_between_two_steps_were_watched_to_their_end(cluster: str, tmp_path: Path) -> None:
    """Ray ends its workers without a word: healthy is healthy, now and when the report is drawn later."""
    status, said, _ = drive(tmp_path, cluster, "fine", *RUN)
    assert status == 0, said
    assert "4 steps of 2 processes watched, no non-finite" in said
    later = subprocess.run([sys.executable, "-m", "nanscope", "report", "-o", "r.json"], cwd=tmp_path, capture_output=True, text=True)
    assert later.returncode == 0, later.stderr
    listed = subprocess.run([sys.executable, "-m", "nanscope", "runs", "--json", "l.json"], cwd=tmp_path, capture_output=True, text=True)
    assert listed.returncode == 0 and [one["status"] for one in json.loads((tmp_path / "l.json").read_text())["runs"]] == ["healthy"]


def test_an_actor_that_fails_keeps_its_failure(cluster: str, tmp_path: Path) -> None:
    """The driver's own status and error stay; what was watched until then is told."""
    status, said, _ = drive(tmp_path, cluster, "fails", *RUN)
    assert status == 1
    assert "the reward model is down" in said and "8 steps of 2 processes watched, no non-finite" in said


def test_a_driver_asks_its_workers_in_by_its_own_code(cluster: str, tmp_path: Path) -> None:
    """`ray.init(runtime_env=nanscope.ray())`: the run begins there, and the log tells its verdict at the end."""
    more = ', runtime_env=__import__("nanscope").ray({"env_vars": {"MINE": "1"}})'
    status, said, run = drive(tmp_path, cluster, "bad", more=more)
    assert status == 0
    assert "nanscope [verdict]: " in said and "gave −inf, driver.py:12" in said and "next: nanscope report nanscope-runs" in said
    assert run is not None and len(list(run.glob("history*"))) == 2


def test_what_a_driver_asks_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables, its other fields, and a setup hook of its own, by name or as a function, which is called after ours."""
    monkeypatch.setenv(MEMBER, INVITATION.to_text())
    found = door.ray({"pip": ["x"], "env_vars": {"MINE": "1"}, door.HOOK: "os.path.join"})
    assert found["pip"] == ["x"] and found[door.HOOK] == door.BEGIN
    assert found["env_vars"] == {"MINE": "1", INVITED: INVITATION.to_text(), ALSO: "os.path.join"}
    assert door.ray(found) == found
    called: list[int] = []
    both = door.ray({door.HOOK: lambda: called.append(1)})[door.HOOK]
    monkeypatch.delenv(MEMBER)
    both()
    assert called == [1]


def test_a_driver_outside_a_run_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook that `ray.init` passes through gives back what it got; that of somebody else is asked first."""
    monkeypatch.delenv(MEMBER, raising=False)
    assert door.into(None) == {} and door.into({"pip": ["x"]}) == {"pip": ["x"]}
    monkeypatch.setenv(door.ENV_HOOK, f"{__name__}.somebody_elses")
    with door.by_environment():
        assert os.environ[door.ENV_HOOK] == door.INTO
        assert door.into({}) == {"theirs": True}
    assert os.environ[door.ENV_HOOK] == f"{__name__}.somebody_elses" and door.ALSO_INTO not in os.environ


def somebody_elses(runtime_env: dict[str, object]) -> dict[str, object]:
    """What a site has set up for all of its drivers."""
    return {**runtime_env, "theirs": True}
