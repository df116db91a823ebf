"""What was seen of a flat piece of memory is told of the weight that lies there."""

from __future__ import annotations

import math

import torch
from torch import nn

from nanscope.locate.observe import observe_made
from nanscope.snapshot.observation import Phase
from nanscope.watching.laid import FLAT, in_its_weight, name_of


def test_a_weight_that_is_known_keeps_its_name_and_its_index() -> None:
    """It is no part of anything."""
    weight = nn.Parameter(torch.tensor([1.0, math.nan]))
    named = {id(weight): ("bias", weight)}
    seen = observe_made("parameter", weight, 1, None, "", Phase.WEIGHTS, "bias")
    assert name_of(weight, named) == "bias" and in_its_weight(seen, weight, named) == seen


def test_a_flat_weight_whose_owner_tells_nothing_is_called_so() -> None:
    """Beside the weights of a model; one alone may be anything."""
    model, flat = nn.Linear(2, 2), nn.Parameter(torch.zeros(6))
    named = {id(weight): (name, weight) for name, weight in model.named_parameters()}
    assert name_of(flat, named) == FLAT
    assert name_of(flat, {}) is None and name_of(nn.Parameter(torch.zeros(2, 3)), named) is None


def test_the_index_is_that_in_the_weight() -> None:
    """As of any weight that a rank holds a part of."""
    flat = nn.Parameter(torch.zeros(4))
    for key, value in {"_is_flat_param": True, "_fqns": ("w",), "_shapes": ((2, 3),)}.items():
        setattr(flat, key, value)

    class Info:
        in_shard, offset_in_shard, intra_param_start_idx, numel_in_shard = True, 0, 2, 4

    flat._shard_param_infos = (Info,)  # type: ignore[attr-defined]
    named = {id(flat): ("_flat_param", flat)}
    told = in_its_weight(observe_made("parameter", flat, 1, None, "", Phase.WEIGHTS, "_flat_param"), flat, named).origin
    assert (told.variable, told.index, told.shape, told.sharded) == ("w", (1, 0), (2, 3), True)
