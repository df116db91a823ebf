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


def told(folder: Path, how: str, bad: int) -> list[Any]:
    """What each rank says: its incidents, and the sentence of all."""
    (folder / "train.py").write_text(SCRIPT)
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
