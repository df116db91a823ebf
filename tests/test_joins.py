"""A batch that is put together of many tensors is where a loss begins: which ones they are is no part of how it hangs together."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nanscope
from nanscope.program.calls import Call, Leaf, Ref
from nanscope.program.joins import MANY, begun_at_joins
from nanscope.program.program import Program


class Replay:
    """Q-learning from a list of transitions, each a tensor that the one before has led to. bad: the step in which a reward is ruined."""

    def __init__(self, bad: int = 0) -> None:
        torch.manual_seed(0)
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.memory = deque[tuple[Tensor, Tensor]](maxlen=500)
        self.bad = bad

    def run(self, steps: int = 24) -> None:
        state, chosen = torch.randn(4), random.Random(0)
        for step in range(1, steps + 1):
            for _ in range(4):
                following = 0.9 * state + 0.1 * torch.randn(4)
                reward = -following.pow(2).mean()
                if step == self.bad:
                    reward = reward.log()
                self.memory.append((state, reward))
                state = following
            if len(self.memory) < 2 * MANY:
                continue
            batch = chosen.sample(self.memory, chosen.randint(MANY, 2 * MANY)) if step != self.bad + 3 else [*self.memory][-4 * MANY :]
            states, rewards = (torch.stack(of) for of in zip(*batch, strict=True))
            loss = F.smooth_l1_loss(self.critic(states).squeeze(-1), rewards)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def test_a_sample_of_a_list_is_recognised_whatever_is_in_it(tmp_path: Path, numbered: list[int]) -> None:
    with nanscope.watch(out=tmp_path, deep_every=0) as scope:
        Replay().run()
    assert scope.verdict.healthy
    assert len(numbered) > 12 and numbered[-1] == numbered[-12]  # nothing has been understood since


def test_the_weights_are_what_they_are_unwatched(tmp_path: Path) -> None:
    alone, seen = Replay(bad=15), Replay(bad=15)
    alone.run(20)
    with nanscope.watch(out=tmp_path):
        seen.run(20)
    for one, other in zip(alone.critic.parameters(), seen.critic.parameters(), strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_what_is_bad_in_a_batch_is_told_where_it_was_made(tmp_path: Path) -> None:
    """Some steps before it was sampled, in a step that was recognised."""
    with nanscope.watch(out=tmp_path, deep_every=0) as scope:
        Replay(bad=15).run(20)
    first = scope.verdict.incidents[0]
    assert first.origin.op == "log" and first.origin.variable == "reward"
    assert first.origin.line is not None and "reward.log()" in Path(__file__).read_text().splitlines()[first.origin.line - 1]


def program(many: int, graded: bool) -> Program:
    """Of the mean of as many numbers, each made of a leaf."""
    leaves = tuple(Leaf(n, f"x{n}", "data", graded) for n in range(many))
    made = [Call("aten.neg.default", (Ref(n),), (), (many + n,)) for n in range(many)]
    joined = Call("aten.stack.default", (tuple(Ref(many + n) for n in range(many)),), (), (2 * many,))
    mean = Call("aten.mean.default", (Ref(2 * many),), (), (2 * many + 1,))
    return Program(leaves, (*made, joined, mean), 2 * many + 1)


def test_a_program_begins_with_what_is_joined_of_many() -> None:
    begun = begun_at_joins(program(MANY, graded=False))
    assert [call.name for call in begun.calls] == ["mean"]
    assert [leaf.id for leaf in begun.leaves] == [2 * MANY]
    assert begun.execute({2 * MANY: torch.ones(MANY)}).values[begun.output] == 1.0


@pytest.mark.parametrize("whole", [program(MANY - 1, graded=False), program(MANY, graded=True)], ids=["few", "graded"])
def test_what_is_joined_of_few_or_with_a_gradient_is_a_part_of_it(whole: Program) -> None:
    assert begun_at_joins(whole) is whole or begun_at_joins(whole) == whole
