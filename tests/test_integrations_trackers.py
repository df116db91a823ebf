"""What trackers are told of a run, and that they may fail, wait and die without the run noticing."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from doors import BAD, STEPS, loop, train

import nanscope
from nanscope.snapshot.history import Entry, read
from nanscope.snapshot.scalars import Scalars, folded
from nanscope.watching import trackers
from nanscope.watching.trackers import FAILURES, Tracking


class Told:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.alerts: list[tuple[str, str]] = []
        self.pages: list[Path] = []
        self.threads: set[threading.Thread] = set()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.lines.append((step, dict(scalars)))
        self.threads.add(threading.current_thread())

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))

    def artifact(self, path: Path) -> None:
        self.pages.append(path)


class Broken(Told):
    """Fails at everything."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        super().log(step, scalars)
        raise ConnectionError("no route\nto host")

    def alert(self, title: str, text: str) -> None:
        super().alert(title, text)
        raise RuntimeError("nobody listens")


def test_each_step_is_told_as_its_line(tmp_path: Path) -> None:
    """The numbers are those of the history, in order, and come from a thread that is not that of the training."""
    told = Told()
    _, scope = train([told], tmp_path, fault=True)
    entries = read(scope.out / "history.rank0.jsonl")
    assert [step for step, _ in told.lines] == [entry.step for entry in entries] == [*range(1, STEPS + 1)]
    numbers = Scalars()
    assert [str(line) for _, line in told.lines] == [str(numbers.of(entry)) for entry in entries]
    assert [line["nanscope/bad_steps"] for _, line in told.lines][:3] == [0, 0, 1]
    assert threading.current_thread() not in told.threads and len(told.threads) == 1


def test_a_hit_is_an_alert_and_a_page(tmp_path: Path) -> None:
    """One alert for each bad step that has a cause of its own, with the next command, and its page beside its file."""
    told = Told()
    _, scope = train([told], tmp_path, fault=True)
    ((title, text),) = told.alerts
    assert title == f"nanscope: step {BAD}"
    assert "ratio = torch.exp(log_probs - old_log_probs) overflowed to +inf" in text and "next: nanscope replay " in text
    (page,) = told.pages
    assert page == scope.paths[0].absolute().with_suffix(".html") and "overflowed to +inf" in page.read_text(encoding="utf-8")


def test_a_healthy_run_alerts_nobody(tmp_path: Path) -> None:
    """Curves, and no word."""
    told = Told()
    train([told], tmp_path)
    assert len(told.lines) == STEPS and told.alerts == told.pages == []


@pytest.mark.parametrize("fault", [False, True], ids=["healthy", "faulty"])
def test_training_is_the_same_to_the_bit(tmp_path: Path, fault: bool) -> None:
    """Weights and random numbers, with trackers that work and with one that does not."""
    bare = loop(fault)
    random = torch.get_rng_state()
    for tracker in (Told(), Broken()):
        watched, _ = train([tracker], tmp_path, fault)
        assert torch.equal(bare.view(torch.int32), watched.view(torch.int32))
        assert torch.equal(random, torch.get_rng_state())


def test_a_broken_tracker_is_told_of_once_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line at the first failure, one when it is given up, none of its fellows suffers, and the run counts as watched."""
    broken, told = Broken(), Told()
    with caplog.at_level(logging.WARNING, "nanscope"):
        _, scope = train([broken, told], tmp_path)
    lines = [record.getMessage() for record in caplog.records if "tracker" in record.getMessage()]
    assert lines == [
        "nanscope [tracker-failed]: Broken: ConnectionError: no route; training goes on",
        "nanscope [tracker-failed]: Broken: ConnectionError: no route; it gets no more of this run",
    ]
    assert len(broken.lines) == FAILURES == STEPS and len(told.lines) == STEPS
    assert scope.verdict.healthy


def test_one_that_was_given_up_is_not_called_again(tmp_path: Path) -> None:
    """Not even for an alert."""
    broken = Broken()
    tracking = Tracking([broken])
    for step in range(FAILURES + 3):
        tracking.line(Entry(step, 0, 0.0))
    tracking.end()
    assert len(broken.lines) == FAILURES


class Slow(Told):
    """Waits at its first step until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.waits = threading.Event(), threading.Event()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.waits.set()
        self.go.wait()
        super().log(step, scalars)


def test_training_does_not_wait(tmp_path: Path) -> None:
    """All steps are made while the tracker stands at the first; at the end it gets the rest."""
    slow = Slow()
    made: list[int] = []

    def after(step: int, _: torch.Tensor) -> None:
        made.append(step)
        if step == 1:
            assert slow.waits.wait(60)
        if step == STEPS:
            assert slow.lines == []
            slow.go.set()

    train([slow], tmp_path, after=after)
    assert len(made) == len(slow.lines) == STEPS


def test_a_tracker_that_never_answers_does_not_hold_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After some patience the log says that its part is missing, and the run ends."""
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    slow = Slow()
    with caplog.at_level(logging.WARNING, "nanscope"):
        _, scope = train([slow], tmp_path)
    slow.go.set()
    assert "nanscope [trackers-late]" in caplog.text and scope.verdict.healthy and len(read(scope.out / "history.rank0.jsonl")) == STEPS


def test_a_queue_that_ran_over_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The oldest lines go, the newest arrive, and the log says so."""
    monkeypatch.setattr(trackers, "WAITING", 3)
    slow = Slow()
    tracking = Tracking([slow])
    tracking.line(Entry(1, 0, 0.0))
    assert slow.waits.wait(60)
    for step in range(2, 8):
        tracking.line(Entry(step, 0, 0.0))
    slow.go.set()
    with caplog.at_level(logging.WARNING, "nanscope"):
        tracking.end()
    assert [step for step, _ in slow.lines] == [1, 5, 6, 7] and "nanscope [trackers-late]" in caplog.text


def test_a_forked_process_tells_nobody(tmp_path: Path) -> None:
    """The connections are its parent's."""
    told = Told()

    def after(step: int, _: torch.Tensor) -> None:
        if step == 2:
            child = os.fork()
            if child == 0:
                os._exit(0 if loop(False) is not None else 1)
            assert os.waitpid(child, 0)[1] == 0

    train([told], tmp_path, after=after)
    assert [step for step, _ in told.lines] == [*range(1, STEPS + 1)]


def test_an_exception_passes_and_what_was_seen_is_told(tmp_path: Path) -> None:
    """The steps before it have reached the tracker when it arrives."""
    told = Told()

    def after(step: int, _: torch.Tensor) -> None:
        if step == 2:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        train([told], tmp_path, after=after)
    assert [step for step, _ in told.lines] == [1, 2]


UNDER_RUN = """
import sys
sys.path.insert(0, {tests!r})
import time
from pathlib import Path
from doors import train
from test_integrations_trackers import Told

told = Told()
def after(step, loss):
    if step == 4:
        while not told.pages:  # as long as it takes: there is time to look for processes that nobody watches
            time.sleep(0.1)
train([told], Path("."), fault=True, after=after)
"""


def test_under_nanscope_run_the_process_that_makes_a_page_is_no_stray(tmp_path: Path) -> None:
    """It loads torch and takes no part in the run, and that is no gap."""
    (tmp_path / "train.py").write_text(UNDER_RUN.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "nanscope", "run", "--json", "verdict.json", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    told = json.loads((tmp_path / "verdict.json").read_text())
    assert done.returncode == 3 and told["gaps"] == [] and "child-processes" not in done.stderr, done.stderr


def test_what_on_incident_asked_for_comes_as_before(tmp_path: Path) -> None:
    """A tracker takes nothing away from a function of one's own."""
    seen: list[int] = []
    with nanscope.watch(out=tmp_path / "runs", trackers=[Told()], on_incident=lambda incident: seen.append(incident.step)):
        loop(True)
    assert seen == [BAD]


def test_names_tell_processes_and_optimizers_apart() -> None:
    """Rank 0 has the plain names; of a second optimizer, and of another rank, the curves are its own."""
    numbers = Scalars()
    assert list(numbers.of(Entry(1, 0, 0.0, loss=1.0))) == ["nanscope/loss", "nanscope/bad_steps"]
    assert "nanscope/rank3.actor/loss" in numbers.of(Entry(1, 3, 0.0, loss=1.0, worker="actor"))
    assert "nanscope/AdamW of Critic/loss" in numbers.of(Entry(1, 0, 0.0, loss=1.0, optimizer="AdamW of Critic"))


NAN = float("nan")
FOLDS = [  # name, values, what they come to
    ("headroom_nats", [3.0, -1.0, 2.0], -1.0),
    ("log_ratio_max", [3.0, -1.0, 2.0], 3.0),
    ("log_ratio_min", [3.0, -1.0, 2.0], -1.0),
    ("kl", [1.0, 2.0, 3.0], 2.0),
    ("bad_steps", [1.0, 2.0, 2.0], 2.0),
    ("headroom_nats", [3.0, NAN, 2.0], NAN),
    ("grad_norm", [NAN, 1.0], NAN),
    ("loss", [float("inf"), 1.0], float("inf")),
]


@pytest.mark.parametrize(("name", "values", "comes_to"), FOLDS)
def test_several_steps_come_to_the_worst_of_them(name: str, values: list[float], comes_to: float) -> None:
    """Of headroom the least, of extremes the extreme, of distances the mean; NaN is not lost."""
    (found,) = folded([{f"nanscope/{name}": value} for value in values]).values()
    assert str(found) == str(comes_to)
