"""Whatever of ours fails on the trainer's path, and whenever: training ends as it would have without us, and nothing stays behind.

Each function that a watched run calls is made to raise, at its first call or at every one.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope
import nanscope.text
from nanscope.watching.acting import OnNonFinite
from tests.conftest import NIGHTLY, left_installed
from tests.failpoints import Planted, Point, called, is_plain, planted
from tests.loops import clipped_loss, grpo_steps, log_probs, policy, stale_at

# -- what is trained -------------------------------------------------------------------------------------------------------


def healthy(model: nn.Module) -> None:
    grpo_steps(model, 3)


def bad_loss(model: nn.Module) -> None:
    grpo_steps(model, 3, stale_at(0, 3, step=1))


def bad_model(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        hidden = model[0](torch.randint(0, 20, (2, 4)))
        if step == 1:
            with torch.no_grad():
                model[1].weight[0, 0] = 3e38
        model[1](hidden * (20 if step == 1 else 1)).square().mean().backward()
        optimizer.step()


def bad_update(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = math.inf if step == 1 else 0.1
        optimizer.zero_grad()
        model(torch.randint(0, 20, (2, 4))).log_softmax(-1).exp().square().mean().backward()
        optimizer.step()


def closure(model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    ids = torch.randint(0, 20, (2, 4))

    def again() -> Tensor:
        optimizer.zero_grad()
        loss = model(ids).log_softmax(-1).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(again)  # type: ignore[no-untyped-call]


def scaler(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.randint(0, 20, (2, 4))).log_softmax(-1).square().mean() * (math.inf if step == 1 else 1)
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()


def raises_in_model(model: nn.Module) -> None:
    def fail(module: nn.Module, args: object, output: object) -> None:
        raise ArithmeticError("in the model")

    grpo_steps(model, 1)
    model[1].register_forward_hook(fail)
    grpo_steps(model, 1)


class Refuses(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("in backward")


def raises_in_backward(model: nn.Module) -> None:
    grpo_steps(model, 1)
    Refuses.apply(model(torch.tensor([[1, 2]]))).sum().backward()


def raises_in_a_call(model: nn.Module) -> None:
    grpo_steps(model, 1)
    torch.zeros(2).exp() @ torch.zeros(3)


def goes_on_after_an_error(model: nn.Module) -> None:
    for step in range(3):
        try:
            (raises_in_call_and_model if step == 1 else healthy)(model)
        except (RuntimeError, IndexError):
            model.zero_grad()


def raises_in_call_and_model(model: nn.Module) -> None:
    ids = torch.tensor([[1, 2, 3]])
    logps = log_probs(model(ids[:, :-1]), ids[:, 1:])
    (clipped_loss(logps, logps.detach(), torch.ones(1), torch.ones(1, 2)) / 2).backward()
    model(torch.tensor([[99]]))


TRAININGS = (
    healthy,
    bad_loss,
    bad_model,
    bad_update,
    closure,
    scaler,
    raises_in_model,
    raises_in_backward,
    raises_in_a_call,
    goes_on_after_an_error,
)
MODES: tuple[OnNonFinite, ...] = ("record", "skip", "stop", "repair")
SAVED = (1, 2)  # healthy steps that are saved: they are described as bad ones are

# The doors themselves: what is called by torch or by the trainer, and does no more than call another function of ours and catch.
DOORS = {
    "capture.failsafe.Failsafe.__call__",
    "capture.failsafe.Failsafe.caught",
    "capture.failsafe.Failsafe.door",
    "snapshot.coverage.with_gap",  # what a failure of ours is told with, and by whom
    "watching.logbook.Logbook.gap",
    "capture.mode.TapeMode.__torch_dispatch__",
    "capture.mode.TapeMode._door",
    "capture.mode.TapeMode._called",  # makes the trainer's call
    "capture.mode.TapeMode.ignore_compile_internals",
    "capture.entries.Handle.__del__",
    "nanscope.__getattr__",
    "watching.repair._Pass._safely",
    "watching.repair._Pass.edge",
    "watching.repair._Pass.function",
    "watching.scope.Scope.__enter__",
    "watching.scope.Scope.__exit__",
    "watching.scope.Scope.tag",
}


def test_a_failure_is_taken_back_where_it_was_imported_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a module that is loaded while it is planted: every test after that would run with it."""
    monkeypatch.delitem(sys.modules, "nanscope.report.clean", raising=False)
    with planted(Point("nanscope.text", "", "number"), only_first=False):
        clean = importlib.import_module("nanscope.report.clean")
        with pytest.raises(Planted):
            clean.number(1.0)
    assert clean.number(1.0) == nanscope.text.number(1.0)


def trained(training: Callable[[nn.Module], None], around: AbstractContextManager[object]) -> tuple[BaseException | None, list[bytes]]:
    """Train, and return what was raised and the weights, bit by bit."""
    torch.manual_seed(0)
    model, error = policy(), None
    try:
        with around:
            if isinstance(around, nanscope.Scope):
                around.tag(mask=torch.ones(2, 2))
            training(model)
    except Exception as raised:
        error = raised
    return error, [p.detach().numpy().tobytes() for p in model.parameters()]


def is_bad(weights: list[bytes]) -> bool:
    return any(not bool(torch.isfinite(torch.frombuffer(bytearray(w), dtype=torch.float32)).all()) for w in weights)


@lru_cache
def bare(training: Callable[[nn.Module], None]) -> tuple[BaseException | None, list[bytes]]:
    return trained(training, nullcontext())


@lru_cache
def points(training: Callable[[nn.Module], None], mode: OnNonFinite, folder: Path) -> list[Point]:
    """Return the functions of ours that are called while it is watched, in a fixed order."""
    scope = nanscope.watch(out=folder / "looked", on_nonfinite=mode, save_steps=SAVED)
    found = called(lambda: trained(training, scope))
    return sorted(point for point in found if str(point) not in DOORS and point.module != "nanscope.given" and is_plain(point))


def problems(
    training: Callable[[nn.Module], None], mode: OnNonFinite, point: Point, only_first: bool, folder: Path, log: pytest.LogCaptureFixture
) -> list[str]:
    """Train while a function of ours fails, and say what of it the trainer noticed."""
    log.clear()
    filters = list(warnings.filters)
    scope = nanscope.watch(out=folder, on_nonfinite=mode, save_steps=SAVED)
    with planted(point, only_first) as hits:
        with contextlib.suppress(Planted):  # a failure before the block is entered is one of the call, as a wrong argument is
            scope = nanscope.watch(out=folder, on_nonfinite=mode, save_steps=SAVED)
        hits.clear()
        error, weights = trained(training, scope)
        left = left_installed()
        first = len(hits)
    found = [f"left installed: {name}" for name in left]
    expected, unwatched = bare(training)
    same = type(error) is type(expected) and getattr(error, "args", None) == getattr(expected, "args", None)
    if mode == "record":
        found += [] if same else [f"raised {error!r}, and not {expected!r}"]
        found += [] if weights == unwatched else ["other weights"]
    else:
        found += [] if same or isinstance(error, nanscope.NonFiniteError) else [f"raised {error!r}"]
        found += ["bad weights"] if is_bad(weights) and not is_bad(unwatched) else []
    if error is not None and isinstance(error.__context__, Planted):
        found.append("our failure is told as the reason of theirs")
    found += ["other warning filters"] if list(warnings.filters) != filters else []
    slugs = [record.args[0] for record in log.records if record.name == "nanscope" and record.args]
    found += [f"told {slug} more than once" for slug in set(slugs) if slugs.count(slug) > 1 and str(slug).endswith("-failed")]
    told = any("nanscope [" in record.getMessage() for record in log.records)
    found += ["said nothing"] if first and not told else []
    found += ["healthy"] if first and scope.verdict.healthy else []
    return found


def plan(training: Callable[[nn.Module], None], mode: OnNonFinite, folder: Path) -> list[tuple[Point, bool]]:
    """What is planted: everything at night, and by day one in so many, another one in each run."""
    everything = [(point, only_first) for point in points(training, mode, folder) for only_first in (True, False)]
    if NIGHTLY:
        return everything
    offset = TRAININGS.index(training) * len(MODES) + MODES.index(mode)
    return everything[offset::43]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.__name__)
def test_training_ends_as_without_us_whatever_of_ours_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, training: Callable[[nn.Module], None], mode: OnNonFinite
) -> None:
    """The same error or none, the same weights, no hook left, a warning of each kind once, and no false all-clear."""
    caplog.set_level(logging.WARNING, "nanscope")
    found = {}
    tried = plan(training, mode, tmp_path)
    for number, (point, only_first) in enumerate(tried):
        seen = problems(training, mode, point, only_first, tmp_path / str(number), caplog)
        if seen:
            found[f"{point} {'once' if only_first else 'always'}"] = seen
    print(f"{len(tried)} failures planted")
    assert not found, "\n".join(f"{where}: {', '.join(what)}" for where, what in found.items())
