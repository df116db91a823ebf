"""At every line of ours another thread asks what is known: whatever waits is taken from under the one that notes, and nothing comes of it."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from test_notes import described
from test_tape import fresh
from torch import Tensor, nn

import nanscope
from nanscope.capture import notes
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape

CAPTURE = Path(nanscope.__file__).parent / "capture"
ROOMS = {
    str(CAPTURE / f"{name}.py"): name for name in ("clipping", "makers", "mode", "notes", "scribe", "sieve", "tape", "trailing", "weighing")
}
IDLE = 8  # calls of a rollout, in place of ours
TIMES = 2  # that a line is interrupted: what it does for the first time, and again
PATIENCE = 0.005  # seconds: an asker who has to wait for us would wait for ever


class Interrupted:
    """Stops where the n-th new line of ours begins, and has something done in another thread. number: n; 0 for none, to count them."""

    def __init__(self, number: int, act: Callable[[], object]) -> None:
        self.lines: list[tuple[str, int]] = []
        self._number, self._act = number, act
        self._times: Counter[tuple[str, int]] = Counter()
        self._thread: threading.Thread | None = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        room = ROOMS.get(frame.f_code.co_filename)
        if room is None:
            return None
        line = (room, frame.f_lineno)
        if event == "line" and self._times[line] < TIMES:
            self._times[line] += 1
            self.lines.append(line)
            if len(self.lines) == self._number:
                self._thread = threading.Thread(target=self._act)
                self._thread.start()
                self._thread.join(PATIENCE)
        return self

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function so."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return function()
        finally:
            sys.settrace(before)
            if self._thread is not None:
                self._thread.join()


class Target:
    """A target network, and the weights that it follows."""

    def __init__(self) -> None:
        self.weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        self.followed = [torch.full((4,), 2.0, requires_grad=True) for _ in range(2)]


def written_to(target: Target) -> Tensor:
    """What waiting calls have made is written to."""
    with torch.no_grad():
        weight = torch.zeros(3) + 2
    weight.add_(1)
    return (fresh(3).exp() * weight).sum() + torch.ones(3).sum()


def drawn(target: Target) -> Tensor:
    """Memory is filled with random numbers, before and after a waiting call has read it."""
    noise = torch.empty(3)
    noise.uniform_()
    twice = noise * 2
    noise.normal_()
    return (fresh(3).exp() * noise * twice).sum()


def clipped(target: Target) -> Tensor:
    """Norms are taken of a list, and it is scaled."""
    grads = [torch.zeros(3) + 2, torch.zeros(3) + 3]
    norms = torch._foreach_norm(grads)
    torch._foreach_mul_(grads, torch.ones(()) * 0.5)
    return (fresh(3) * 2).sum() * float(norms[0])


def followed(target: Target) -> Tensor:
    """A target network is moved a little, and then asked."""
    with torch.no_grad():
        for theirs, ours in zip(target.weights, target.followed, strict=True):
            theirs.data.mul_(0.9)
            torch.add(theirs.data, ours.data, alpha=0.1, out=theirs.data)
    return fresh(3).exp().sum() * target.weights[0].detach().sum()


def rolled_out(target: Target) -> Tensor:
    """So many calls without a gradient that what has come to nothing is let go of."""
    with torch.no_grad():
        done = torch.zeros(3)
        for _ in range(IDLE + 1):
            done = done + 1
    return (fresh(3) * done).sum()


@pytest.mark.parametrize("loss", [written_to, drawn, clipped, followed, rolled_out])
def test_wherever_another_thread_asks_the_program_is_what_it_would_be(
    loss: Callable[[Target], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "IDLE", IDLE)
    probe = torch.zeros(1)

    def recorded(number: int) -> tuple[Interrupted, tuple[object, ...]]:
        tape, target = Tape(), Target()
        tape.trailing.weights = lambda: target.weights

        def step() -> tuple[object, ...]:
            result = loss(target)
            value = tape.find(result)
            assert value is not None
            calls, leaves, _ = described(tape.program(value)[0])
            tape.forget(over=[value.id])
            return calls, leaves

        with TapeMode(tape):
            step()  # what it is, and not who was first to ask, is told of the next one
            interrupted = Interrupted(number, lambda: tape.find(probe))
            found = interrupted.run(step)
        assert not tape.broken
        return interrupted, found

    interrupted, usual = recorded(0)
    assert len(interrupted.lines) > 200
    wrong = [line for number, line in enumerate(interrupted.lines, 1) if recorded(number)[1] != usual]
    assert not wrong
