"""What was seen of a flat piece of memory, told of the weight that lies there: `[731] of [5776]` helps nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from nanscope.program.flat import Piece, piece_of
from nanscope.program.numbers import first_nonfinite
from nanscope.snapshot.observation import Observation

FLAT = "a flat partition"

Named = Mapping[int, tuple[str, nn.Parameter]]  # see `ModuleWatch.parameters`


def name_of(tensor: Tensor, named: Named) -> str | None:
    """Return what a weight that is bad is called: of a flat one, what lies at its first bad element; None for one that nobody knows."""
    if id(tensor) in named:
        return named[id(tensor)][0]
    piece = _piece(tensor, first_nonfinite(tensor) or 0, named)
    flat = tensor.ndim == 1 and len(named) > 1 and tensor.numel() >= max(weight.numel() for _, weight in named.values())
    return piece.name if piece is not None else FLAT if flat else None


def in_its_weight(seen: Observation, tensor: Tensor, named: Named) -> Observation:
    """Return what was seen of an element of a weight, or of its gradient, told of the weight of the model that it is an element of."""
    origin = seen.origin
    piece = _piece(tensor, origin.index[0], named) if len(origin.index) == 1 else None
    if piece is None:
        return seen
    return replace(seen, origin=replace(origin, variable=piece.name, index=piece.place, shape=piece.shape, sharded=True))


def _piece(tensor: Tensor, flat: int, named: Named) -> Piece | None:
    return piece_of(tensor, flat, named.values(), named.get(id(tensor), ("", tensor))[0])
