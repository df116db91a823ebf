"""What ranks hand to each other for a loss: statistics of all rewards, say. The rank that gave the bad number is told, and what it made it of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanscope.verdict.run import verdict_of

SCRIPT = """
import json, os, sys, torch, torch.distributed as dist, nanscope
rank, how, bad = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(rank)
buffers = [torch.zeros(4), torch.zeros(4)]
with nanscope.watch(model, out=sys.argv[4]) as scope:
    for step in range(1, bad + 1):
        rewards = torch.rand(4)
        if step == bad and rank == 1:
            rewards = rewards / torch.tensor([1.0, 1.0, 0.0, 1.0])
        if how == "all_reduce":
            total = torch.stack([rewards.sum(), (rewards ** 2).sum(), torch.tensor(4.0)])
            dist.all_reduce(total)
            mean, std = total[0] / total[2], (total[1] / total[2]).sqrt()
        elif how == "all_gather":
            parts = [torch.zeros(4) for _ in range(2)]
            dist.all_gather(parts, rewards)
            mean, std = torch.cat(parts).mean(), torch.cat(parts).std()
        elif how == "all_gather_into_tensor":
            every = torch.zeros(8)
            dist.all_gather_into_tensor(every, rewards)
            mean, std = every.mean(), every.std()
        elif how == "reused":
            dist.all_gather(buffers, torch.from_numpy(rewards.numpy().copy()))
            mean, std = torch.cat(buffers).mean(), torch.cat(buffers).std()
        elif how == "two":
            mean, std = rewards.mean(), rewards.std()
            dist.reduce(mean, 0)
            dist.broadcast(mean, 0)
        elif how == "scatter":
            mean, std = torch.zeros(()), rewards.std()
            dist.scatter(mean, list(rewards[2:]) if rank == 1 else None, src=1)
        else:
            mean, std = rewards.mean(), rewards.std()
            dist.broadcast(mean, 1)
        advantages = (torch.rand(4) - mean) / (std + 1e-6)
        loss = -(model(torch.randn(4, 4)).squeeze(-1) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
found = [[one.rank, str(one.cause), str(one.phase), one.origin.op, one.sentence] for one in scope.verdict.incidents]
print(json.dumps([found, scope.verdict.sentence]))
dist.destroy_process_group()
"""


# A sequence, and a vocabulary, that are spread over ranks: what each has computed is put together by a function with a backward of its own.
PARALLEL = """
import json, os, sys, torch, torch.distributed as dist, torch.distributed.nn, nanscope
rank, how, bad = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
torch.set_num_threads(1)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine):
        every = torch.empty(2 * len(mine), *mine.shape[1:])
        dist.all_gather_into_tensor(every, mine.contiguous())
        return torch.cat(every.split(len(mine)), dim=1)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad.chunk(2, dim=1)[rank].contiguous()


class LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids):
        others = (ids < 3 * rank) | (ids >= 3 * rank + 3)
        mine = (ids - 3 * rank).masked_fill(others, 0)
        total = logits.exp().sum(-1, keepdim=True)
        dist.all_reduce(total)
        log_probs = logits - total.log()
        ctx.save_for_backward(log_probs.exp(), others, mine)
        chosen = log_probs.gather(-1, mine[..., None]).squeeze(-1)
        chosen[others] = 0
        dist.all_reduce(chosen)
        return chosen

    @staticmethod
    def backward(ctx, grad):
        probs, others, mine = ctx.saved_tensors
        hit = torch.nn.functional.one_hot(mine, 3) * ~others[..., None]
        return (hit - probs) * grad[..., None], None


torch.manual_seed(rank)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters())
with nanscope.watch(model, out=sys.argv[4]) as scope:
    for step in range(1, bad + 1):
        torch.manual_seed(step)
        x, ids, noise = torch.randn(2, 5, 4), torch.randint(0, 3, (2, 5)), torch.zeros(2, 5)
        temperature, weight = torch.ones(2, 1, 1), torch.ones(2, 5)
        if step == bad and rank == 1:
            temperature[1] = 0.0 if how in ("gather", "vocabulary") else 1.0
            weight[1, 2] = 0.0 if how == "log" else 1.0
            noise[1, 2] = -95.0 if how in ("trap", "masked") else 0.0
        logits = model(x) / temperature
        if how == "vocabulary":
            log_probs = LogProb.apply(logits, ids)
        else:
            log_probs = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1) + weight.log()
        if how in ("gather", "log"):
            log_probs = Gather.apply(log_probs)
        ratio = torch.exp(log_probs - log_probs.detach() - (noise if how in ("trap", "masked") else 0))
        if how == "trap":
            ratio = torch.where(noise < -50, torch.zeros(()), ratio)
        if how == "masked":
            ratio = ratio * (noise >= -50)
        loss = -(torch.distributed.nn.all_reduce(ratio.sum()) / 20 if how in ("trap", "masked") else ratio.mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
found = [[one.rank, str(one.cause), str(one.phase), one.origin.op, one.sentence] for one in scope.verdict.incidents]
print(json.dumps([found, scope.verdict.sentence]))
dist.destroy_process_group()
"""


def told(folder: Path, how: str, bad: int, script: str = SCRIPT) -> list[Any]:
    """What each rank says: its incidents, and the sentence of all."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "train.py", how, str(bad), str(folder / "store"), str(folder / "runs")]
    ranks = [
        subprocess.Popen(command, cwd=folder, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    return [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]


MADE = ["zero_denominator", "forward", "div"]
CAME = ["bad_input", "input", "input"]  # what numpy holds is data


@pytest.mark.parametrize("bad", [2, 8])
@pytest.mark.parametrize(
    ("how", "name", "source"),
    [
        ("all_reduce", "all_reduce", MADE),
        ("all_gather", "all_gather", MADE),
        ("all_gather_into_tensor", "all_gather_into_tensor", MADE),
        ("broadcast", "broadcast", MADE),
        ("reused", "all_gather", CAME),
        ("two", "reduce", MADE),
    ],
)
def test_the_rank_that_gave_a_bad_number_is_told(how: str, name: str, source: list[str], bad: int, tmp_path: Path) -> None:
    """Whether the loss is written down in each step, or known by then: behind the collective of the one rank, before that of the other."""
    other, own = told(tmp_path, how, bad)
    for found, sentence in (other, own):
        assert found[0][:4] == [1, *source], sentence
    reached = next(one for one in other[0] if one[0] == 0)
    assert reached[1:4] == ["allreduce_nan", "input", name] and f"out of {name} at train.py:" in reached[4], reached
    (run,) = (tmp_path / "runs").glob("20*")
    assert verdict_of(run).incidents[0].rank == 1


def test_what_another_rank_has_handed_over_is_no_data(tmp_path: Path) -> None:
    """Nor did this one give anything."""
    other, _ = told(tmp_path, "scatter", 8)
    reached = next(one for one in other[0] if one[0] == 0)
    assert reached[1:4] == ["allreduce_nan", "input", "scatter"] and "by which another rank gave it" in reached[4], reached


@pytest.mark.parametrize("bad", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("how", "phase", "op", "line"),
    [
        ("gather", "forward", "div", "model(x) / temperature"),
        ("vocabulary", "forward", "div", "model(x) / temperature"),
        ("log", "forward", "log", "weight.log()"),
        ("trap", "backward", "exp", "torch.exp(log_probs"),
        ("masked", "forward", "exp", "torch.exp(log_probs"),
    ],
)
def test_what_a_rank_made_before_a_function_that_puts_ranks_together(
    how: str, phase: str, op: str, line: str, bad: int, tmp_path: Path
) -> None:
    """Of a sequence, or a vocabulary, that is spread over ranks. Of the rank that made it the line is told, and what the others were given is
    told to have come."""
    (others, _), (found, _) = told(tmp_path, how, bad, PARALLEL)
    own = next(one for one in found if one[0] == 1)
    assert own[2:4] == [phase, op], own
    assert ("that the loss does not count" in own[4]) == (how in ("trap", "masked")), own
    if how != "trap":  # there the others get a gradient that is bad, and no number
        other = next(one for one in others if one[0] == 0)
        assert other[1:3] == ["allreduce_nan", "input"] and "to which this rank gave finite numbers" in other[4], other
    (run,) = (tmp_path / "runs").glob("20*")
    first = verdict_of(run).incidents[0]
    assert first.rank == 1 and line in "".join(text for number, text in first.origin.source if number == first.origin.line), first
