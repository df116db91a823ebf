"""What the trainer's code asks of values with a gradient, as the tape notes it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nanscope.capture import doubts
from nanscope.capture.doubts import FULL, Doubt, is_doubtful
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape

BAD = (math.nan, math.inf, -math.inf)


def weight(value: float = 1.0, size: int = 1) -> Tensor:
    return nn.Parameter(torch.full((size,), value))


@pytest.mark.parametrize("value", BAD)
def test_a_number_that_is_not_finite_is_doubtful(value: float) -> None:
    """A finite one tells itself, a truth tells nothing of what it is about."""
    assert is_doubtful(value) and is_doubtful(True) and is_doubtful(False)
    assert not any(is_doubtful(answer) for answer in (0.0, 1, complex(math.nan), None))


def asked(ask: Callable[[Tensor], object], value: float, at_hand: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Doubt], Tensor]:
    monkeypatch.setattr(doubts, "at_hand", lambda tensor: at_hand)
    tape = Tape()
    with TapeMode(tape):
        loss = (weight() * value).sum()
        ask(loss)
    return tape.doubts.take(), loss


def test_a_program_is_held_for_what_is_known_to_be_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU at once, elsewhere when somebody asks; both hold the value as it was."""
    for at_hand in (True, False):
        (doubt,), loss = asked(Tensor.item, math.nan, at_hand, monkeypatch)
        assert (doubt.program is not None) == at_hand and not doubt.truth
        assert bool(doubt.extremes.isnan()) and doubt.extremes.shape == loss.shape and not doubt.extremes.requires_grad


def test_what_is_asked_about_is_found_behind_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """`isfinite` takes the magnitude of what it asks about, which has a gradient as well."""
    (doubt,), loss = asked(lambda loss: bool(torch.isfinite(loss).all()), math.inf, True, monkeypatch)
    assert doubt.truth and doubt.tested and doubt.value.tensor is loss


def test_a_number_is_tested_where_the_code_that_reads_it_tests_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What becomes of it in there nobody can follow."""
    assert asked(lambda loss: math.isnan(loss.item()), math.nan, True, monkeypatch)[0][0].tested
    assert not asked(lambda loss: str(loss.item()), math.nan, True, monkeypatch)[0][0].tested


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_healthy_loss_is_read_only_where_that_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, at_hand: bool) -> None:
    """A finite number is forgotten anyhow; of a truth about a value on a device nobody knows what it says."""
    assert asked(Tensor.item, 1.0, at_hand, monkeypatch)[0] == []
    assert len(asked(lambda loss: bool(torch.isfinite(loss)), 1.0, at_hand, monkeypatch)[0]) == (0 if at_hand else 1)


def test_of_a_large_value_only_the_extremes_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """They carry a NaN."""
    monkeypatch.setattr(doubts, "at_hand", lambda tensor: False)
    tape = Tape()
    with TapeMode(tape):
        logits = weight(math.nan, 1000) * 2
        bool(logits.isnan().any())
    (doubt,) = tape.doubts.take()
    assert doubt.extremes.shape == (2,) and bool(doubt.extremes.isnan().all())


def test_code_that_asks_again_has_gone_on() -> None:
    """The same value may be asked about twice; another one at the same place means that the first was passed over."""
    tape, told = Tape(), []
    tape.doubts.again = lambda: told.append(len(tape.doubts.take()))
    with TapeMode(tape):
        for value in (math.nan, math.inf):
            loss = (weight() * value).sum()
            for _ in range(3):
                loss.item()
    assert told == [1] and len(tape.doubts.take()) == 1


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_value_is_in_doubt_once(monkeypatch: pytest.MonkeyPatch, at_hand: bool) -> None:
    """However many places ask about it; what one of them tells of it holds."""

    def ask(loss: Tensor) -> None:
        loss.item()
        bool(torch.isnan(loss))
        loss.item()

    (doubt,), _ = asked(ask, math.nan, at_hand, monkeypatch)
    assert doubt.truth and doubt.tested


def test_there_are_never_many_and_what_is_closed_is_off_the_account() -> None:
    """One for each place that asks, and no more than so many places."""
    tape = Tape()
    with TapeMode(tape):
        for line in range(2 * FULL):
            loss = (weight() * math.nan).sum()
            exec(compile("\n" * line + "loss.item()", "trainer.py", "exec"), {"loss": loss})
    found = tape.doubts.take()
    assert len(found) == FULL and tape.held > 0
    for doubt in found:
        doubt.close()
    tape.forget(everything=True)
    assert tape.held == 0
