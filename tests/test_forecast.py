"""Said before it happens: once for each origin, with what would come of it, and never where nothing would."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import new
import ppo
import pytest
import torch
from recorded import record
from torch import Tensor, nn

from nanscope import demo, load, watch
from nanscope.replay.driven import driven
from nanscope.snapshot.history import read
from nanscope.verdict.forecast import Forecast, foresee, harm_of
from nanscope.verdict.run import verdict_of
from nanscope.watching.scope import Scope

HEALTHY = sorted((Path(__file__).parent / "healthy").glob("*.py"))

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def mask_after(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    log_ratio = logps - old
    ratio = torch.exp(log_ratio)
    return -(ratio * mask).sum() / mask.sum()


def where_after(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    log_ratio = logps - old
    ratio = torch.exp(log_ratio)
    return -torch.where(mask.bool(), ratio, 0.0).sum() / mask.sum()


def mask_before(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    log_ratio = torch.where(mask.bool(), logps - old, 0.0)
    return -torch.exp(log_ratio).sum() / mask.sum()


def detached(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    weight = torch.exp(logps.detach() - old).clamp(max=5.0)
    return -(weight * logps * mask).sum() / mask.sum()


def run(loss: Loss, folder: Path, steps: int, pace: float, halves: int = 1, **how: object) -> Scope:
    """Train: the log-ratio of the last token of row 1, which the mask excludes, grows by `pace` nats a step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, mask = torch.randn(2, 3, 4), torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    with watch(out=folder, **how) as scope:  # type: ignore[arg-type]
        for step in range(steps):
            for _ in range(halves):
                logps = model(x).squeeze(-1)
                old = logps.detach() - 0.1
                old[1, 2] -= pace * step
                (loss(logps, old, mask) / halves).backward()
            optimizer.step()
            optimizer.zero_grad()
    return scope


HARMS = {
    mask_after: ("the loss would be NaN", "mask_before_op"),
    where_after: ("the loss would stay finite and the gradient be NaN", "mask_before_op"),
}


@pytest.mark.parametrize("loss", HARMS, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("halves", [1, 3])
def test_a_masked_exponent_on_its_way_is_said_once(loss: Loss, halves: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What runs where, in how many steps, what would come of it and the fix that was executed: on the log, to a callable, in the verdict."""
    told: list[Forecast] = []
    with caplog.at_level(logging.WARNING, "nanscope"):
        scope = run(loss, tmp_path, 40, 2.0, halves, on_warning=told.append)
    (forecast,) = told
    assert scope.warnings == told and scope.verdict.healthy
    assert (forecast.runaway.name, forecast.runaway.masked, forecast.runaway.file) == ("log_ratio", True, __file__)
    assert forecast.approach.slope == pytest.approx(2.0, rel=0.01)
    assert forecast.step + forecast.approach.steps == pytest.approx(88.7 / 2 + 1, abs=1.0)
    words, fix = HARMS[loss]
    assert forecast.harm.startswith(words) and forecast.fix is not None and forecast.fix.id == fix and forecast.fix.proven
    lines = [message for message in caplog.messages if "[forecast]" in message]
    assert len(lines) == 1 and forecast.sentence in lines[0]
    assert "log_ratio at masked tokens gains 2 nats a step: at this pace exp overflows in about" in lines[0]
    (note,) = [note for note in scope.verdict.notes if note.slug == "said_before"]
    assert forecast.sentence in note.text and note.step == forecast.step
    (marked,) = [entry for entry in read(scope.out / "history.rank0.jsonl") if entry.forecast]
    assert (marked.step, marked.forecast) == (forecast.step, forecast.short)
    assert [note.text for note in verdict_of(scope.out).notes] == [note.text]


def test_the_step_that_shows_it_is_saved_and_healthy(tmp_path: Path) -> None:
    """It reproduces as recorded; driven over the limit it fails as was said."""
    (forecast,) = run(mask_after, tmp_path, 40, 2.0).warnings
    assert forecast.snapshot is not None
    snapshot = load(forecast.snapshot)
    found = snapshot.program.execute(snapshot.tensors)
    assert bool(torch.isfinite(found.values[snapshot.program.output])) and snapshot.step == forecast.step
    assert ("said_before", forecast.sentence) in snapshot.notes


@pytest.mark.parametrize("loss", [mask_before, detached], ids=lambda loss: loss.__name__)
def test_what_would_do_no_harm_is_not_warned_of(loss: Loss, tmp_path: Path) -> None:
    """An exponent that grows as fast, and whose overflow reaches neither the loss nor a gradient."""
    scope = run(loss, tmp_path, 60, 2.0)
    assert scope.warnings == [] and scope.verdict.healthy


def test_a_run_that_died_says_that_it_was_told(tmp_path: Path) -> None:
    """The verdict has the incident, and beside it what was said before."""
    scope = run(mask_after, tmp_path, 50, 2.0, limit=1)
    (incident,) = scope.verdict.causes[:1]
    assert incident.step - scope.warnings[0].step >= 15 and [note.slug for note in scope.verdict.notes][:1] == ["said_before"]


def test_the_demo_is_warned_of_in_time(tmp_path: Path) -> None:
    """A real run that dies by itself: fifteen steps before, with the line, the harm and the fix that its death is then told with."""
    with watch(out=tmp_path) as scope:
        for _ in demo.train(demo.DemoSettings()):
            if scope.snapshots:
                break
    (forecast,) = scope.warnings
    (incident,) = scope.verdict.incidents
    assert incident.step - forecast.step >= 15
    assert (forecast.runaway.name, forecast.runaway.line, forecast.runaway.masked) == ("ref_log_ratio", incident.origin.line, True)
    assert forecast.incident is not None and forecast.incident.cause == incident.cause
    assert forecast.fix is not None and incident.fixes[0].id == forecast.fix.id


def test_weights_are_those_of_the_run_that_nobody_watched(tmp_path: Path) -> None:
    """Warning changes nothing: the trained weights are the same to the last bit."""

    def trained() -> Iterator[Tensor]:
        torch.manual_seed(1)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        x, mask = torch.randn(2, 3, 4), torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
        for step in range(30):
            logps = nn.functional.dropout(model(x).squeeze(-1), 0.1)
            old = logps.detach() - torch.rand(2, 3)
            old[1, 2] -= 2.0 * step
            mask_after(logps, old, mask).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        yield from (parameter.detach().clone() for parameter in model.parameters())

    bare = list(trained())
    with watch(out=tmp_path) as scope:
        watched = list(trained())
    assert scope.warnings and all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))


def test_what_is_given_as_on_warning_may_raise(tmp_path: Path) -> None:
    """Training goes on, and the failure is noted."""

    def fails(forecast: Forecast) -> None:
        raise ValueError("no")

    scope = run(mask_after, tmp_path, 30, 2.0, on_warning=fails)
    assert scope.steps == 30 and len(scope.warnings) == 1
    assert [gap.slug for gap in scope.verdict.gaps] == ["on-warning-failed"]


def test_a_gradient_norm_that_doubles_is_said(tmp_path: Path) -> None:
    """Loss and gradient norm have an edge as well: the end of float32, in bits."""
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-30)
    with watch(out=tmp_path, deep_every=0) as scope:
        for step in range(28):
            (weight * 4.0**step).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    names = {forecast.runaway.name: forecast for forecast in scope.warnings}
    assert set(names) == {"the gradient norm"}, "the loss has twice as far to go"
    assert names["the gradient norm"].approach.slope == pytest.approx(2.0)
    assert "its square overflows float32 in about" in names["the gradient norm"].sentence


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_element_is_driven_over_the_edge_of_its_dtype(dtype: torch.dtype) -> None:
    """All that reads the value finds that element larger; nothing else differs, and the gradient passes."""
    logps = torch.full((2, 3), -1.0, dtype=dtype, requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=dtype)
    recorded = record(mask_after, logps, torch.full((2, 3), -1.5, dtype=dtype), mask)
    call = next(call for call in recorded.program.calls if call.name == "exp")
    value = next(call.inputs())
    limit = math.log(torch.finfo(dtype).max)
    program, tensors = driven(recorded.program, recorded.tensors, value, recorded.run.values[value], 5, limit + 1)
    found = program.execute(tensors)
    exponent = found.values[next(next(c for c in program.calls if c.name == "exp").inputs())]
    assert math.isinf(float(exponent[1, 2].exp())) and bool((exponent.flatten()[:5] == 0.5).all())
    incident = foresee(recorded.snapshot(), value, recorded.run.values[value], 5, limit)
    assert incident is not None and incident.origin.index == (1, 2) and harm_of(incident).startswith("the loss would be NaN")


def test_a_healthy_ppo_run_is_not_warned_of(tmp_path: Path) -> None:
    """It learns for 40 updates; `tests/benchmarks/forecast.py` has 2,000 of it, and 500 steps of TRL."""
    with watch(out=tmp_path) as scope:
        lengths = [length for _, length in ppo.train(40)]
    assert scope.verdict.healthy and scope.steps == 40 and not scope.warnings
    last = scope.history.entries[-1]
    assert lengths[-1] > lengths[0] and last.kl_old is not None and 0 < (last.entropy or 0) < math.log(2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", HEALTHY[:: max(1, len(HEALTHY) // 12)], ids=lambda path: path.stem)
def test_a_healthy_script_is_not_warned_of(path: Path, tmp_path: Path) -> None:
    """A few of those that look frightening and are not; `tests/benchmarks/forecast.py` runs all of them."""
    verdict = new.watched(new.load(path), tmp_path)
    assert not [note.text for note in verdict.notes if note.slug == "said_before"]
