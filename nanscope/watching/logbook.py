"""What other ranks wrote into the run directory, and waiting for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.locate.observe import gradient_observation
from nanscope.program.numbers import first_nonfinite
from nanscope.snapshot.file import load
from nanscope.snapshot.step import Snapshot

PATIENCE = 3.0  # seconds that a finished rank waits for the file of the one that made a NaN


def has_peers() -> bool:
    """Is this process one of several that train together?"""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def arrived(name: str, gradient: Tensor) -> dict[str, Any]:
    """Return, as a snapshot keeps it, a gradient that is bad although this rank's own backward, made once more, is not."""
    flat = first_nonfinite(gradient.detach()) or 0
    return {"outside": True, "allreduce": True, "location": gradient_observation("all_reduce", name, gradient, flat, None)}


def of_other_ranks(folder: Path, own: Sequence[Snapshot], *, wait: bool) -> dict[str, Snapshot]:
    """Return the snapshots that other ranks wrote into the same folder for the steps at which a NaN arrived from elsewhere, by path.

    Ranks tell each other through files: a collective here could be one that only some ranks enter.
    """
    steps = {snapshot.step for snapshot in own if snapshot.observed.get("allreduce")}
    ranks = {snapshot.rank for snapshot in own}
    found: dict[str, Snapshot] = {}
    until = time.monotonic() + (PATIENCE if wait else 0.0)
    while steps:
        for path in sorted(path for step in steps for path in folder.glob(f"step-{step:06d}.rank*.safetensors")):
            if str(path) not in found:
                with contextlib.suppress(NanscopeError):
                    snapshot = load(path)
                    if snapshot.rank not in ranks:
                        found[str(path)] = snapshot
        if any(not snapshot.observed.get("allreduce") for snapshot in found.values()) or time.monotonic() >= until:
            break
        time.sleep(0.1)
    return {path: snapshot for path, snapshot in found.items() if not snapshot.observed.get("allreduce")}
