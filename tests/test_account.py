"""The account of what is held: each piece of memory once, never more than the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.capture.account import Balance, Holding


def test_memory_counts_once_and_as_a_whole() -> None:
    """Two views of one tensor keep all of it alive, and no more than that."""
    account = Balance(1 << 20)
    whole = torch.zeros(100)
    first, second = Holding(account), Holding(account)
    assert first.add(whole[:10], whole[50:]) and second.add(whole)
    assert account.held == 400
    first.close()
    assert account.held == 400
    second.close()
    assert account.held == 0 and account.peak == 400


def test_what_does_not_fit_is_not_counted() -> None:
    """All of it or nothing: a call without one of its arguments cannot be run again."""
    account = Balance(500)
    holding, one, other = Holding(account), torch.zeros(100), torch.zeros(100)
    assert not holding.add(one, other)
    assert account.held == 0
    assert holding.add(one)
    assert not holding.add(other) and account.held == account.peak == 400


def test_what_is_over_makes_room() -> None:
    """The oldest lets go for what is new."""
    account = Balance(1000)
    old = [Holding(account) for _ in range(2)]
    tensors = [torch.zeros(100) for _ in old]
    for holding, tensor in zip(old, tensors, strict=True):
        holding.add(tensor)

    def spare() -> bool:
        if old:
            old.pop(0).close()
            return True
        return False

    account.spare = spare
    assert Holding(account).add(torch.zeros(150)) and len(old) == 1
    assert not Holding(account).add(torch.zeros(1000)) and len(old) == 1  # nothing is let go of in vain


@pytest.mark.parametrize(
    "tensor", [nn.Parameter(torch.zeros(9)), torch.eye(3).to_sparse(), torch.zeros(0)], ids=["weight", "sparse", "empty"]
)
def test_what_has_no_memory_of_its_own_is_not_counted(tensor: torch.Tensor) -> None:
    """A weight is there anyway."""
    account = Balance(1000)
    assert Holding(account).add(tensor) and account.held == 0


def test_a_part_of_a_data_set_counts_as_the_part() -> None:
    """A batch is a view of a data set that is larger than the whole budget: the trainer does not make it anew for each call."""
    account = Balance(1000)
    assert Holding(account).add(torch.zeros(10_000)[500:600]) and account.held == 400


class Shift(nn.Module):
    """Log-probs of a policy that adds a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, base: Tensor) -> Tensor:
        return base + self.weight


def grpo(policy: Shift, rows: int, tokens: int, dies: bool) -> Tensor:
    """A loss that prepares its own batch; dies: at one masked token exp of the reference's log-ratio overflows, which is written late."""
    mask = (torch.arange(tokens) < tokens // 2).float().expand(rows, tokens).clone()
    logps = policy(-2 * torch.rand(rows, tokens))
    old, ref = logps.detach() + 0.05 * torch.randn(rows, tokens), logps.detach() + 0.1 * torch.randn(rows, tokens)
    rewards = torch.rand(rows // 8, 8)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    if dies:
        ref[1, -1] = 200.0
    ratio = torch.exp(logps - old)
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    log_ratio = ref - logps
    kl = torch.exp(log_ratio) - log_ratio - 1
    return (((loss + 0.04 * kl) * mask).sum(-1) / mask.sum(-1)).mean()


@pytest.mark.parametrize("rows", [32, 320])  # of which a result outlives a backward pass, and of which none does
@pytest.mark.parametrize("tensors", [8, 10, 12, 13, 15, 16, 20])
def test_a_later_step_is_recorded_whole_where_the_first_is(rows: int, tensors: int, tmp_path: Path) -> None:
    """What earlier steps left, and what the batch was prepared with, makes room for what the loss reads; nothing is known and not held."""
    policy, tokens = Shift(), 1024
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    with nanscope.watch(out=tmp_path, budget=tensors * rows * tokens * 4) as scope:
        for step in range(4):
            optimizer.zero_grad()
            grpo(policy, rows, tokens, dies=step == 3).backward()
            optimizer.step()
    origin = scope.verdict.incidents[0].origin
    assert (origin.op, origin.index, origin.masked) == ("exp", (1, tokens - 1), True)


@pytest.mark.parametrize("times", [7, 8])
def test_what_is_too_large_to_be_kept_is_said_and_how_to_keep_it(times: int, tmp_path: Path) -> None:
    """A loss over more tokens than the budget has room for: nobody takes that for code that cannot be seen."""
    rows, tokens = 16, 1024
    policy = Shift()
    with nanscope.watch(out=tmp_path, budget=times * rows * tokens * 4) as scope:
        grpo(policy, rows, tokens, dies=True).backward()
    incident = scope.verdict.incidents[0]
    said = [note.text for note in incident.notes if note.slug == "not_kept"]
    if times == 8:
        assert (incident.origin.op, said) == ("exp", [])
        return
    assert incident.origin.op == "cut" and len(said) == 1 and "no tensor larger than 0.0573 MB" in said[0]
    assert "calls that were not kept" in scope.verdict.sentence and "A larger budget= may keep them" in scope.verdict.sentence
