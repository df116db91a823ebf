"""What is seen of the inside of a model before its graph is differentiated."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from nanscope.capture.modules import ModuleCall
from nanscope.capture.parts import Parts
from nanscope.snapshot.observation import MODULE, Came
from nanscope.watching.within import is_known, seen_within

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"), reason="before torch 2.10 nobody tells whether a hook would be asked"
)


class Model(nn.Module):
    """A layer, and a part that overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.burst = nn.Linear(3, 3), nn.Softplus()


def run(model: Model, parts: Parts, gain: float = 100.0) -> tuple[Tensor, list[ModuleCall]]:
    """Call it as hooks see it."""
    x = model.layer(torch.ones(2, 3))
    parts.enter(model.burst)
    x = torch.tanh(torch.exp(x * 0 + gain) * torch.zeros(3))
    parts.leave(model.burst)
    return x, [ModuleCall(model, (), {}, [], [], ())]


def test_the_part_is_told_by_its_path() -> None:
    """And the element, as of any other origin."""
    parts = Parts()
    output, calls = run(Model(), parts)
    found = seen_within([torch.ones(2), output], calls, parts.take())
    assert found is not None
    seen, (slug, text) = found
    assert (seen.origin.op, seen.origin.module, seen.origin.value) == ("exp", "burst (Softplus)", math.inf)
    assert (seen.origin.index, seen.origin.shape, seen.came) == ((0, 0), (2, 3), Came.MADE)
    assert slug == "kept_by_autograd" and "what came before it was not kept (add, mul, addmm)" in text


def test_what_is_not_in_a_part_is_in_the_model() -> None:
    """The outermost module, which no hook tells the inside of."""
    output, calls = run(Model(), Parts())
    found = seen_within([output], calls, [])
    assert found is not None and found[0].origin.module == "Model"


def test_a_weight_that_others_hold_is_no_operation() -> None:
    """It came out of the model, and out of that part of it."""
    model, parts = Model(), Parts()
    with torch.no_grad():
        model.layer.weight.fill_(math.nan)
    output, calls = run(model, parts)
    found = seen_within([output], calls, parts.take())
    assert found is not None and (found[0].origin.op, found[0].came) == (MODULE, Came.MODEL)


def test_nothing_is_seen_of_a_model_that_is_fine() -> None:
    """A loss that is bad by itself."""
    parts = Parts()
    output, calls = run(Model(), parts, gain=1.0)
    assert seen_within([output], calls, parts.take()) is None


def test_a_loss_on_a_cpu_is_known() -> None:
    """Elsewhere it is waited for once a step could not be told."""
    parts = Parts()
    assert is_known(torch.ones(()), parts)
    away = torch.ones((), device="meta")
    assert not is_known(away, parts)
    parts.eager = True
    assert is_known(away, parts)
