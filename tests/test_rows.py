"""Writes to rows of a buffer wait, and are told as they are where they are understood at once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seen import told
from torch import Tensor, nn

import nanscope
from nanscope.capture.mode import TapeMode
from nanscope.capture.notes import Notes
from nanscope.capture.rows import Rows
from nanscope.capture.tape import Tape

STEPS, ENVS = 6, 3

Gather = Callable[[Tensor, int, Tensor], object]  # a buffer, the step, and what was gathered in it


def by_index(buffer: Tensor, step: int, row: Tensor) -> None:
    buffer[step] = row


def by_copy(buffer: Tensor, step: int, row: Tensor) -> None:
    buffer[step].copy_(row)


def by_slice(buffer: Tensor, step: int, row: Tensor) -> None:
    buffer[step : step + 1] = row


def by_two_writes(buffer: Tensor, step: int, row: Tensor) -> None:
    buffer[step].zero_()
    buffer[step] += row


def transposed(buffer: Tensor, step: int, row: Tensor) -> None:
    buffer.transpose(0, 1)[:, step] = row


def with_a_look(buffer: Tensor, step: int, row: Tensor) -> None:
    """What it held before is read, and asked for later."""
    buffer[step] = row + 0 * buffer.mean()


FORMS: list[Gather] = [by_index, by_copy, by_slice, by_two_writes, transposed, with_a_look]


class Loop:
    """PPO as it is written by hand: a rollout in buffers, advantages from the last step to the first, epochs over minibatches. bad: the
    iteration in which a number is not finite; where: of what."""

    def __init__(self, gather: Gather, bad: int = -1, where: str = "rewards", anew: bool = False) -> None:
        torch.manual_seed(0)
        self.policy, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)
        self.optimizer = torch.optim.Adam([*self.policy.parameters(), *self.critic.parameters()], lr=1e-3)
        self.gather, self.bad, self.where, self.anew = gather, bad, where, anew

    def buffers(self) -> None:
        self.obs, self.actions = torch.zeros(STEPS, ENVS, 4), torch.zeros(STEPS, ENVS, 2)
        self.old, self.rewards, self.values = torch.zeros(STEPS, ENVS), torch.zeros(STEPS, ENVS), torch.zeros(STEPS, ENVS)

    def run(self, iterations: int = 7) -> None:
        self.buffers()
        for iteration in range(iterations):
            if self.anew:
                self.buffers()
            self.rollout(iteration == self.bad)
            self.learn(self.advantages())

    def rollout(self, bad: bool) -> None:
        for step in range(STEPS):
            obs = torch.randn(ENVS, 4)
            with torch.no_grad():
                mean = self.policy(obs)
                action = mean + torch.randn_like(mean)
                old = (-((action - mean) ** 2) / 2).sum(1)
                value = self.critic(obs).flatten()
            reward = obs[:, 0] - action.abs().sum(1)
            if bad and step == 2:
                reward[1] = {"rewards": float("nan"), "infinite": float("inf")}.get(self.where, 0.0)
                old = torch.log(old - old) if self.where == "old" else old
            for buffer, row in zip(
                (self.obs, self.actions, self.old, self.rewards, self.values), (obs, action, old, reward, value), strict=True
            ):
                self.gather(buffer, step, row)

    def advantages(self) -> Tensor:
        found, last = torch.zeros_like(self.rewards), torch.zeros(ENVS)
        for step in reversed(range(STEPS - 1)):
            delta = self.rewards[step] + 0.99 * self.values[step + 1] - self.values[step]
            found[step] = last = delta + 0.95 * last
        return found

    def learn(self, advantages: Tensor) -> None:
        returns = advantages + self.values
        obs, actions, old, gain = self.obs.reshape(-1, 4), self.actions.reshape(-1, 2), self.old.reshape(-1), advantages.reshape(-1)
        goal = returns.reshape(-1)
        for _ in range(2):
            for batch in torch.randperm(STEPS * ENVS).chunk(2):
                new = (-((actions[batch] - self.policy(obs[batch])) ** 2) / 2).sum(1)
                ratio = (new - old[batch]).exp()
                loss = -torch.min(ratio * gain[batch], ratio.clamp(0.8, 1.2) * gain[batch]).mean()
                loss = loss + (self.critic(obs[batch]).flatten() - goal[batch]).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()

    def watched(self, out: Path, iterations: int = 7) -> nanscope.Scope:
        with nanscope.watch(out=out, deep_every=0) as scope:
            self.run(iterations)
        return scope

    def weights(self) -> list[Tensor]:
        return [*self.policy.parameters(), *self.critic.parameters()]


@pytest.mark.parametrize("anew", [False, True], ids=["kept", "anew"])
@pytest.mark.parametrize("gather", [by_index, by_copy, by_slice], ids=lambda form: form.__name__)
def test_a_rollout_is_gathered_and_nothing_is_understood(gather: Gather, anew: bool, tmp_path: Path, numbered: list[int]) -> None:
    scope = Loop(gather, anew=anew).watched(tmp_path, iterations=10)
    assert not scope.verdict.incidents
    assert len(numbered) >= 12 and numbered[-1] == numbered[-8]  # the last two iterations, first minibatches too


@pytest.mark.parametrize("where", ["rewards", "infinite", "old"])
@pytest.mark.parametrize("gather", FORMS, ids=lambda form: form.__name__)
def test_the_weights_are_what_they_are_unwatched(gather: Gather, where: str, tmp_path: Path) -> None:
    alone, seen = Loop(gather, 5, where), Loop(gather, 5, where)
    alone.run()
    seen.watched(tmp_path)
    assert all(torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in zip(alone.weights(), seen.weights(), strict=True))


@pytest.mark.parametrize("anew", [False, True], ids=["kept", "anew"])
@pytest.mark.parametrize("bad, where", [(-1, ""), (0, "rewards"), (1, "old"), (1, "infinite")])
@pytest.mark.parametrize("gather", FORMS, ids=lambda form: form.__name__)
def test_a_run_is_told_the_same_whether_or_not_such_writes_wait(
    gather: Gather, bad: int, where: str, anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = told(Loop(gather, bad, where, anew).watched(tmp_path / "waited"))
    monkeypatch.setattr(Rows, "destroyed", lambda *args: None)
    assert told(Loop(gather, bad, where, anew).watched(tmp_path / "understood")) == waited
    assert bool(waited[1]["incidents"]) == (bad >= 0)


SAID = {"rewards": " was set to NaN", "infinite": " was set to +inf", "old": "torch.log(old - old) gave −inf"}


@pytest.mark.parametrize("most", [1 << 24, 1 << 21, 1 << 19], ids=["all", "some", "few"])
@pytest.mark.parametrize("where", SAID)
@pytest.mark.parametrize("gather", FORMS, ids=lambda form: form.__name__)
def test_a_fault_of_a_rollout_is_found_after_many(
    gather: Gather, where: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer calls are known where fewer may wait: then the buffer is where it begins. most: bytes of them."""
    original = Notes.__init__

    def small(self: Notes, *args: Any) -> None:
        original(self, *args)
        self.most = most

    monkeypatch.setattr(Notes, "__init__", small)
    incident = Loop(gather, 5, where).watched(tmp_path).verdict.incidents[0]
    sentence = incident.sentence
    assert SAID[where] in sentence or (
        (where == "old" or most < 1 << 24) and "−inf" in sentence.replace("+inf", "−inf").replace("NaN", "−inf")
    ), sentence


@pytest.mark.parametrize("iteration", [0, 2])
@pytest.mark.parametrize("where", SAID)
def test_a_long_rollout_is_known_from_its_beginning(where: str, iteration: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a hundred and more steps is more calls than are remembered of a model that generates."""
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 130)
    incident = Loop(by_index, iteration, where).watched(tmp_path, iterations=iteration + 1).verdict.incidents[0]
    assert SAID[where] in incident.sentence
    assert len(incident.chain) < 40  # it does not go through the buffer once for each row that was written later
    assert incident.chain[-1].text == "loss[]"


def test_of_a_rollout_that_is_too_long_nothing_is_called_data(tmp_path: Path) -> None:
    """What was computed, and of which too much came after, did not come with the batch; a larger budget holds more."""
    said = []
    for budget in (1 << 22, 1 << 28):
        loop = Loop(by_index, 0, "old")
        with nanscope.watch(out=tmp_path / str(budget), deep_every=0, budget=budget) as scope:
            loop.buffers()
            for _ in range(5):
                loop.rollout(True)
            loop.learn(loop.advantages())
        said.append(scope.verdict.incidents[0].sentence)
    assert "calls that were not kept" in said[0] and "A larger budget= may keep them" in said[0]
    assert SAID["old"] in said[1]


def test_a_buffer_that_nobody_holds_any_more_is_not_waited_for() -> None:
    """A mask that is made row by row in each step, say."""
    tape = Tape()
    with TapeMode(tape):
        for _ in range(3):
            mask = torch.zeros(8, 4)
            for row in range(8):
                mask[row, : row % 4] = 1.0
        kept = torch.zeros(8, 4)
        kept[3] = 2.0
        del mask
        tape.notes.weight = tape.notes.most + 1
        tape.notes.sift()
        written = [call for call in tape.notes.pending if call[0].mutable]
    assert len(written) == 1 and kept[3, 0] == 2.0


def test_what_a_buffer_held_before_is_what_was_read_of_it() -> None:
    buffer, rows = torch.arange(12.0).reshape(4, 3), torch.full((4, 3), -1.0)
    tape = Tape()
    with TapeMode(tape):
        first = buffer[2].sum() + buffer.sum()
        buffer[2] = rows[2]
        second = buffer.mean() * 2
        buffer[2] = rows[2] * 5
        buffer[0] = rows[0]
        third = buffer[1:].sum()
    for output in (first, second, third):
        value = tape.find(output)
        assert value is not None
        program, tensors = tape.program(value)
        assert torch.equal(program.execute(tensors).values[program.output], output)


def test_a_buffer_that_is_written_to_unseen_is_not_made_up() -> None:
    """Who reads it has what it held, or nothing."""
    buffer = torch.zeros(4, 3)
    tape = Tape()
    mode = TapeMode(tape)
    with mode:
        before = buffer.sum() + 1
        buffer[1] = torch.ones(3)
    buffer[3] = 7.0
    with mode:
        buffer[2] = torch.ones(3)
        after = buffer.sum() + 1
    value = tape.find(after)
    assert value is not None
    program, tensors = tape.program(value)
    assert torch.equal(program.execute(tensors).values[program.output], after)
    earlier = tape.find(before)
    assert earlier is not None
    with contextlib.suppress(LookupError):
        program, tensors = tape.program(earlier)
        assert torch.equal(program.execute(tensors).values[program.output], before)


def test_a_row_of_a_weight_is_written_to_at_once() -> None:
    model = nn.Linear(3, 4)
    tape = Tape()
    tape.rows.of_models = lambda: [*model.parameters()]
    with TapeMode(tape), torch.no_grad():
        seen = model.weight.data
        seen[1] = 0.0
        assert not any(call[10] is not None for call in tape.notes.pending)
