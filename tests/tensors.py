"""Tensors of any dtype and shape, sprinkled with everything that is special about numbers, for properties."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from nanscope.torch_inside import release_of

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
NUMBERS_ARE_FILLED_IN = release_of(torch.__version__) >= (2, 15)  # `x[mask] = 0.0` is no write of a tensor any more
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
