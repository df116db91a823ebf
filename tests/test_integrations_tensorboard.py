"""TensorBoard itself: the event file, read back with its own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doors import BAD, STEPS, train

import nanscope
from nanscope.snapshot.history import read

pytest.importorskip("tensorboard", reason="tensorboard is not installed")


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_the_event_file_has_every_step_and_the_hit(tmp_path: Path) -> None:
    """Scalars as in the history, the sentence as text, and where the page is."""
    _, scope = train([nanscope.integrations.TensorBoard(tmp_path / "events")], tmp_path, fault=True)
    found = events(tmp_path / "events")
    entries = read(scope.out / "history.rank0.jsonl")
    for name, key in (("headroom_nats", "headroom"), ("grad_norm", "grad_norm"), ("log_ratio_max_masked", "log_ratio_max_masked")):
        values = [(event.step, event.value) for event in found.Scalars(f"nanscope/{name}")]
        known = [(entry.step, getattr(entry, key)) for entry in entries if getattr(entry, key) is not None]
        assert [step for step, _ in values] == [step for step, _ in known]
        assert [value for _, value in values] == pytest.approx([value for _, value in known], rel=1e-6, nan_ok=True)
    assert len(found.Scalars("nanscope/loss")) == STEPS
    (text,) = found.Tensors(f"nanscope/step {BAD}/text_summary")
    assert b"overflowed to +inf" in text.tensor_proto.string_val[0]
    (page,) = found.Tensors("nanscope/page/text_summary")
    assert Path(page.tensor_proto.string_val[0].decode()).exists()


def test_a_writer_of_ones_own(tmp_path: Path) -> None:
    """Ours stand beside what the loop writes, and the writer stays open."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "events")) as writer:
        train([nanscope.integrations.TensorBoard(writer)], tmp_path)
        writer.add_scalar("mine", 1.0, 1)
    assert {"mine", "nanscope/headroom_nats"} <= set(events(tmp_path / "events").Tags()["scalars"])
