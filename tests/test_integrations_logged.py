"""The loggers of torchtitan, SkyRL and verl themselves, each given our numbers; and the history of a run as a driver reads it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from doors import BAD, STEPS, loop, train

import nanscope
from nanscope.integrations.logged import FolderStretch
from nanscope.snapshot.history import Entry, read
from nanscope.watching.invitation import Invitation


class Keeps:
    """A logger."""

    name = "keeps"

    def __init__(self) -> None:
        self.lines: list[tuple[dict[str, Any], int]] = []

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.lines.append((dict(data), step))


def events(folder: Path) -> Any:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_each_log_has_the_steps_since_the_last(tmp_path: Path) -> None:
    """By position and by name, and what the logger was given stays as it was."""
    keeps, given = Keeps(), {"loss": 1.0}
    with nanscope.watch(out=tmp_path / "runs") as scope:
        logged = nanscope.integrations.Logged(keeps, scope)
        loop(True, lambda step, _: logged.log(given, step) if step % 2 else logged.log(data=given, step=step))
        logged.log(given, 6)
    assert [(line["nanscope/bad_steps"], step) for line, step in keeps.lines[:STEPS]] == [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5)]
    assert keeps.lines[STEPS] == ({"loss": 1.0}, 6) and given == {"loss": 1.0}
    assert logged.name == "keeps"


def test_a_driver_reads_what_its_workers_wrote(tmp_path: Path) -> None:
    """From the folder of runs, once each, in steps that the driver chooses."""
    logged, keeps = None, Keeps()

    def after(step: int, _: Any) -> None:
        nonlocal logged
        logged = logged or nanscope.integrations.Logged(keeps, tmp_path / "runs" / "nothing")
        if step % 2 == 0:
            logged.log({"loss": 1.0}, step)

    folder = FolderStretch(tmp_path / "runs")  # before the run begins
    _, scope = train([], tmp_path, fault=True, after=after)
    entries = read(scope.out / "history.rank0.jsonl")
    found = folder.scalars()
    assert found["nanscope/headroom_nats"] == min(entry.headroom for entry in entries if entry.headroom is not None)
    assert found["nanscope/first_bad_step"] == BAD and folder.scalars() == {}
    assert [line for line, _ in keeps.lines] == [{"loss": 1.0}] * 2  # where nothing is


def test_ranks_come_to_one_line_and_workers_to_their_own(tmp_path: Path) -> None:
    """The least headroom of the ranks; a bad step is one, however many of them say so."""
    folder = FolderStretch(tmp_path)
    for rank, headroom in ((0, 60.0), (1, 20.0), (2, 30.0)):
        entry = Entry(5, rank, 0.0, headroom=headroom, nonfinite=rank > 0)
        (tmp_path / f"history.rank{rank}.jsonl").write_text(json.dumps(entry.to_json()) + "\n" + '{"step": 6, "ra')
    critic = Entry(5, 0, 0.0, loss=2.0, worker="critic")
    (tmp_path / "history.rank0.critic.jsonl").write_text("no line of ours\n" + json.dumps(critic.to_json()) + "\n")
    assert folder.scalars() == {
        "nanscope/headroom_nats": 20.0,
        "nanscope/bad_steps": 1.0,
        "nanscope/first_bad_step": 5.0,
        "nanscope/critic/loss": 2.0,
        "nanscope/critic/bad_steps": 0.0,
    }
    with (tmp_path / "history.rank0.jsonl").open("a") as file:
        file.write('nk": 0, "time": 0.0, "loss": 3.0}\n')
    assert folder.scalars() == {"nanscope/loss": 3.0, "nanscope/bad_steps": 1.0, "nanscope/first_bad_step": 5.0}


def test_a_run_of_before_is_somebody_elses(tmp_path: Path) -> None:
    """A driver begins while the last run is still what `latest` says."""
    train([], tmp_path, fault=True)
    folder = FolderStretch(tmp_path / "runs")
    assert folder.scalars() == {}
    train([], tmp_path)
    assert folder.scalars()["nanscope/bad_steps"] == 0


def test_a_folder_that_cannot_be_read_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And what was to be logged is logged."""
    (tmp_path / "history.rank0.jsonl").mkdir()
    keeps = Keeps()
    logged = nanscope.integrations.Logged(keeps, tmp_path)
    with caplog.at_level(logging.WARNING, "nanscope"):
        logged.log({"loss": 1.0}, 1)
        logged.log({"loss": 1.0}, 2)
    assert [step for _, step in keeps.lines] == [1, 2] and caplog.text.count("history-unread") == 1


def test_the_run_that_a_process_takes_part_in_needs_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `nanscope run` it stands in the environment; elsewhere the logger logs what it is given."""
    alone, keeps = Keeps(), Keeps()
    nanscope.integrations.Logged(alone).log({"loss": 1.0}, 1)
    assert alone.lines == [({"loss": 1.0}, 1)]
    monkeypatch.setenv("NANSCOPE_MEMBER", Invitation(str(tmp_path), str(tmp_path), "a").to_text())
    logged = nanscope.integrations.Logged(keeps)
    (tmp_path / "history.rank1.jsonl").write_text(json.dumps(Entry(5, 1, 0.0, kl=0.5).to_json()) + "\n")
    logged.log({"loss": 1.0}, 1)
    assert keeps.lines == [({"loss": 1.0, "nanscope/kl": 0.5, "nanscope/bad_steps": 0.0}, 1)]


def test_torchtitan(tmp_path: Path) -> None:
    """Its own container of loggers, with its TensorBoard logger, whose event file is read back."""
    metrics = pytest.importorskip("torchtitan.components.metrics", reason="torchtitan is not installed", exc_type=ImportError)
    container = metrics.LoggerContainer()
    container.add_logger(metrics.TensorBoardLogger(str(tmp_path / "events")))
    with nanscope.watch(out=tmp_path / "runs") as scope:
        logger = nanscope.integrations.Logged(container, scope)
        loop(True, lambda step, loss: logger.log({"loss_metrics/global_avg_loss": loss.item()}, step))
    logger.close()
    found = events(tmp_path / "events")
    assert [event.value for event in found.Scalars("nanscope/bad_steps")] == [0, 0, 1, 2, 3]
    assert len(found.Scalars("loss_metrics/global_avg_loss")) == STEPS


DRIVERS = [  # module of its Tracking, the words for its backends
    pytest.param("verl.utils.tracking", "default_backend", id="verl"),
    pytest.param("skyrl.train.utils.tracking", "backend", id="skyrl"),
]


@pytest.mark.parametrize(("module", "word"), DRIVERS)
def test_the_tracking_of_a_driver(module: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework's own class on its TensorBoard, as its driver calls it, with the numbers that its workers wrote."""
    tracking = pytest.importorskip(module, reason=f"{module.partition('.')[0]} is not installed", exc_type=ImportError).Tracking
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    monkeypatch.chdir(tmp_path)
    driver = nanscope.integrations.Logged(tracking("doors", "one", **{word: "tensorboard"}), "runs")
    train([], tmp_path, fault=True, after=lambda step, loss: driver.log(data={"actor/loss": loss.item()}, step=step))
    getattr(driver, "finish", lambda: None)()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out*")}
    found = events(folder)
    assert [event.step for event in found.Scalars("actor/loss")] == [*range(1, STEPS + 1)]
    assert [event.value for event in found.Scalars("nanscope/bad_steps")] == [0, 0, 1, 2, 3]


DRIVER = """
import json, sys
import ray
sys.path.insert(0, {tests!r})

@ray.remote(num_cpus=0)
class Trainer:
    def train(self):
        sys.path.insert(0, {tests!r})
        from doors import loop
        loop(True)

@ray.remote(num_cpus=0)
class TaskRunner:
    def run(self, trainer):
        sys.path.insert(0, {tests!r})
        import nanscope
        from test_integrations_logged import Keeps
        keeps = Keeps()
        logged = nanscope.integrations.Logged(keeps)
        ray.get(trainer.train.remote())
        logged.log({{"actor/loss": 1.0}}, step=1)
        return keeps.lines

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
print("told", json.dumps(ray.get(TaskRunner.remote().run.remote(Trainer.remote()))), flush=True)
"""


def test_under_ray_the_process_that_logs_finds_what_another_one_wrote(tmp_path: Path) -> None:
    """As in verl and SkyRL: `nanscope run --ray`, an actor that trains, and one that logs."""
    pytest.importorskip("ray", reason="ray is not installed")
    (tmp_path / "driver.py").write_text(DRIVER.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "nanscope", "run", "--ray", "--", sys.executable, "driver.py"]
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    told = [line.removeprefix("told ") for line in done.stdout.splitlines() if line.startswith("told ")]
    assert done.returncode == 3 and told, done.stdout + done.stderr
    ((line, step),) = json.loads(told[0])
    assert step == 1 and line["actor/loss"] == 1.0
    assert line["nanscope/Trainer/first_bad_step"] == BAD and line["nanscope/Trainer/bad_steps"] == 3
