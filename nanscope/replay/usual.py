"""What is usual beside a spike: by the rest of its batch a fix is bounded, and by that it is judged.

    spread      0.31 0.28 3.4e-08 0.44      what goes into no spike is 0.28 … 0.44: a floor of 0.06 leaves it alone, and 1e-4 a spike

A constant is the wrong measure: what is merely less harsh than the spike was ruins the step as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from nanscope.locate.spike import JUMP
from nanscope.replay.patch import Patch
from nanscope.replay.refill import Fed, offending, stands_out
from nanscope.snapshot.history import Entry

ROOM = 10.0  # times what is usual: so far a fix bounds a spike, and so large may a loss be with it


def usual(patch: Patch, position: int) -> Tensor | None:
    """Return what an operand of a spike is elsewhere, in float64; None if it is no spike, or nothing is elsewhere.

    position: of the operand in the origin's call; where the origin came in, it is itself meant.
    """
    result = patch.origin.value_id
    if not math.isfinite(patch.origin.value) or not stands_out(patch.values[result], patch.origin.value):
        return None
    return elsewhere(patch, position)


def elsewhere(patch: Patch, position: int) -> Tensor | None:
    """Return what an operand is where it did no harm, in float64; None if it is nowhere else, or is of another shape."""
    result = patch.origin.value_id
    bad, content = offending(patch, result), patch.values[result]
    where: Tensor | None = bad
    if patch.origin.call is not None:
        value = patch.operand(position)
        content = patch.values[result if value is None else value]
        where = None if value is None or not content.is_floating_point() else Fed(position, bad, content).where
    if where is None:
        return None
    rest = content[~where].detach().double()
    rest = rest[torch.isfinite(rest)]
    return rest if rest.numel() else None


def floor_of(denominators: Tensor) -> float:
    """Return a floor for what is usual: none of it lies below, and, where that can be had, the floor is not far below its median."""
    sizes = denominators.abs()
    sizes = sizes[sizes > 0]
    low, least = float(sizes.median()) / ROOM, float(sizes.min())
    return shortest_within(low, min(2 * low, least)) if least > low else shortest_within(least / 2, least)


def shortest_within(low: float, high: float) -> float:
    """Return the number with the fewest digits between two, the largest of those."""
    for digits in range(17):
        unit = 10.0 ** (math.floor(math.log10(max(abs(low), abs(high)))) - digits)
        found = float(f"{math.floor(high / unit * (1 + 1e-12)) * unit:.{digits + 1}g}")
        if low <= found <= high:
            return found
    return high


def usual_loss(history: Iterable[Entry]) -> float | None:
    """Return the largest loss of the steps of a run that were no spike, None if none is known.

    It is at least 1: a small number that becomes 1 is no spike.
    """
    sizes = [abs(entry.loss) for entry in history if entry.loss is not None and math.isfinite(entry.loss) and not entry.bad]
    largest = 1.0
    for size in sizes:
        largest = max(largest, size) if size <= JUMP * largest else largest
    return largest if sizes else None
