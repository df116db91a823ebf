"""Writes to the weights of models that nobody trains wait, and are told as they are where they are understood at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from seen import told
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import nanscope
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.capture.trailing import Trailing

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


def with_norms(own: Tensor, other: Tensor, keep: float) -> None:
    """For a log that is written later: what a norm was taken of is not held for that."""
    LOOKS.append(torch.linalg.vector_norm(own.detach()))
    del LOOKS[:-24]
    own.copy_(TAU * other + keep * own)


LOOKS: list[Tensor] = []
WAIT: list[Follow] = [as_sb3, by_two_writes, by_lerp, by_copy, by_copy_of_itself]
FORMS: list[Follow] = [*WAIT, with_a_look, with_norms]  # of which somebody holds what was computed before a write, which is understood then


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

    def run(self) -> None:
        for step in range(1, 13):
            seen = torch.randn(10, 6)
            with torch.no_grad():
                wanted = self.target(seen)
            loss = (self.critic(seen) - wanted).square().mean() + self.more(step)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.update(step)

    def more(self, step: int) -> Tensor | float:
        """What the loss has besides."""
        return 0.0

    def update(self, step: int) -> None:
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


@pytest.mark.parametrize("follow", WAIT, ids=lambda form: form.__name__)
def test_a_target_network_is_written_to_and_nothing_is_understood(follow: Follow, tmp_path: Path, numbered: list[int]) -> None:
    scope = Loop(follow).watched(tmp_path)
    assert not scope.verdict.incidents
    assert len(numbered) >= 6 and numbered[-1] == numbered[-4]


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
    understood = told(Loop(follow, bad).watched(tmp_path / "understood"))
    assert bool(waited[1]["incidents"]) == bool(bad)
    # Of what is understood at once another `.data` is not seen to be the same memory, and nothing is kept of what each write destroys.
    tells_more = bad and follow in (by_two_writes, by_lerp, with_a_look)
    assert understood == waited or tells_more


@pytest.mark.parametrize("bad", [2, 9])
@pytest.mark.parametrize("follow", [by_two_writes, by_lerp, by_copy, by_copy_of_itself], ids=lambda form: form.__name__)
def test_the_line_that_ruins_a_target_network_is_told(follow: Follow, bad: int, tmp_path: Path) -> None:
    first = Loop(follow, bad).watched(tmp_path).verdict.incidents[0]
    assert first.sentence.startswith("the update of the training loop made 0.") and "test_trailing.py:" in first.sentence
    assert first.step == bad + 1


class Reading(Loop):
    """A loop that reads what it writes to; in step 9 the loss overflows, and says what it has read."""

    def __init__(self) -> None:
        super().__init__(as_sb3)
        self.scale = torch.ones(4)
        self.target.register_buffer("scale", self.scale)
        self.kept: list[Tensor] = []

    def more(self, step: int) -> Tensor:
        of_critic = 1e-3 * self.read(step) * next(self.critic.parameters()).sum()
        return of_critic if step != 9 else (of_critic.abs() * 1e12).exp()

    def read(self, step: int) -> Tensor:
        raise NotImplementedError


class Kept(Reading):
    """A number is read of a weight before it is written to, and used some steps later."""

    def read(self, step: int) -> Tensor:
        return self.kept.pop(0) if len(self.kept) > 2 else torch.ones(())

    def update(self, step: int) -> None:
        self.kept.append(next(self.target.parameters()).detach().square().sum())
        super().update(step)


class UncountedBetween(Reading):
    """Written to under two names, of which one does not count for the other; then it is read."""

    def read(self, step: int) -> Tensor:
        weight = next(self.target.parameters())
        with torch.no_grad():
            weight.mul_(0.9)
            weight.data.add_(0.1)
        return weight.detach().square().sum()


class WritesItself(Reading):
    """A model that writes to its own buffer when it is called, unseen, after that was read."""

    def __init__(self) -> None:
        super().__init__()
        self.target[1].register_forward_hook(lambda module, args, output: output + 0.0 * self.scale.mul_(1.5).sum())

    def read(self, step: int) -> Tensor:
        twice = self.scale * 2.0
        with torch.no_grad():
            self.target(torch.randn(2, 6))
        self.scale.mul_(0.6)
        return twice.sum()


class Swapped(Reading):
    """Other memory is put in the place of a weight that was written to."""

    def read(self, step: int) -> Tensor:
        weight, other = next(self.target.parameters()), torch.randn(8, 6)
        told = other.square().sum()
        weight.data.mul_(0.5)
        weight.data = other
        return told + weight.detach().abs().sum()


class Filled(Reading):
    """A buffer is written to by what reads nothing."""

    def read(self, step: int) -> Tensor:
        torch.full((4,), float(step), out=self.scale)
        return self.scale.sum()


class Average(Reading):
    """What torch has for it; it writes to a view of each weight that it has made by a call."""

    def __init__(self) -> None:
        super().__init__()
        self.target = AveragedModel(self.critic, avg_fn=get_ema_avg_fn(0.9))  # type: ignore[assignment, no-untyped-call]

    def read(self, step: int) -> Tensor:
        return next(self.target.parameters()).detach().square().sum()

    def update(self, step: int) -> None:
        self.target.update_parameters(self.critic)  # type: ignore[operator]


READ: list[type[Reading]] = [Kept, UncountedBetween, WritesItself, Swapped, Filled, Average]


def contents(scope: nanscope.Scope) -> list[tuple[list[Any], bool]]:
    """What the files of a run hold, but for what was cut, and whether their losses come out again."""
    found: list[tuple[list[Any], bool]] = []
    for step in (one for one in scope.snapshots if one.program.calls):
        again = step.program.execute(step.tensors, backward=False).values[step.program.output]
        held = sorted(str((leaf.origin, step.tensors[leaf.id].tolist())) for leaf in step.program.leaves)
        found.append((held, step.loss is None or torch.equal(again.nan_to_num(7.0), step.loss.nan_to_num(7.0))))
    return found


@pytest.mark.parametrize("loop", READ)
def test_what_others_know_of_such_memory_is_told_as_if_no_write_waited(
    loop: type[Reading], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = loop().watched(tmp_path / "waited")
    assert waited.verdict.incidents and not waited.verdict.gaps
    monkeypatch.setattr(Trailing, "destroyed", lambda *args: None)
    understood = loop().watched(tmp_path / "understood")
    assert told(waited) == told(understood) and contents(waited) == contents(understood)
    assert all(again for _, again in contents(waited))


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


class Explores(Loop):
    """Noise is written into what the target network has returned, and the next loss reads that. Of step 9 it is bad."""

    action = torch.zeros(5, 1)

    def more(self, step: int) -> Tensor:
        return 1e-3 * (self.critic(torch.ones(5, 6)) * self.action).mean()

    def update(self, step: int) -> None:
        super().update(step)
        with torch.no_grad():
            self.action = self.target(torch.ones(5, 6))
            self.action += torch.randn(5, 1).mul(0.1) if step != 9 else torch.tensor(-0.1).log()
            self.action.clamp_(-2.0, 2.0)


def test_noise_that_is_written_into_what_a_model_has_returned_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbered: list[int]
) -> None:
    waited = Explores(as_sb3).watched(tmp_path / "waited")
    assert len(numbered) >= 5 and numbered[4] == numbered[0]  # nothing was understood in these steps
    assert "log" in waited.verdict.incidents[0].sentence and waited.verdict.incidents[0].step == 10
    monkeypatch.setattr(Trailing, "copy_of", lambda *args: None)
    understood = Explores(as_sb3).watched(tmp_path / "understood")
    assert told(waited) == told(understood) and contents(waited) == contents(understood)


def test_a_run_in_which_such_writes_wait_is_the_same_to_the_bit(tmp_path: Path) -> None:
    alone, seen = Explores(as_sb3), Explores(as_sb3)
    alone.run()
    seen.watched(tmp_path)
    assert all(torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in zip(alone.weights(), seen.weights(), strict=True))
