"""Following: who made a non-finite value in a model that cannot be recorded, forward by its calls and backward by its nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanscope
from nanscope.capture.follow import FINE, Follower, Kinds, Made, kinds_of, made_backward, part_of
from nanscope.locate.observe import observe_returned
from nanscope.verdict.sentence import what


def followed(model: Callable[..., Tensor], *inputs: Tensor) -> Made | None:
    """What made the bad output of a function."""
    with Follower() as follower:
        output = model(*inputs)
    return follower.made(output)


class Doubled(torch.autograd.Function):
    """Squares and sums in a buffer of its own, out of autograd's sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        buffer = torch.empty(2 * len(x))
        torch.mul(x, x, out=buffer[: len(x)])
        buffer[len(x) :].copy_(x)
        return buffer.view(2, -1).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


FORWARD: dict[str, tuple[Callable[[Tensor], Tensor], list[float], str, tuple[int, ...]]] = {
    # the model, what goes in, the op, the element
    "a plain chain": (lambda x: (x * 2).exp().sum() - 1, [0.0, 50.0], "exp", (1,)),
    "in place": (lambda x: x.clone().mul_(1e30).mul_(1e30).tanh_().sub_(1) + x.pow(60), [1.0, 1e9], "pow", (1,)),
    "a custom function": (lambda x: Doubled.apply(x) * 0 + 1.0, [1.0, 1e30], "mul", (1,)),  # type: ignore[no-untyped-call]
    "beside an -inf mask": (lambda x: ((x * 1e30) * 1e10).masked_fill(x < 0, -math.inf).softmax(0), [-1.0, 1.0, 2.0], "mul", (1,)),
    "a row without anything": (lambda x: x.masked_fill(x < 9, -math.inf).softmax(0).cumsum(0), [1.0, 2.0], "_softmax", (0,)),
    "through views": (lambda x: (x.view(2, 2).t() / 0.0).reshape(-1).flip(0), [0.0, 1.0, 2.0, 3.0], "div", (0, 0)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_the_call_that_made_it_is_found(name: str) -> None:
    """By memory, whoever wrote it last: views, buffers, custom functions and masks are no obstacle."""
    model, numbers, op, index = FORWARD[name]
    made = followed(model, torch.tensor(numbers))
    assert made is not None and made.op == op and not made.foreign
    assert tuple(int(n) for n in torch.unravel_index(torch.tensor(made.flat), made.result.shape)) == index
    assert made.site is not None and made.site.file == __file__


def test_what_came_in_is_told_apart_from_what_was_made() -> None:
    """A NaN weight is nobody's fault in this run."""
    weight = torch.tensor([1.0, math.nan])
    made = followed(lambda x: (x * weight).sum(), torch.ones(2))
    assert made is not None and made.foreign and made.result is weight and made.flat == 1


def normalised(module: nn.Module, size: float) -> Callable[[Tensor], Tensor]:
    """A norm over what is this much larger than what comes in, which is beyond float32 in one row."""
    return lambda x: module((x * size).reshape(4, 1, 2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [1e20, -1e20])
def test_statistics_that_a_norm_only_writes_to_have_no_part_in_what_it_makes(size: float) -> None:
    """A batch norm in training is spoilt by what is infinite in the batch, of whatever sign, and not by its running mean of a step before."""
    norm = nn.BatchNorm1d(1)
    norm.running_mean = torch.full((1,), math.nan)
    made = followed(normalised(norm, size), torch.tensor([1.0] * 6 + [1e30] * 2))
    assert made is not None and (made.op, made.flat, made.foreign) == ("mul", 6, False)
    made = followed(normalised(norm.eval(), 1.0), torch.ones(8))
    assert made is not None and made.foreign and made.result is norm.running_mean


def test_a_finite_output_leads_nowhere() -> None:
    """An infinity that the model absorbed is not asked for."""
    made = followed(lambda x: x.masked_fill(x > 1, -math.inf).softmax(0), torch.tensor([1.0, 2.0]))
    assert made is None or not kinds_of(made.result).nan


@pytest.mark.parametrize(
    ("numbers", "kinds"),
    [
        ([1.0, 2.0], FINE),
        ([], FINE),
        ([math.nan, 1.0], Kinds(nan=True)),
        ([math.inf, 1.0], Kinds(posinf=True)),
        ([-math.inf, 1.0], Kinds(neginf=True)),
        ([math.nan, math.inf, -math.inf], Kinds(True, True, True)),
    ],
)
def test_kinds(numbers: list[float], kinds: Kinds) -> None:
    """NaN does not hide the infinities beside it."""
    assert kinds_of(torch.tensor(numbers)) == kinds and bool(kinds) == (kinds != FINE)


def test_the_node_that_made_a_gradient_bad_is_found() -> None:
    """Gradient in finite, gradient out not; the parameters' own gradients are left alone."""
    x = nn.Parameter(torch.tensor([0.0, 4.0]))
    y = (x.sqrt() * 3).tanh()
    made = made_backward([y], [torch.ones(2)], [x])
    assert made is not None and (made.op, made.flat) == ("sqrt", 0) and math.isinf(float(made.gradient[0]))
    assert x.grad is None
    assert made_backward([(x + 1).sqrt()], [torch.ones(2)], [x]) is None


def test_a_node_belongs_to_the_innermost_part_that_made_it() -> None:
    """Spans are half open, and nested as modules are."""
    spans = [(0, 10, "model"), (2, 5, "model.layer"), (3, 4, "model.layer.norm")]
    assert [part_of(number, spans) for number in (1, 2, 3, 4, 9, 10)] == [
        "model",
        "model.layer",
        "model.layer.norm",
        "model.layer",
        "model",
        "",
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 12)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.proj(hidden).chunk(3, -1)
        found: Tensor = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return found.nan_to_num(0.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.block(hidden, mask)
        return out


def test_attention_that_goes_bad_in_backward_is_placed_in_the_model(tmp_path: Path) -> None:
    """The loss is finite; a fused kernel's backward makes the NaN: the verdict names it and the part of the model."""
    torch.manual_seed(0)
    model = Model()
    mask = torch.zeros(1, 3, 3)
    hidden = torch.full((1, 3, 4), 1e19)
    with torch.no_grad():
        model.block.proj.weight[:8] *= 1e4  # q · k leaves float32
    with nanscope.watch(model, out=tmp_path) as scope:
        loss = model(hidden, mask).sum() * 0 + model(torch.ones(1, 3, 4), mask).sum()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    incident = scope.verdict.incidents[0]
    assert incident.origin.module is not None and "block" in incident.origin.module
    assert incident.origin.op != "unknown"
    assert "scaled_dot_product_attention" in dict(incident.origin.source)[incident.origin.line or 0]


class Opaque(torch.autograd.Function):
    """What nobody can record a program through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Trap(nn.Module):
    """Takes the finite side of what overflowed, between functions that hide it. how: what overflows."""

    def __init__(self, how: str, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.last, self.how, self.checkpointed = nn.Linear(3, 4), nn.Linear(4, 4), how, checkpointed

    def act(self, x: Tensor) -> Tensor:
        if self.how == "exp":
            raised = torch.exp(torch.cat([x[:, :1], x[:, 1:2] + 1e3, x[:, 2:]], 1))
        else:
            raised = 1 / torch.cat([x[:, :1], (x[:, 1:2] * 0).abs(), x[:, 2:]], 1)
        return torch.where(raised < math.inf, raised, x)

    def forward(self, x: Tensor) -> Tensor:
        x = Opaque.apply(self.first(x))  # type: ignore[no-untyped-call]
        x = checkpoint(self.act, x, use_reentrant=False) if self.checkpointed else self.act(x)
        return Opaque.apply(self.last(x))  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("how", "op"), [("exp", "exp"), ("div", "reciprocal")])
def test_a_trap_in_a_model_that_is_followed_is_one_of_forward_s_values(tmp_path: Path, how: str, op: str, checkpointed: bool) -> None:
    """The loss is finite, 0 · inf comes up in the model's backward: what forward had made and dropped is told, and that it was dropped."""
    torch.manual_seed(0)
    model = Trap(how, checkpointed)
    with nanscope.watch(model, out=tmp_path) as scope:
        model(torch.randn(2, 3)).square().mean().backward()
    (incident,) = scope.verdict.incidents
    origin = incident.origin
    assert (incident.phase, incident.cause, origin.op, origin.index) == ("backward", "where_grad_trap", op, (0, 1)), incident.sentence
    assert (origin.variable, origin.value, origin.masked) == ("raised", math.inf, True) and "does not count" in incident.sentence


class Normed(nn.Module):
    """Overflows in one row, and puts all rows together in a norm that nobody can record."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(3)), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.exp(x * self.scale))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("left_out", "masked"), [(None, False), (1, None)])
def test_what_is_followed_into_a_model_counts_if_its_output_does(tmp_path: Path, left_out: int | None, masked: bool | None) -> None:
    """All rows are bad then: where the loss counts them all, it counts the origin; where it leaves one out, nobody knows."""
    x, mask = torch.zeros(4, 3), torch.ones(4, 1)
    x[2, 1] = 100.0
    if left_out is not None:
        mask[left_out] = 0.0
    with nanscope.watch(out=tmp_path) as scope:
        out = Normed()(x)
        ((out - 1.0).square().mean(-1, keepdim=True) * mask).sum().div(mask.sum()).backward()
    (incident,) = scope.verdict.incidents
    assert (incident.phase, incident.origin.op, incident.origin.index, incident.origin.masked) == ("forward", "exp", (2, 1), masked)


def test_what_a_backward_gave_is_told_of_that_and_not_of_the_call() -> None:
    """The call made finite numbers: that it gave NaN would be false."""
    seen = observe_returned("_scaled_dot_product_flash_attention_for_cpu", torch.tensor([0.0, math.nan]), 1, None, "block (Block)")
    told = what(seen)
    assert told.startswith("the backward of _scaled_dot_product_flash_attention_for_cpu gave NaN at [1] of [2]"), told
