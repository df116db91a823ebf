"""Whether what nanscope takes grows in step with the work: seconds per call, token, layer, step and rank, as there are more of them.

    calls 100 → 800     a loss of so many recorded calls, forward and backward, per call
    tokens              a healthy step over [B, T] log-probs, and a bad one with its verdict, per token
    layers              a step of a narrow transformer, its update included, per layer
    steps               a watched run of so many steps, its end included, per step
    ranks               reading what so many ranks have left of a bad step, per rank

A ratio is what one of them takes over what it takes where there are fewest: below 1 or near it is linear, one that doubles with the size
is a square.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from nanscope.bench.asked import batch, loss_of
from nanscope.bench.calls import maybe_watched
from nanscope.bench.measure import Figures, Seconds, alone, compared, quiet, rotated, seconds_of
from nanscope.bench.steps import TransformerBlock
from nanscope.bench.tools import NANSCOPE
from nanscope.errors import NanscopeError
from nanscope.snapshot.runs import find_run, histories
from nanscope.verdict.incident import Verdict
from nanscope.verdict.run import verdict_of
from nanscope.watching.scope import watch

REPEATED = 3  # steps
WIDTH = 64

CALLS = (100, 200, 400, 800)
TOKENS = ((64, 256), (128, 512), (256, 1024), (512, 2048))
BAD = ((16, 256), (32, 512), (64, 1024), (128, 2048))
LAYERS = (2, 4, 8, 16)
STEPS = (50, 100, 200, 400)
RANKS = (2, 4, 8, 16)


def _watched(step: Callable[[], None]) -> Seconds:
    """How long a step takes that has been made before: the median of a few."""
    with maybe_watched(NANSCOPE):
        step()
        found = [seconds_of(step) for _ in range(REPEATED)]
    return Seconds(median(one.wall for one in found), median(one.cpu for one in found))


def _calls(many: int) -> Seconds:
    """A loss of so many calls on a tensor of one row."""
    weight = nn.Parameter(torch.zeros(WIDTH))

    def step() -> None:
        loss: Tensor = weight * 1.0
        for _ in range(many // 2):
            loss = torch.tanh(loss) + 0.1
        loss.sum().backward()  # type: ignore[no-untyped-call]

    return _watched(step)


def _tokens(size: tuple[int, int]) -> Seconds:
    """A healthy step over so many tokens."""
    log_probs, old_log_probs, *rest = batch(*size)
    old_log_probs[:, -1] = log_probs[:, -1].detach()

    def step() -> None:
        loss_of(log_probs, old_log_probs, *rest).backward()  # type: ignore[no-untyped-call]

    return _watched(step)


def _bad(size: tuple[int, int]) -> Seconds:
    """A bad step over so many tokens, with its verdict."""
    tensors = batch(*size)
    with quiet(), tempfile.TemporaryDirectory() as folder, watch(out=folder) as scope:
        loss = loss_of(*tensors)
        taken = seconds_of(lambda: (loss.backward(), scope.verdict))  # type: ignore[no-untyped-call]
    if len(scope.verdict.incidents) != 1:
        raise NanscopeError(f"a bad step over {size} has no verdict", slug="bench-failed")
    return taken


def _layers(many: int) -> Seconds:
    """A step of a transformer of so many layers, without a vocabulary, which would be most of it."""
    model = nn.Sequential(*(TransformerBlock(WIDTH, heads=2) for _ in range(many)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hidden = torch.randn(8, 32, WIDTH)

    def step() -> None:
        model(hidden).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return _watched(step)


def _steps(many: int) -> Seconds:
    """A run of so many steps, from its beginning to its end."""
    weight = nn.Parameter(torch.zeros(8, 64))
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    def run() -> None:
        with maybe_watched(NANSCOPE) as scope:
            for _ in range(many):
                optimizer.zero_grad()
                torch.exp(weight * 1.0).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        if scope is None or scope.steps != many:
            raise NanscopeError(f"nanscope did not see {many} steps", slug="bench-failed")

    return seconds_of(run)


def jobs(worlds: Sequence[int], folder: str) -> None:
    """Train one step in each rank of jobs of so many ranks, each in a process of its own; the first rank makes a NaN. Called where nothing
    else runs: this process forks, since importing torch anew would take longer than anything that is measured.
    """
    for world in worlds:
        os.environ.update(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + world))
        for rank in range(world):
            os.environ["RANK"] = str(rank)
            if (process := os.fork()) == 0:
                _one_rank(rank, Path(folder, str(world)))
            elif os.waitpid(process, 0)[1]:
                raise NanscopeError(f"rank {rank} of {world} did not train", slug="bench-failed")


def _one_rank(rank: int, out: Path) -> NoReturn:
    status = 1
    try:
        tensors = batch(4, 16)
        if rank:
            tensors[1][2, 15] = 0.0
        with watch(out=out):
            loss_of(*tensors).backward()  # type: ignore[no-untyped-call]
        status = 0
    finally:
        os._exit(status)


def _ranks(folder: str, many: int) -> Seconds:
    """The verdict on the run that so many ranks have left."""
    run_dir, _ = find_run(Path(folder, str(many)))
    found: list[Verdict] = []
    taken = seconds_of(lambda: found.append(verdict_of(run_dir)))
    if found[0].bad_steps < 1 or len(histories(run_dir)) != many:
        raise NanscopeError(f"the run of {many} ranks has lines of {len(histories(run_dir))}, or no bad step", slug="bench-failed")
    return taken


class Growing(NamedTuple):
    """Something that grows. unit: what there is more of. sizes: from few to many. taken: by one size. units: in one size."""

    unit: str
    sizes: Sequence[Any]
    taken: Callable[[Any], Seconds]
    units: Callable[[Any], int] = int


def growth(rounds: int, sizes: int) -> tuple[list[Figures], list[str]]:
    """Measure each kind, its sizes by turns. sizes: the smallest of each kind that are measured."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            "calls": Growing("call", CALLS, _calls),
            "healthy tokens": Growing("token", TOKENS, _tokens, prod),
            "bad tokens": Growing("token", BAD, _bad, prod),
            "layers": Growing("layer", LAYERS, _layers),
            "steps": Growing("step", STEPS, _steps),
            "ranks": Growing("rank", RANKS, partial(_ranks, folder)),
        }
        said = []
        if hasattr(os, "fork"):
            alone("growth:jobs", RANKS[:sizes], folder)
        else:
            del kinds["ranks"]
            said.append("ranks are left out: this system does not fork")
        rows = [row for name, kind in kinds.items() for row in _grown(name, kind, kind.sizes[:sizes], rounds)]
    return rows, ["ratios are to the fewest of a kind: near 1 or below is linear, twice as much for twice as many is a square", *said]


def _grown(name: str, kind: Growing, sizes: Sequence[Any], rounds: int) -> list[Figures]:
    """Return the rows of one kind, per unit."""
    times: dict[str, list[list[Seconds]]] = {}
    named = {f"{kind.units(size):,} {name}": size for size in sizes}
    for turn in range(-1, rounds):  # what the first loads is no matter of its size
        for label in rotated(named, turn):
            seconds = kind.taken(named[label])
            many = kind.units(named[label])
            if turn >= 0:
                times.setdefault(label, []).append([Seconds(seconds.wall / many, seconds.cpu / many)])
    first = next(iter(named))
    return [compared(f"{label}, a {kind.unit}", times[label], times[first]) for label in named]
