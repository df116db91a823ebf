"""What autograd has kept tells the first bad value of a forward pass, without a run, a hook or another rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanscope.capture import kept
from nanscope.capture.kept import KeptBad, first_kept
from nanscope.capture.parts import Parts
from nanscope.torch_inside import is_at_hand

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"), reason="before torch 2.10 nobody tells whether a hook would be asked"
)

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def leaf() -> Tensor:
    return X.clone().requires_grad_()


def told(output: Tensor) -> tuple[str, float]:
    """The operation and the first bad element."""
    found = first_kept([output], [])
    assert found is not None
    values = found.value.detach().flatten()
    return found.op, float(values[~values.isfinite()][0])


def masked(x: Tensor) -> Tensor:
    scores = (x @ x.T).masked_fill(torch.ones(2, 2, dtype=torch.bool), -math.inf)
    return scores.softmax(-1) @ x


MADE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "exp": (lambda x: torch.tanh(torch.exp(x.abs() * 0 + 100.0) * 0), "exp"),
    "log": (lambda x: (torch.log(x * 0 - 1) * 2).sigmoid(), "log"),
    "div": (lambda x: torch.tanh(torch.sin(x / (x * 0)) * 2), "div"),
    "through a view": (lambda x: torch.sqrt(-x.abs() - 1).view(4, 2).T.contiguous().tanh().exp(), "sqrt"),
    "softmax of what is masked": (masked, ""),
    "infinity that a mask lets in": (lambda x: (x.masked_fill(x > 0, -math.inf).exp() * x.masked_fill(x > 0, -math.inf)).tanh(), "mul"),
}


@pytest.mark.parametrize("case", MADE)
def test_the_operation_that_made_it_is_told(case: str) -> None:
    """The first bad value on the way to the output, and what made it."""
    make, op = MADE[case]
    assert told(make(leaf()))[0] == op


def test_nothing_is_told_of_what_is_finite() -> None:
    """Nor of what no graph leads to."""
    assert first_kept([leaf().exp()], []) is None
    assert first_kept([torch.full((2,), math.nan)], []) is None


def test_a_weight_that_is_bad_or_gone_is_no_operation() -> None:
    """Whoever gathers weights of others may have been sent a NaN: then no operation of this rank is blamed."""
    weight = nn.Parameter(torch.full((4, 4), math.nan))
    assert told(torch.tanh(leaf() @ weight).exp())[0] == ""
    gone = nn.Parameter(torch.ones(4, 4))
    output = torch.tanh(leaf() @ gone + math.nan).exp()
    gone.untyped_storage().resize_(0)
    assert told(output)[0] == ""
    gone._is_flat_param = True  # type: ignore[attr-defined]
    gone.untyped_storage().resize_(64)
    assert told(torch.tanh(leaf() @ gone + math.nan).exp())[0] == ""


def test_what_a_function_of_others_gives_is_not_taken_for_an_operation() -> None:
    """It may have asked other ranks."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * math.nan

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    assert told(torch.tanh(Gather.apply(leaf())).exp())[0] == ""  # type: ignore[no-untyped-call]


def test_no_hook_is_asked() -> None:
    """A checkpoint would compute, and offloading would fetch: what they keep is left alone, and what is around it tells."""
    asked: list[str] = []

    def inner(x: Tensor) -> Tensor:
        asked.append("computed")
        return torch.exp(x * 0 + 100.0).sin()

    output = torch.tanh(checkpoint(inner, leaf(), use_reentrant=False) + 1).exp()
    assert first_kept([output], []) is not None and asked == ["computed"]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: asked.append("fetched") or t):
        output = torch.exp(leaf() * 0 + 100.0).sin()
    assert first_kept([output], []) is not None and asked == ["computed"]


def test_the_graph_is_differentiated_as_before() -> None:
    """To look at what is kept changes neither the gradient nor what may be asked again."""
    grads = []
    for looks in (False, True):
        x = leaf()
        output = torch.log(torch.tanh(x)).sin()
        if looks:
            assert first_kept([output], []) is not None
        output.sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
        with pytest.raises(RuntimeError):
            output.sum().backward()
    assert torch.equal(grads[0].view(torch.int32), grads[1].view(torch.int32))


def test_the_innermost_part_around_it_is_told() -> None:
    """By the numbers of the nodes that were made in each."""
    parts, model = Parts(), nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4))

    def forward(x: Tensor) -> Tensor:
        for number, part in enumerate(model):
            parts.enter(part)
            x = part(x) if number != 1 else torch.tanh(torch.log(x.abs() * 0 - 1) + x)
            parts.leave(part)
        return x

    found = first_kept([forward(leaf())], parts.take())
    assert isinstance(found, KeptBad) and (found.op, found.module) == ("log", model[1])


def test_what_was_written_to_since_is_not_read() -> None:
    """Autograd would refuse it, too; what is left tells less."""
    x = leaf()
    middle = torch.exp(x * 0 + 100.0)
    output = torch.sin(middle * 2)
    with torch.no_grad():
        middle.zero_()
    assert first_kept([output], []) is not None


def test_it_is_told_what_was_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last value that is known to be finite and the first that is not."""
    found = first_kept([torch.exp(torch.tanh(leaf()).abs() * 3 + 100.0).sin()], [])
    assert found is not None and found.between == ("add", "mul")
    monkeypatch.setattr(kept, "MOST_NODES", 1)
    assert first_kept([torch.exp(leaf() * 0 + 100.0).sin()], []) is not None
    assert is_at_hand(leaf().exp().grad_fn._raw_saved_result)  # type: ignore[union-attr]
