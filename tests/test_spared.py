"""What a loss scaler spares the weights is a note; what stays bad all the same is an incident."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.watching import spared
from nanscope.watching.recording import Recording

SCALED = "skipped by the scaler"


@pytest.fixture(params=["at once", "late"])
def looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are read when backward has ended, or, as on a GPU, not before somebody has to know."""
    if request.param == "late":
        monkeypatch.setattr(Recording, "waits", True)


class Encoder(nn.Module):
    """A convolution under autocast, and a norm that remembers its statistics."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 4, 5), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        nn.init.constant_(self.conv.weight, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean(-1))  # type: ignore[no-any-return]


def encode(
    out: Path, norm: bool, restores: bool, last: bool = False, size: float = 2.0**15, bad: tuple[int, ...] = (2,), **given: Any
) -> nanscope.Scope:
    """Three steps under a scaler, of which some meet numbers that the convolution makes too large. restores: buffers are put back.
    last: it is the last step."""
    torch.manual_seed(0)
    model = Encoder(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with nanscope.watch(out=out, **given) as scope:
        for step in range(1, 3 if last else 4):
            kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(torch.rand(4, 1, 12) * (size if step in bad else 1.0))
            scaler.scale(logits.float().square().mean()).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if restores and scaler.get_scale() < scale:
                for name, buffer in model.named_buffers():
                    buffer.copy_(kept[name])
    return scope


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_an_overflow_of_half_precision_that_a_scaler_skips_is_a_note(tmp_path: Path, norm: bool, last: bool) -> None:
    """Nothing is left of it: the run is healthy, and whoever asks why a step was skipped finds the operation and its line."""
    scope = encode(tmp_path, norm, True, last)
    (note,) = scope.notes
    assert scope.verdict.healthy and not scope.snapshots and note.slug == "overflow_skipped"
    assert "self.conv(x) overflowed to +inf at [" in note.text and "test_spared.py:" in note.text
    assert note.text.startswith("step 2: ") and note.text.endswith("; the scaler skipped the step, and all weights and buffers are finite")
    assert scope.history.entries[1].stepped == SCALED


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bad", [1, 2])
def test_an_overflow_that_a_buffer_keeps_is_an_incident(tmp_path: Path, last: bool, bad: int) -> None:
    """The weights were spared, the statistics were not: the operation of that step is the origin."""
    first = encode(tmp_path, True, False, last, bad=(bad,)).verdict.incidents[0]
    assert (first.step, first.phase, first.cause, first.origin.op) == (bad, "forward", "fp16_overflow", "convolution")
    assert first.headline.endswith("optimizer step skipped by the scaler")


@pytest.mark.usefixtures("looked_at")
def test_data_that_is_not_finite_is_an_incident_whoever_skips_the_step(tmp_path: Path) -> None:
    """No precision would hold it."""
    scope = encode(tmp_path, False, True, size=math.inf)
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.origin.variable) == (2, "x") and not scope.notes


def test_who_wants_to_stop_is_stopped_at_an_overflow_that_a_scaler_would_skip(tmp_path: Path) -> None:
    """That was asked for."""
    with pytest.raises(nanscope.NonFiniteError, match="overflowed"):
        encode(tmp_path, False, True, on_nonfinite="stop")


def test_of_many_such_steps_nobody_looks_at_the_last_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look costs more than a step: what is not looked at is a gap, and no healthy run."""
    monkeypatch.setattr(spared, "LOOKED_AT", 1)
    scope = encode(tmp_path, False, True, bad=(1, 2))
    assert [note.slug for note in scope.notes] == ["overflow_skipped"] and not scope.snapshots
    assert [gap.slug for gap in scope.verdict.gaps] == ["skipped-by-scaler"] and scope.verdict.status == "partly watched"


@pytest.mark.usefixtures("looked_at")
def test_an_overflow_in_step_after_step_is_an_incident(tmp_path: Path) -> None:
    """No scale is too high for the forward pass: the third in a row is none of what a scaler is for."""
    torch.manual_seed(0)
    model = Encoder(False)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with nanscope.watch(model, out=tmp_path) as scope:
        for step in range(1, 7):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(torch.rand(4, 1, 12) * (2.0**15 if step != 3 else 1.0))
            scaler.scale(logits.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.cause, incident.origin.op) == (6, "fp16_overflow", "convolution")
    assert [note.step for note in scope.notes] == [1, 2, 4, 5]


def test_a_run_of_which_a_scaler_has_skipped_every_step_says_so(tmp_path: Path) -> None:
    """Its scale is too large for so few steps; nothing is bad, and nothing was trained."""
    model = nn.Linear(4, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with nanscope.watch(model, out=tmp_path) as scope:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((3, 4), 1e9)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [note.slug for note in scope.verdict.notes] == ["nothing_trained"] and scope.verdict.healthy
    assert scope.verdict.sentence.endswith("the loss scaler skipped all 3 steps: nothing was trained")
