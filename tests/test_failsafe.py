"""The failsafe: it catches what is ours, lets pass what was asked for, says it once, and gives up on what never works."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nanscope
from nanscope.capture.failsafe import PATIENCE, Failsafe
from nanscope.errors import Deliberate
from tests.loops import grpo_steps, policy


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    "error", [RuntimeError(), MemoryError(), RecursionError(), ImportError(), AssertionError(), torch.OutOfMemoryError(), StopIteration()]
)
def test_whatever_kind_of_failure_it_is(caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    """One warning for each kind, however often; every time is a gap."""
    missed: list[str] = []
    failsafe = Failsafe(lambda slug, text: missed.append(slug))
    for _ in range(3):
        failsafe("look", raising(error))
    assert (failsafe.failures, missed) == (["look-failed"], ["look-failed"] * 3)
    assert caplog.text.count("nanscope [look-failed]") == 1


@pytest.mark.parametrize("error", [Deliberate("asked for", slug="x"), KeyboardInterrupt(), SystemExit(1)])
def test_what_is_meant_to_pass_passes(error: BaseException) -> None:
    """A stop that was asked for, and whoever ends the process."""
    with pytest.raises(type(error)):
        Failsafe()("look", raising(error))


def test_what_never_works_is_not_tried_for_ever() -> None:
    """After so many failures in a row an instrument is left alone; one that works now and then is not."""
    failsafe, calls = Failsafe(), [0, 0]

    def never() -> None:
        calls[0] += 1
        raise ValueError

    def sometimes() -> None:
        calls[1] += 1
        if calls[1] % 2:
            raise ValueError

    for _ in range(3 * PATIENCE):
        failsafe("never", never)
        failsafe("sometimes", sometimes)
    assert calls == [PATIENCE, 3 * PATIENCE]


def test_logging_that_raises_harms_nobody(tmp_path: Path) -> None:
    """A handler of the trainer's logging may do anything; also an error that cannot be shown."""

    class Strict(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left on device")

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ValueError

    handler = Strict()
    logging.getLogger("nanscope").addHandler(handler)
    try:
        failsafe = Failsafe()
        failsafe("look", raising(Unspeakable()))
        failsafe("other", raising(ValueError("x")))
    finally:
        logging.getLogger("nanscope").removeHandler(handler)
    assert failsafe.failures == ["look-failed", "other-failed"]


def test_near_the_end_of_the_stack_training_goes_on(tmp_path: Path) -> None:
    """Where the trainer has hardly any stack left we fail, and it does not."""
    model = policy()

    def deep(left: int) -> None:
        if left:
            deep(left - 1)
        else:
            model(torch.tensor([[1, 2]])).exp().sum().backward()

    def deepest(around: Callable[[int], None]) -> int:
        import sys

        used, frame = 0, sys._getframe()
        while frame is not None:
            used, frame = used + 1, frame.f_back  # type: ignore[assignment]
        for room in range(60, 400, 20):
            try:
                around(sys.getrecursionlimit() - used - room)
            except RecursionError:
                continue
            return room
        return 400

    bare = deepest(deep)
    with nanscope.watch(out=tmp_path) as scope:
        watched = deepest(deep)
        grpo_steps(model, 1)
    assert watched <= bare + 40
    assert scope.steps >= 1


def test_instruments_that_cannot_be_installed_are_taken_off_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on unwatched, and that is what the verdict says (the fixture looks for hooks)."""
    from nanscope.capture.mode import TapeMode

    monkeypatch.setattr(TapeMode, "install", raising(MemoryError()))
    with nanscope.watch(out=tmp_path) as scope:
        grpo_steps(policy(), 2)
    assert scope.verdict.status == "unwatched"
    assert "watch-failed" in {gap.slug for gap in scope.verdict.gaps}
