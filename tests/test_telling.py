"""What is said on the log while a run goes on."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loops import grpo_steps, policy, stale_at
from seen import NAN, seen
from torch import Tensor

import nanscope
from nanscope.program.program import Program
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.incident import Incident
from nanscope.watching.telling import Teller


def at(step: int, line: int = 12, **changes: Any) -> Snapshot:
    """A bad step whose origin is in this line."""
    blank = Snapshot(step, 0, Program((), (), -1), {}, None, {}, Reached(NAN, 3, 3))
    return replace(blank, found=seen("exp", NAN, 99.0, line=line), **changes)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines since it was last asked."""
    caplog.set_level(logging.WARNING, "nanscope")

    def lines() -> list[str]:
        found = [record.message.removeprefix("nanscope [bad-step]: ") for record in caplog.records]
        caplog.clear()
        return found

    return lines


def test_a_line_says_what_where_and_what_next(said: Callable[[], list[str]]) -> None:
    """Step, value, line of code, file, command; the rank where there are several."""
    Teller("runs/a", "rank 3").found(at(412), "runs/a/step.safetensors")
    (line,) = said()
    assert line.startswith("step 412 on rank 3: exp gave NaN at [0, 1] of [2, 3], loss.py:12: exp(99) = NaN")
    assert line.endswith("; next: nanscope replay runs/a/step.safetensors")
    Teller().found(at(3), None)
    assert said() == ["step 3: exp gave NaN at [0, 1] of [2, 3], loss.py:12: exp(99) = NaN; it is not on disk, only in memory"]


def test_an_origin_is_told_once_and_then_counted(said: Callable[[], list[str]]) -> None:
    """At the 1st, the 10th and the 100th more, and what is left when the run ends; another line of code is another origin."""
    teller = Teller("runs/a")
    for step in range(1, 121):
        teller.found(at(step), None)
    teller.found(at(121, line=13), None)
    lines = said()
    assert [re.sub(" bad step.*", "", line) for line in lines[1:-1]] == ["so far 1 more", "so far 10 more", "so far 100 more"]
    assert lines[2] == "so far 10 more bad steps like that at loss.py:12; nanscope report runs/a" and lines[-1].startswith("step 121: ")
    teller.end()
    assert said() == ["so far 119 more bad steps like that at loss.py:12; nanscope report runs/a"]
    teller.end()
    assert said() == []


def test_consequences_are_one_line(said: Callable[[], list[str]]) -> None:
    """Which step they come from."""
    Teller().found(at(51, consequence_of=50), None)
    assert said() == ["step 51: the weights are non-finite since step 50; what follows from it is counted"]


def test_a_run_says_it_at_the_hit(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    """While the step is still running, with a file that is already there; later the consequences, and nothing at the end."""
    lines: list[list[str]] = []

    def spoil(step: int, batch: dict[str, Tensor]) -> None:
        stale_at(0, 3)(step, batch)
        lines.append(said())

    with nanscope.watch(out=tmp_path):
        grpo_steps(policy(), 8, spoil)
    assert [len(found) for found in lines] == [0, 0, 0, 1, 1, 0, 0, 0] and said() == []
    (line,) = lines[3]
    assert line.startswith("step 3: ratio = torch.exp(log_ratio) overflowed to +inf at row 0, token 3 ([0, 3] of [4, 6])")
    assert Path(line.rpartition(" ")[2]).is_file()


def test_a_healthy_run_says_nothing(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    """Not a word."""
    with nanscope.watch(out=tmp_path):
        grpo_steps(policy(), 3)
    assert said() == []


def test_bad_steps_that_are_not_saved_are_counted(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    """Beyond the limit nobody looks where they come from."""
    with nanscope.watch(out=tmp_path, on_nonfinite="skip", limit=1) as scope:
        grpo_steps(policy(), 6, lambda step, batch: stale_at(0, 3, step)(step, batch))
    assert [line.split(";")[0] for line in said()][1:] == ["so far 1 more bad step not saved", "so far 5 more bad steps not saved"]
    assert scope.bad_steps == 6


def test_who_asked_is_called_when_the_file_is_there(tmp_path: Path) -> None:
    """With the incident, explained, of each step that has a cause of its own."""
    told: list[tuple[int, str, bool]] = []

    def on_incident(incident: Incident) -> None:
        told.append((incident.step, str(incident.cause), Path(str(incident.snapshot)).is_file()))

    with nanscope.watch(out=tmp_path, on_incident=on_incident):
        grpo_steps(policy(), 6, stale_at(0, 3))
    assert told == [(3, "where_grad_trap", True)]


def test_what_a_callback_raises_does_not_reach_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is a warning, and the step is kept; an error that is meant to stop the run does."""

    def broken(incident: Incident) -> None:
        raise KeyError("mine")

    with caplog.at_level(logging.WARNING, "nanscope"), nanscope.watch(out=tmp_path, on_incident=broken) as scope:
        assert len(grpo_steps(policy(), 4, stale_at(0, 3))) == 4
    assert "on-incident-failed" in caplog.text and [i.step for i in scope.verdict.incidents] == [3, 4]

    def stop(incident: Incident) -> None:
        raise nanscope.NonFiniteError("enough", verdict=scope.verdict, snapshot=incident.snapshot)

    with pytest.raises(nanscope.NonFiniteError, match="enough"), nanscope.watch(out=tmp_path, on_incident=stop):
        grpo_steps(policy(), 4, stale_at(0, 3))


def test_it_shows_where_no_logging_is_set_up(tmp_path: Path) -> None:
    """On the standard error of a plain script."""
    code = f"import torch, nanscope\nwith nanscope.watch(out={str(tmp_path)!r}):\n    torch.log(torch.zeros(2, requires_grad=True)).sum().backward()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr.startswith("nanscope [bad-step]: step 1: ") and len(done.stderr.splitlines()) == 1
