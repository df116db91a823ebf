"""Writes to the weights of models that nobody trains wait, and are told as they are where they are understood at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from seen import told
from torch import Tensor, nn

import nanscope
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.capture.trailing import Trailing
from nanscope.watching.recording import Recording

TAU = 0.005

Follow = Callable[[Tensor, Tensor, float], object]  # the weight that follows, the one that it follows, how much of itself it keeps


def as_sb3(own: Tensor, other: Tensor, keep: float) -> None:
    own.data.mul_(keep)
    torch.add(own.data, other.data, alpha=TAU, out=own.data)


def by_two_writes(own: Tensor, other: Tensor, keep: float) -> None:
    own.mul_(keep).add_(other, alpha=TAU)


def by_lerp(own: Tensor, other: Tensor, keep: float) -> None:
    own.mul_(keep / (1 - TAU)).lerp_(other, TAU)


def by_copy(own: Tensor, other: Tensor, keep: float) -> None:
    own.data.copy_(TAU * other.data + keep * own.data)


def by_copy_of_itself(own: Tensor, other: Tensor, keep: float) -> None:
    own.copy_(TAU * other + keep * own)


def with_a_look(own: Tensor, other: Tensor, keep: float) -> None:
    """What is read of it is asked for later, when it has become something else."""
    before = own.data.square().sum()
    own.data.mul_(keep)
    after = own.data.square().sum()
    own.data.add_(other.data, alpha=TAU)
    LOOKS[:] = [before, after]


LOOKS: list[Tensor] = []
FORMS: list[Follow] = [as_sb3, by_two_writes, by_lerp, by_copy, by_copy_of_itself, with_a_look]


@pytest.fixture(autouse=True)
def no_looks() -> Iterator[None]:
    LOOKS.clear()
    yield
    LOOKS.clear()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class Loop:
    """A critic and its target network. bad: the step after which that is ruined by the loop's own write."""

    def __init__(self, follow: Follow, bad: int = 0) -> None:
        torch.manual_seed(0)
        self.critic, self.target, self.follow, self.bad = network(), network(), follow, bad
        self.optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-2)

    def run(self, steps: int = 12) -> None:
        for step in range(1, steps + 1):
            seen = torch.randn(10, 6)
            with torch.no_grad():
                wanted = self.target(seen)
            loss = (self.critic(seen) - wanted).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            with torch.no_grad():
                for own, other in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                    self.follow(own, other, 3e38 if step == self.bad else 1 - TAU)
                    if step == self.bad:
                        self.follow(own, other, 3e38)

    def watched(self, out: Path) -> nanscope.Scope:
        with nanscope.watch(out=out, deep_every=0) as scope:
            self.run()
        return scope

    def weights(self) -> list[Tensor]:
        return [*self.critic.parameters(), *self.target.parameters()]


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values the tape knows of when each backward pass begins that is recognised."""
    counted: list[int] = []
    original = Recording.recognised

    def recognised(*args: object, tape: Tape, **kwargs: object) -> Recording:
        counted.append(tape.numbered)
        return original(*args, tape=tape, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Recording, "recognised", staticmethod(recognised))
    return counted


@pytest.mark.parametrize("follow", FORMS, ids=lambda form: form.__name__)
def test_a_target_network_is_written_to_and_nothing_is_understood(follow: Follow, tmp_path: Path, numbered: list[int]) -> None:
    scope = Loop(follow).watched(tmp_path)
    assert not scope.verdict.incidents
    assert len(numbered) >= 6
    if follow is not with_a_look:  # who reads it in between, and keeps that, has it understood
        assert numbered[-1] == numbered[-4]


@pytest.mark.parametrize("follow", FORMS, ids=lambda form: form.__name__)
def test_the_weights_are_what_they_are_unwatched(follow: Follow, tmp_path: Path) -> None:
    alone, seen = Loop(follow, bad=9), Loop(follow, bad=9)
    alone.run()
    seen.watched(tmp_path)
    assert all(torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in zip(alone.weights(), seen.weights(), strict=True))


@pytest.mark.parametrize("bad", [0, 2, 9])
@pytest.mark.parametrize("follow", FORMS, ids=lambda form: form.__name__)
def test_a_run_is_told_the_same_whether_or_not_such_writes_wait(
    follow: Follow, bad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = told(Loop(follow, bad).watched(tmp_path / "waited"))
    LOOKS.clear()
    monkeypatch.setattr(Trailing, "destroyed", lambda *args: None)
    assert told(Loop(follow, bad).watched(tmp_path / "understood")) == waited
    assert bool(waited[1]["incidents"]) == bool(bad)


@pytest.mark.parametrize("follow", FORMS, ids=lambda form: form.__name__)
def test_what_was_made_of_a_weight_is_made_of_what_it_was_then(follow: Follow) -> None:
    """All that is held at the end comes again out of its program, from the contents that were there before each write."""
    torch.manual_seed(0)
    own, other, tape = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4)), Tape()
    tape.trailing.weights = lambda: [own]
    held: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), TapeMode(tape) as mode:
        for _ in range(3):
            for made in (own * 2.0, own.detach() + 1.0):
                mode.sleep("aside")
                held.append((made, made.clone()))
                mode.wake("aside")
            follow(own, other, 0.5)
    held += [(look, look.clone()) for look in LOOKS]
    for made, then in held:
        value = tape.find(made)
        assert value is not None
        program, tensors = tape.program(value)
        assert torch.equal(program.execute(tensors, backward=False).values[program.output], then)


def test_writes_wait_where_only_their_model_knows_the_memory() -> None:
    own, tape = nn.Parameter(torch.randn(3, 4)), Tape()
    tape.trailing.weights = lambda: [own]
    with torch.no_grad(), TapeMode(tape):
        own.mul_(0.5)
        own.data.add_(1.0)
        assert tape.numbered == 0
        row = own[0]  # another part of that memory
        own.mul_(0.5)
        assert tape.numbered > 0
    value = tape.find(row)
    assert value is not None
    program, tensors = tape.program(value)
    assert torch.equal(program.execute(tensors, backward=False).values[program.output], row)


def test_what_wants_a_gradient_does_not_wait() -> None:
    own, scale, tape = torch.ones(3), torch.tensor(2.0, requires_grad=True), Tape()
    tape.trailing.weights = lambda: [own]
    with TapeMode(tape):
        own.mul_(scale)
        assert tape.numbered > 0


@pytest.mark.parametrize("source", [torch.ones(3), torch.ones(2, 3 << 20)[:, :3][0]], ids=["small", "of what is large"])
def test_a_write_whose_arguments_may_not_wait_does_not_either(source: Tensor) -> None:
    """A buffer that calls have made which wait, and then something is copied into it."""
    tape = Tape()
    with TapeMode(tape):
        made = torch.ones(3) * 0.5
        made.add_(source)
        result = made * 3.0
    value = tape.find(result)
    assert value is not None
    program, tensors = tape.program(value)
    assert torch.equal(program.execute(tensors, backward=False).values[program.output], torch.full((3,), 4.5))
