"""Which weight an element of a flat piece of memory belongs to, where a model's weights were laid end to end and cut over ranks.

Asked of the tables that whoever laid them there keeps: the flat weight of the first FSDP has one, DeepSpeed's ZeRO leaves a map on each
weight. Nobody else is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from nanscope.program.local import memory_of
from nanscope.text import unravel
from nanscope.torch_inside import is_flat, shards_of


class Piece(NamedTuple):
    """An element of a weight that lies in a flat one."""

    name: str
    place: tuple[int, ...]
    shape: tuple[int, ...]


def piece_of(tensor: Tensor, flat: int, named: Iterable[tuple[str, Tensor]], name: str | None = None) -> Piece | None:
    """Return which element of which weight an element of a flat tensor is, None if it is none, or nobody knows.

    flat: its position in the part that is here. named: the weights of the model. name: of the tensor itself.
    """
    if is_flat(tensor):
        of = (name or "").rpartition(".")[0].removesuffix("_fsdp_wrapped_module").rstrip(".")
        for own, shape, at, start, size in shards_of(tensor):
            if at <= flat < at + size:
                return Piece(f"{of}.{own}" if of else own, unravel(start + flat - at, shape), shape)
        return None
    memory = memory_of(tensor)
    for own, weight in named:
        fragment = getattr(weight, "_hp_mapping", None)  # ZeRO's: where in the partition a part of the weight lies, and which part it is
        if fragment is None or memory_of(fragment.hp_fragment) != memory:
            continue
        at = flat - fragment.hp_fragment_address.start
        if 0 <= at < fragment.hp_fragment_address.numel:
            return Piece(own, unravel(fragment.lp_fragment_address.start + at, tuple(weight.shape)), tuple(weight.shape))
    return None
