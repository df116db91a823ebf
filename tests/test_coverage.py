"""What of a run was not seen."""

import pytest
import torch

import nanscope
from nanscope.capture.scribe import Scribe
from nanscope.snapshot.coverage import GAPS, Gap, Status, gap_words, with_gap
from nanscope.watching.step import Step


def test_a_gap_that_is_known_is_counted() -> None:
    """And no more kinds are kept than a person reads."""
    gaps = with_gap(with_gap([], Gap("a", "x", 3)), Gap("a", "x", 9))
    assert gaps == [Gap("a", "x", 3, 2)]
    for number in range(100):
        gaps = with_gap(gaps, Gap("b", str(number)))
    assert len(gaps) == GAPS and gap_words(gaps) == "x (2 times); 0; 1; and 61 more gaps"


def train(steps: int = 2) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("method", ["before_backward", "after_backward", "before_step", "after_step"])
def test_a_run_of_which_our_own_failure_hid_something_is_not_called_healthy(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Training goes on, and the verdict says what was missed."""

    def fails(*args: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(Step, method, fails)
    with nanscope.watch() as scope:
        train()
    assert scope.verdict.status in (Status.PARTLY, Status.UNWATCHED) and not scope.verdict.healthy
    assert "OSError" in scope.verdict.sentence and scope.verdict.to_json()["gaps"]


def test_a_loss_that_could_not_be_recorded_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape breaks, the loss is still looked at, and the verdict says that it was not all."""

    def fails(*args: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(Scribe, "_after_call", fails)
    with nanscope.watch() as scope:
        train()
    assert scope.verdict.status is Status.PARTLY and "2 steps watched" in scope.verdict.sentence


def test_a_block_in_which_nothing_was_trained_is_unwatched() -> None:
    """An empty block is not healthy."""
    with nanscope.watch() as scope:
        pass
    assert (scope.verdict.status, scope.verdict.healthy) == ("unwatched", False)


def test_backward_passes_without_an_optimizer_were_watched() -> None:
    """A loop that updates its weights by hand is seen, too."""
    weight = torch.ones(3, requires_grad=True)
    with nanscope.watch() as scope:
        weight.square().sum().backward()
    assert scope.verdict.healthy and scope.verdict.sentence.startswith("1 backward pass watched")
