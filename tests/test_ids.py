"""Which values of a program are token ids: what one of each row was picked by, and what the batch calls so; and no order of a sort."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recorded import leaf, record
from torch import Tensor
from torch.nn.functional import cross_entropy

from nanscope.locate.ids import ids_among, ids_behind

IDS = torch.tensor([[1, 2, 3], [4, 0, 1]])


def gathered(logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.exp(logits.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)).mean()


def entropies(logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.exp(-cross_entropy(logits.flatten(0, 1), chosen.flatten(), reduction="none")).mean()


def in_order(logits: Tensor, chosen: Tensor) -> Tensor:
    order = torch.argsort(logits[..., 0], dim=-1)
    return torch.exp(logits[..., 0].gather(-1, order)).mean()


def counted(logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.exp(logits.log_softmax(-1)[..., 0]).mean() / chosen.max()


@pytest.mark.parametrize(("loss", "shape"), [(gathered, (2, 3)), (entropies, (6,)), (in_order, None), (counted, None)])
def test_what_picks_of_a_vocabulary_is_ids(loss: Callable[..., Tensor], shape: tuple[int, ...] | None) -> None:
    """By gather or by cross entropy; positions in an order, and a count, are none."""
    recorded = record(loss, leaf(2, 3, 5), IDS)
    made = next(call.outs[0] for call in recorded.program.calls if call.name == "exp")
    found = ids_behind(recorded.trace, made or 0, recorded.trace.values[made or 0].shape)
    assert (None if found is None else tuple(recorded.trace.values[found].squeeze(-1).shape)) == shape
    (ids,) = ids_among(recorded.program) or {None}
    assert (ids is not None) == (shape is not None)
    assert ids is None or torch.equal(recorded.tensors[ids].flatten(), IDS.flatten())


def test_what_the_batch_calls_ids_is_ids() -> None:
    """Also where no call of the loss reads it for its content."""

    def loss(log_probs: Tensor, completion_ids: Tensor) -> Tensor:
        return (torch.exp(log_probs) * torch.ones_like(completion_ids)).mean()

    recorded = record(loss, leaf(2, 3), IDS)
    (ids,) = ids_among(recorded.program)
    assert torch.equal(recorded.tensors[ids], IDS)
    assert ids_behind(recorded.trace, recorded.program.output, torch.Size((2, 3))) == ids
    assert ids_behind(recorded.trace, recorded.program.output, torch.Size((3, 2))) is None
