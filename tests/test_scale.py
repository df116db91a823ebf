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
