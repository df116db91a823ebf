"""A loss that is multiplied against underflow: what a scaler skips is told as that, and figures are without the scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.watching.recording import Recording

SCALED = "skipped by the scaler"


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 12))


def train(scale: float, steps: int = 6, micro: int = 1, clip: bool = False, **options: Any) -> list[tuple[float, bool]]:
    """fp16 autocast under a GradScaler. Returns the loss of each step as it is without the scale, and whether the step was taken."""
    model = half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(micro):
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(torch.randn(6, 8))
            loss = nn.functional.cross_entropy(logits.float(), torch.arange(6)) / micro
            total += loss.item()
            scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        found.append((total, scaler.get_scale() >= before))
    return found


@pytest.fixture(params=["at once", "late"])
def looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are read when backward has ended, or, as on a GPU, not before somebody has to know."""
    if request.param == "late":
        monkeypatch.setattr(Recording, "waits", True)


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_what_a_scaler_skips_is_told_as_that(tmp_path: Path, micro: int, fused: bool) -> None:
    """A line of its own for each window, with the loss as the loop knows it; it is healthy. A fused optimizer is called and does nothing."""
    with nanscope.watch(out=tmp_path) as scope:
        found = train(2.0**20, micro=micro, fused=fused)
    entries = scope.history.entries
    assert {taken for _, taken in found} == {False, True}
    assert [entry.step for entry in entries] == list(range(1, 7)) and scope.verdict.healthy
    assert [entry.stepped for entry in entries] == [None if taken else SCALED for _, taken in found]
    assert [entry.loss for entry in entries] == pytest.approx([loss for loss, _ in found], rel=1e-3)
    assert all(entry.grad_norm is not None and entry.grad_norm < 50 for entry in entries if entry.stepped is None)
    assert [entry.micro_batches for entry in entries] == [None if micro == 1 else micro] * 6 and scope.notes == []


def test_a_scaler_whose_last_step_is_skipped(tmp_path: Path) -> None:
    """The block ends before another backward pass, with the gradients still there."""
    with nanscope.watch(out=tmp_path) as scope:
        train(2.0**40, steps=3)
    assert [entry.stepped for entry in scope.history.entries] == [SCALED] * 3 and scope.verdict.healthy


def test_the_norm_under_a_scaler_is_that_before_the_clip(tmp_path: Path) -> None:
    """Without the scale; what reached the optimizer stands beside it."""
    with nanscope.watch(out=tmp_path) as scope:
        train(2.0**10, steps=3, clip=True)
    for entry in scope.history.entries:
        assert entry.grad_norm is not None and 0.1 < entry.grad_norm < 50
        assert entry.grad_norm_clipped == pytest.approx(0.01, rel=1e-3)


class Root(nn.Module):
    """A backward that is NaN at any scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt((self.layer(x) * 0.0).abs()).sum()


def test_a_scaler_that_finds_no_scale_is_no_healthy_run(tmp_path: Path) -> None:
    """It halves for ever: that is said. Its scale is too low to make anything overflow, so the gradients are looked at."""
    model = Root()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(8):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [note.slug for note in scope.notes] == ["scaler_stuck"] and "4 steps in a row" in scope.notes[0].text
    incident = scope.verdict.incidents[0]
    assert (incident.step, incident.phase, incident.origin.op) == (1, "backward", "sqrt")
    assert {entry.stepped for entry in scope.history.entries} == {SCALED} and len(scope.history.entries) == 8


def test_a_loss_that_is_scaled_by_hand_is_shown_as_it_was(tmp_path: Path) -> None:
    """The constant is on the tape."""
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(2):
            optimizer.zero_grad()
            (weight.sum() * 3.0 * 65536.0).backward()
            assert weight.grad is not None
            with torch.no_grad():
                weight.grad.div_(65536.0)
            optimizer.step()
    assert [(entry.loss, entry.grad_norm) for entry in scope.history.entries] == [(6.0, 3.0)] * 2


@pytest.mark.usefixtures("looked_at")
def test_a_nan_loss_under_a_scaler_is_an_incident_and_a_skipped_step(tmp_path: Path) -> None:
    """NaN is no matter of scale, and the scaler has kept it from the weights."""
    model = half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 4):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(6, 8) * (math.nan if step == 2 else 1.0)).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    (incident,) = scope.verdict.incidents
    assert incident.step == 2 and incident.headline.endswith("optimizer step skipped by the scaler")
    assert [(entry.stepped, entry.nonfinite) for entry in scope.history.entries] == [(None, False), (SCALED, True), (None, False)]


class Encoder(nn.Module):
    """A convolution under autocast, and a norm that remembers its statistics."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 4, 5), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        nn.init.constant_(self.conv.weight, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean(-1))  # type: ignore[no-any-return]


def encode(out: Path, norm: bool, restores: bool, last: bool = False, size: float = 2.0**15, bad: int = 2, **given: Any) -> nanscope.Scope:
    """Three steps under a scaler, of which one meets numbers that its convolution makes too large. restores: buffers are put back.
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
                logits = model(torch.rand(4, 1, 12) * (size if step == bad else 1.0))
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
    assert "self.conv(x) overflowed to +inf at [" in note.text and "test_scale.py:" in note.text
    assert note.text.startswith("step 2: ") and note.text.endswith("; the scaler skipped the step, and all weights and buffers are finite")
    assert scope.history.entries[1].stepped == SCALED


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bad", [1, 2])
def test_an_overflow_that_a_buffer_keeps_is_an_incident(tmp_path: Path, last: bool, bad: int) -> None:
    """The weights were spared, the statistics were not: the operation of that step is the origin."""
    first = encode(tmp_path, True, False, last, bad=bad).verdict.incidents[0]
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


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "negative infinite": lambda loss: torch.log(loss * 0),
    "infinite": lambda loss: loss * math.inf,
    "nan": lambda loss: torch.log(loss * 0) * 0,
    "gradient": lambda loss: loss + torch.sqrt(loss - loss),
}


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_bad_without_the_scale_is_no_overflow_of_it(tmp_path: Path, fault: str, by_hand: bool) -> None:
    """An infinite loss times any scale is infinite: the scaler skips the step, and it is an incident."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(1, 7):
            loss = model(torch.randn(6, 4)).pow(2).mean()
            if step == 3:
                loss = FAULTS[fault](loss)
            optimizer.zero_grad()
            if by_hand:
                (loss * 1024.0).backward()
                assert model.weight.grad is not None
                if model.weight.grad.isfinite().all():
                    model.weight.grad.div_(1024.0)
                    optimizer.step()
                model.zero_grad()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    assert [incident.step for incident in scope.verdict.incidents] == [3]
    assert [entry.nonfinite for entry in scope.history.entries] == [False, False, True, False, False, False]


@pytest.mark.usefixtures("looked_at")
def test_a_loss_that_overflows_by_the_scale_only_is_healthy(tmp_path: Path) -> None:
    """Without it loss and gradient are finite."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    with nanscope.watch(out=tmp_path) as scope:
        for size in (1e30, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(6, 4)).pow(2).mean() * size).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scope.verdict.healthy and [entry.stepped for entry in scope.history.entries] == [SCALED, None]


class RootAt(Root):
    """As `Root`, in one step of several."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        return self.layer(x).sum() if self.left else super().forward(x)


@pytest.mark.usefixtures("looked_at")
def test_a_skip_at_a_scale_that_makes_nothing_overflow_is_not_healthy(tmp_path: Path) -> None:
    """The gradient went bad inside the model: an incident where it can be looked at in time, else a gap."""
    model = RootAt(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(2, 4))).backward()
            scaler.step(optimizer)
            scaler.update()
    verdict = scope.verdict
    assert [incident.step for incident in verdict.incidents] == [3] or [gap.slug for gap in verdict.gaps] == ["skipped-by-scaler"]
    assert not verdict.healthy and scope.history.entries[2].stepped == SCALED
