"""Which weight an element of a flat piece of memory belongs to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from nanscope.program.flat import piece_of


def zero(flat: Tensor, weight: nn.Parameter, at: int, begins: int, size: int) -> nn.Parameter:
    """A weight as ZeRO leaves it: where in its partition a part of it lies."""
    weight._hp_mapping = SimpleNamespace(  # type: ignore[attr-defined]
        hp_fragment=flat.narrow(0, at, size),
        hp_fragment_address=SimpleNamespace(start=at, numel=size),
        lp_fragment_address=SimpleNamespace(start=begins, numel=size),
    )
    return weight


def test_a_partition_of_zero_is_told_by_the_maps_on_the_weights() -> None:
    """The end of one weight, and the beginning of the next; what pads it is none."""
    flat = torch.zeros(10)
    named = [
        ("first", zero(flat, nn.Parameter(torch.zeros(2, 3)), 0, 2, 4)),
        ("second", zero(flat, nn.Parameter(torch.zeros(5)), 4, 0, 5)),
        ("elsewhere", zero(torch.zeros(10), nn.Parameter(torch.zeros(5)), 0, 0, 5)),
        ("plain", nn.Parameter(torch.zeros(5))),
    ]
    assert [piece_of(flat, at, named) for at in (1, 4, 9)] == [("first", (1, 0), (2, 3)), ("second", (0,), (5,)), None]


@pytest.mark.parametrize(
    ("name", "expected"), [("_flat_param", "layer.weight"), ("block._fsdp_wrapped_module._flat_param", "block.layer.weight")]
)
def test_the_flat_weight_of_fsdp_is_told_by_its_own_table(name: str, expected: str) -> None:
    """Of a weight that lies on two ranks the part that is here; one that lies on the other is none."""
    flat = nn.Parameter(torch.zeros(6))
    here = SimpleNamespace(in_shard=True, offset_in_shard=2, intra_param_start_idx=4, numel_in_shard=4)
    away = SimpleNamespace(in_shard=False, offset_in_shard=None, intra_param_start_idx=None, numel_in_shard=None)
    table = {"_is_flat_param": True, "_fqns": ("away", "layer.weight"), "_shapes": ((4,), (2, 4)), "_shard_param_infos": (away, here)}
    for key, value in table.items():
        setattr(flat, key, value)
    assert piece_of(flat, 3, (), name) == (expected, (1, 1), (2, 4))
    assert piece_of(flat, 0, (), name) is None
