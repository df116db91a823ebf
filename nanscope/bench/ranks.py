"""A step of DistributedDataParallel on two ranks with gloo, each a process of its own: both train under each tool by turns."""

from __future__ import annotations

import datetime
import socket
import tempfile
from pathlib import Path
from typing import Any

from torch import distributed, nn

from nanscope.bench.measure import Figures, answer_of, start
from nanscope.bench.steps import ppo
from nanscope.bench.tools import OURS
from nanscope.bench.turns import by_turns

WORLD = 2
TIMED = 10  # steps of a round
PATIENCE = datetime.timedelta(seconds=120)


def one_of_them(rounds: int, folder: str) -> list[Any]:
    """Train as one rank, and return its rows and what is to be said below: a process that was told its rank."""
    distributed.init_process_group("gloo", timeout=PATIENCE)
    try:
        work = ppo("cpu", parallel)
        work.folder = Path(folder)
        rows, said = by_turns(work, OURS, rounds, TIMED)
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    return [[row.to_json() for row in rows], said]


def parallel(model: nn.Module) -> nn.Module:
    """Return a model whose gradients are averaged over the ranks."""
    return nn.parallel.DistributedDataParallel(model)


def ddp(rounds: int) -> tuple[list[Figures], list[str]]:
    """Train on two ranks, and return what the first of them has measured; the others' bits are judged, too."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(WORLD)}
        free.close()
        ranks = [start("ranks:one_of_them", rounds, folder, **shared, RANK=str(rank)) for rank in range(WORLD)]
        try:
            found = [answer_of(process, f"rank {rank}") for rank, process in enumerate(ranks)]
        finally:
            for process in ranks:
                process.kill()
    rows, said = found[0]
    return [Figures.from_json(row) for row in rows], [*said, f"{WORLD} ranks; the figures are those of the first"]


def is_possible() -> bool:
    """Can ranks of this machine talk to each other?"""
    return distributed.is_available() and distributed.is_gloo_available()
