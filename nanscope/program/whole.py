"""Where an element of the part of a tensor that this process holds stands in the whole of it. Nobody else is asked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

Place = tuple[tuple[int, ...], tuple[int, ...]]  # index and shape


def whole(tensor: Tensor, index: tuple[int, ...]) -> Place | None:
    """Return where an element stands in all of a DTensor, and the shape of that; None where the part is the whole, or its place unknown.

    index: of the element in the part that is here.
    """
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    coordinate = mesh.get_coordinate() if mesh is not None else None
    if (
        mesh is None
        or coordinate is None
        or not any(placement.is_shard() or hasattr(placement, "split_factor") for placement in placements)
    ):
        return None
    here: list[Sequence[int]] = [range(size) for size in tensor.shape]  # what this rank holds along each dimension
    for axis, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            here[dim] = _part(here[dim], mesh.size(axis), coordinate[axis], getattr(placement, "split_factor", 1))
    if len(here) != len(index) or any(at >= len(held) for at, held in zip(index, here, strict=True)):
        return None
    return tuple(held[at] for at, held in zip(index, here, strict=True)), tuple(tensor.shape)


def _part(positions: Sequence[int], ranks: int, rank: int, groups: int) -> Sequence[int]:
    """Return what a rank holds of positions. groups: first made of them, each of which is then spread over all ranks."""
    parts = [_chunk(group, ranks, rank) for group in (_chunk(positions, groups, number) for number in range(groups))]
    return parts[0] if groups == 1 else list(itertools.chain(*parts))


def _chunk(positions: Sequence[int], count: int, number: int) -> Sequence[int]:
    """Return one of so many chunks, as `torch.chunk` cuts them: the last ones may be short, or empty."""
    size = -(-len(positions) // count)
    return positions[number * size : (number + 1) * size]
