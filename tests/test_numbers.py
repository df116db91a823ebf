"""Questions to numbers: what the passes over memory answer, against a loop over Python numbers."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensors import listed, tensors
from torch import Tensor

from nanscope.program.numbers import count_bad, exponent_limit, headroom_bits, is_finite, norms, plain, quantiles


@given(tensors())
def test_is_finite_is_exact(tensor: Tensor) -> None:
    """One pass over memory tells what a loop would."""
    assert bool(is_finite(tensor)) == all(cmath.isfinite(element) for element in listed(tensor))
    assert is_finite(tensor).shape == () and is_finite(tensor).dtype is torch.bool


@given(st.lists(tensors(), max_size=6))
def test_count_bad_is_exact(found: list[Tensor]) -> None:
    """Many tensors of any dtypes in one call: as many are bad as a loop finds, whether their norm overflows or not."""
    assert count_bad(found) == sum(not all(cmath.isfinite(element) for element in listed(tensor)) for tensor in found)


@given(st.lists(tensors(), max_size=6))
def test_a_norm_carries_every_bad_element(found: list[Tensor]) -> None:
    """One float32 norm a tensor; where an element is bad, so is the norm, and where the norm is finite it is the 2-norm."""
    got = norms(found)
    assert got.shape == (len(found),) and got.dtype is torch.float32
    for tensor, norm in zip(found, got.tolist(), strict=True):
        elements = [complex(element) for element in listed(tensor)]
        if not all(cmath.isfinite(element) for element in elements):
            assert not math.isfinite(norm)
        elif math.isfinite(norm):
            wanted = math.hypot(*(abs(element) for element in elements)) if elements else 0.0
            assert math.isclose(norm, wanted, rel_tol=0.02, abs_tol=1e-3)  # half precision accumulates coarsely


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_finite_tensor_whose_norm_overflows_is_not_bad(dtype: torch.dtype) -> None:
    """Squares leave the range long before the elements do: the exact look follows, and nothing is reported."""
    huge = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isinf(float(norms([huge]))) or dtype is torch.float16
    assert count_bad([huge]) == 0
    assert count_bad([huge, torch.full((3,), math.inf, dtype=dtype), torch.ones(3)]) == 1
    assert bool(is_finite(huge))


def test_nothing_is_fine() -> None:
    """No tensors, and tensors without elements."""
    assert count_bad([]) == 0
    assert norms([]).shape == (0,)
    assert count_bad([torch.zeros(0), torch.zeros(2, 0, dtype=torch.bfloat16)]) == 0


def test_gradients_do_not_flow_into_an_answer() -> None:
    """Looking at a tensor leaves the graph alone."""
    x = torch.tensor([1.0, math.nan], requires_grad=True)
    y = x * 2
    assert not is_finite(y).requires_grad and not norms([y]).requires_grad and not plain(y).requires_grad
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 88.7228), (torch.bfloat16, 88.7228), (torch.float16, 11.0899), (torch.float64, 709.7827)]
)
def test_exp_overflows_right_above_its_limit(dtype: torch.dtype, limit: float) -> None:
    """The limit is where exp in this dtype turns infinite."""
    assert math.isclose(exponent_limit(dtype), limit, rel_tol=1e-3)
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    below, above = torch.tensor([limit * 0.99, limit * 1.01], dtype=wide).exp().to(dtype)
    assert math.isfinite(below) and math.isinf(above)


def test_headroom_counts_doublings() -> None:
    """65504 has no doubling left in float16; half of it has one; nothing at all has no end of them."""
    assert headroom_bits(65504.0, torch.float16) == 0
    assert headroom_bits(32752.0, torch.float16) == 1
    assert headroom_bits(0.0, torch.float32) == math.inf
    assert headroom_bits(2.0**200, torch.float32) < 0


@given(st.lists(st.floats(-1e300, 1e300) | st.integers(-2, 2).map(float), min_size=1), st.floats(0, 1))
def test_quantiles_are_those_of_the_sorted_numbers(numbers: list[float], share: float) -> None:
    """Bit for bit what torch finds, which sorts; with elements that are alike, too."""
    flat = torch.tensor(numbers, dtype=torch.float64)
    assert quantiles(flat, share, 0.5) == torch.quantile(flat, torch.tensor([share, 0.5], dtype=torch.float64)).tolist()
