"""accelerate itself: what the trackers behind ours get of the values that a loop logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import left_installed
from doors import STEPS, loop

import nanscope

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.fixture
def fresh() -> Iterator[None]:
    """accelerate keeps its state for as long as the process lives."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_the_trackers_behind_it_get_the_numbers(tmp_path: Path, fresh: None) -> None:
    """TensorBoard's event file of a loop that logs through accelerate, read back."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ours = nanscope.integrations.AccelerateTracker(out=tmp_path / "runs")
    accelerator = accelerate.Accelerator(cpu=True, log_with=[ours, "tensorboard"], project_dir=str(tmp_path))
    accelerator.init_trackers("doors")

    def after(step: int, loss: torch.Tensor) -> None:
        accelerator.log({"loss": loss.item()}, step=step)

    watched = loop(True, after)
    accelerator.end_training()
    assert left_installed() == [] and ours.scope.verdict.incidents[0].step == 3
    events = EventAccumulator(str(tmp_path / "doors"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("nanscope/bad_steps")] == [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3)]
    assert len(events.Scalars("loss")) == STEPS
    assert torch.equal(watched.view(torch.int32), loop(True).view(torch.int32))


def test_one_that_trains_again_begins_anew(tmp_path: Path, fresh: None) -> None:
    """A run that was left is closed by the next."""
    ours: Any = nanscope.integrations.AccelerateTracker(out=tmp_path / "runs")
    ours.start()
    first = ours.tracker
    ours.start()
    loop(False)
    ours.finish()
    assert left_installed() == [] and first.steps == 0 and ours.tracker.steps == STEPS
