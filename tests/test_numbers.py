"""Summaries: what the one-pass guard and the full summary say, against a loop over Python numbers."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanscope.program.numbers import count_bad, exponent_limit, headroom_bits, is_finite, norms, plain
from nanscope.program.summary import TensorSummary, summarise
from nanscope.text import unravel

FLOATS = {
    torch.float64: (5e-324, 1.7e308),
    torch.float32: (1e-45, 3.4e38),
    torch.bfloat16: (1e-40, 3.3e38),
    torch.float16: (6e-8, 65504.0),
    torch.float8_e4m3fn: (0.002, 448.0),
    torch.float8_e5m2: (1.6e-5, 57344.0),
}  # dtype → a subnormal and a magnitude near the end of its range
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *WHOLE, *COMPLEX)
SHAPES = ((), (1,), (0,), (2, 0, 3), (7,), (3, 4), (2, 3, 2), (1, 5, 1))


def numbers(dtype: torch.dtype) -> st.SearchStrategy[Any]:
    """Numbers that a tensor of this dtype may hold, sprinkled with everything that is special about it."""
    if dtype in FLOATS:
        tiny, huge = FLOATS[dtype]
        special = [math.nan, math.inf, -math.inf, 0.0, -0.0, tiny, -tiny, huge, -huge]
        return st.one_of(st.sampled_from(special), st.floats(-100, 100, width=16))
    if dtype in COMPLEX:
        parts = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.5, -2.0, 3e38, 1e300])
        return st.builds(complex, parts, parts)
    return st.booleans() if dtype is torch.bool else st.integers(0 if dtype is torch.uint8 else -100, 100)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
    size = math.prod(shape)
    values = draw(st.lists(numbers(dtype), min_size=size, max_size=size))
    wide = torch.complex128 if dtype in COMPLEX else torch.float64 if dtype in FLOATS else torch.int64
    tensor = torch.tensor(values, dtype=wide).to(dtype).reshape(shape)
    if len(shape) == 2 and draw(st.booleans()):
        tensor = tensor.t().contiguous().t()  # same content, other strides
    return tensor


def listed(tensor: Tensor) -> list[Any]:
    """The elements as Python numbers, in row-major order."""
    wide = tensor if tensor.is_complex() else tensor.double()
    return list(wide.contiguous().flatten().tolist())


def counted(tensor: Tensor, mask: Tensor | None) -> TensorSummary:
    """The summary by a loop, without torch's arithmetic."""
    elements = listed(tensor)
    nan = posinf = neginf = zeros = masked = 0
    finite: list[float] = []
    first: tuple[int, ...] | None = None
    reads = [True] * len(elements) if mask is None else [bool(m) for m in mask.expand(tensor.shape).flatten().tolist()]
    for position, element in enumerate(elements):
        parts = (element.real, element.imag) if isinstance(element, complex) else (float(element),)
        if all(math.isfinite(part) for part in parts):
            finite.append(abs(element) if isinstance(element, complex) else float(element))
            zeros += element == 0
            continue
        worst = next(part for part in parts if not math.isfinite(part))
        nan, posinf, neginf = nan + math.isnan(worst), posinf + (worst == math.inf), neginf + (worst == -math.inf)
        first = unravel(position, tensor.shape) if first is None else first
        masked += not reads[position]
    return TensorSummary(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        numel=len(elements),
        nan=nan,
        posinf=posinf,
        neginf=neginf,
        zeros=zeros,
        minimum=min(finite, default=None),
        maximum=max(finite, default=None),
        absmax=max((abs(x) for x in finite), default=None),
        mean=math.fsum(x / len(finite) for x in finite) if finite else None,
        first=first,
        masked=None if mask is None else masked,
    )


def same(got: TensorSummary, wanted: TensorSummary) -> None:
    """Everything is equal; the mean up to the order of additions."""
    from dataclasses import replace

    assert replace(got, mean=None) == replace(wanted, mean=None)
    assert (got.mean is None) == (wanted.mean is None)
    if got.mean is not None and wanted.mean is not None:
        scale = wanted.absmax or 1.0
        assert math.isclose(got.mean, wanted.mean, rel_tol=1e-9, abs_tol=1e-9 * scale) or scale > 1e300  # sums overflow in float64 too


@given(tensors())
def test_a_summary_is_what_a_loop_counts(tensor: Tensor) -> None:
    """NaN, infinities, zeros, extremes and the first bad element, for every dtype and shape."""
    same(summarise(tensor), counted(tensor, None))


@given(tensors(), st.data())
def test_masked_elements_are_told_apart(tensor: Tensor, data: st.DataObject) -> None:
    """Bad elements that the loss does not read are counted on their own; a mask broadcasts as tensors do."""
    shape = tuple(1 if data.draw(st.booleans()) else n for n in tensor.shape)
    size = math.prod(shape)
    mask = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)), dtype=torch.int64).reshape(shape)
    mask = mask.to(data.draw(st.sampled_from([torch.bool, torch.int64, torch.float32])))
    same(summarise(tensor, mask), counted(tensor, mask))


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
    empty = summarise(torch.zeros(0, 3), torch.ones(3))
    assert (empty.numel, empty.nonfinite, empty.first, empty.absmax, empty.masked) == (0, 0, None, None, 0)


def test_a_mask_that_does_not_fit_is_an_error() -> None:
    """The message names both shapes."""
    with pytest.raises(ValueError, match=r"shape \[3\] does not broadcast to \[2, 4\]"):
        summarise(torch.zeros(2, 4), torch.ones(3))


def test_gradients_do_not_flow_into_a_summary() -> None:
    """Looking at a tensor leaves the graph alone."""
    x = torch.tensor([1.0, math.nan], requires_grad=True)
    y = x * 2
    assert summarise(y).nan == 1
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
