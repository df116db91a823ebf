"""A tensor as source: whatever it holds, the lines make the same again, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanscope.reproduce.literals import listed_numbers, tensor_lines

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 0.5, math.nan, math.inf, -math.inf, 1e-45, 65504.0, 3e38]), st.floats(width=32))


def made(tensor: Tensor, *, grad: bool = False) -> Tensor:
    """What the lines make of it."""
    known: dict[str, Any] = {"torch": torch}
    exec("\n".join(tensor_lines("x", tensor, grad=grad)), known)
    found: Tensor = known["x"]
    return found


def assert_same(one: Tensor, other: Tensor) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    one, other = one.detach(), other.detach()
    if not one.is_floating_point():
        assert torch.equal(one, other)
        return
    nan = torch.isnan(one.double())
    assert torch.equal(nan, torch.isnan(other.double()))
    assert torch.equal(one.double()[~nan], other.double()[~nan]) and torch.equal(one.signbit()[~nan], other.signbit()[~nan])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 5), max_size=3), common=NUMBERS, grad=st.booleans())
def test_the_lines_make_the_same_again(data: st.DataObject, dtype: torch.dtype, shape: list[int], common: float, grad: bool) -> None:
    """Scalars, empty ones, few numbers and many, mostly alike and all different; NaN, infinities, −0 and subnormal ones."""
    many = math.prod(shape)
    numbers = data.draw(st.lists(st.one_of(st.just(common), NUMBERS), min_size=many, max_size=many))
    if not dtype.is_floating_point:
        numbers = [float(int(number) % 100) if math.isfinite(number) else 1.0 for number in numbers]
    tensor = torch.tensor(numbers, dtype=torch.float64).reshape(shape).to(dtype)
    grad = grad and dtype.is_floating_point
    found = made(tensor, grad=grad)
    assert_same(tensor, found)
    assert found.requires_grad is grad and found.is_leaf


@pytest.mark.parametrize(
    ("tensor", "lines"),
    [
        (torch.tensor([[0.1, 104.2]]), ["x = torch.tensor([[0.1, 104.2]])"]),
        (torch.zeros(4, 8), ["x = torch.zeros(4, 8)"]),
        (torch.ones(4, dtype=torch.int64), ["x = torch.ones(4, dtype=torch.int64)"]),
        (torch.full((9,), 0.5), ["x = torch.full((9,), 0.5)"]),
        (torch.tensor([True, False]), ["x = torch.tensor([True, False])"]),
        (torch.tensor([1, 2], dtype=torch.int32), ["x = torch.tensor([1, 2], dtype=torch.int32)"]),
        (torch.zeros(8, 8).index_fill(0, torch.tensor([1]), -60.0)[:2].repeat(1, 4), ["x = torch.zeros(2, 32)", "x[1] = -60.0"]),
    ],
)
def test_few_words_are_made_of_it(tensor: Tensor, lines: list[str]) -> None:
    """Plain numbers in plain sight, and what all have in common said once."""
    assert tensor_lines("x", tensor, grad=False) == lines


def test_a_large_tensor_is_zeros_with_what_differs() -> None:
    """Its lines come before it wants a gradient, since a leaf that does may not be written to."""
    tensor = torch.zeros(16, 16)
    tensor[3, 4], tensor[5, 6] = 104.2, math.nan
    assert tensor_lines("x", tensor, grad=True) == [
        "x = torch.zeros(16, 16)",
        "x[3, 4] = 104.2",
        "x[5, 6] = torch.nan",
        "x.requires_grad_()",
    ]
    assert_same(made(tensor, grad=True), tensor)
    assert listed_numbers(tensor) == 2 and listed_numbers(torch.randn(16, 16)) == 256
