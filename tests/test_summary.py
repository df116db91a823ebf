"""The one-line picture of a tensor: its numbers against a loop over Python numbers, and how it reads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensors import listed, tensors
from torch import Tensor

import nanscope
from nanscope.program.summary import TensorSummary, summarise
from nanscope.text import unravel

INF, NAN = math.inf, math.nan


def counted(tensor: Tensor, mask: Tensor | None) -> TensorSummary:
    """The summary by a loop, without torch's arithmetic."""
    elements = listed(tensor)
    nan = posinf = neginf = masked = 0
    finite: list[float] = []
    first: tuple[int, ...] | None = None
    reads = [True] * len(elements) if mask is None else [bool(m) for m in mask.expand(tensor.shape).flatten().tolist()]
    for position, element in enumerate(elements):
        parts = (element.real, element.imag) if isinstance(element, complex) else (float(element),)
        if all(math.isfinite(part) for part in parts):
            finite.append(abs(element) if isinstance(element, complex) else float(element))
            continue
        worst = next(part for part in parts if not math.isfinite(part))
        nan, posinf, neginf = nan + math.isnan(worst), posinf + (worst == INF), neginf + (worst == -INF)
        first = unravel(position, tensor.shape) if first is None else first
        masked += not reads[position]
    dtype, extremes = str(tensor.dtype).removeprefix("torch."), (min(finite, default=None), max(finite, default=None))
    return TensorSummary(tuple(tensor.shape), dtype, *extremes, nan, posinf, neginf, first, None if mask is None else masked)


@given(tensors())
def test_a_summary_is_what_a_loop_counts(tensor: Tensor) -> None:
    """NaN, infinities, extremes and the first bad element, for every dtype and shape; and it is one line."""
    assert summarise(tensor) == counted(tensor, None)
    assert len(str(summarise(tensor)).splitlines()) == 1


@given(tensors(), st.data())
def test_masked_elements_are_told_apart(tensor: Tensor, data: st.DataObject) -> None:
    """Bad elements that the loss does not read are counted on their own; a mask broadcasts as tensors do."""
    shape = tuple(1 if data.draw(st.booleans()) else n for n in tensor.shape)
    size = math.prod(shape)
    mask = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)), dtype=torch.int64).reshape(shape)
    mask = mask.to(data.draw(st.sampled_from([torch.bool, torch.int64, torch.float32])))
    assert summarise(tensor, mask) == counted(tensor, mask)


LINES = (
    (torch.tensor([[1.5, -2.0]]), None, "[1, 2] float32, −2 … 1.5"),
    (torch.ones(2, 3, dtype=torch.bool), None, "[2, 3] bool, 1"),
    (torch.arange(5), None, "[5] int64, 0 … 4"),
    (torch.tensor(0.25, dtype=torch.bfloat16), None, "[] bfloat16, 0.25"),
    (torch.zeros(0, 3), None, "[0, 3] float32, empty"),
    (torch.tensor([[1.0, NAN], [INF, NAN]]), None, "[2, 2] float32, 1, 3 of 4 bad, first at [0, 1], +inf!, NaN! ×2"),
    (torch.tensor([-INF, 1.0, 0.0]), torch.tensor([0, 1, 1]), "[3] float32, 0 … 1, 1 of 3 bad, first at [0], 1 masked, −inf!"),
    (torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), "[2] float32, 0 … 1"),
    (torch.tensor(NAN), None, "[] float32, NaN!"),
)


@pytest.mark.parametrize(("tensor", "mask", "line"), LINES, ids=[line for _, _, line in LINES])
def test_the_line(tensor: Tensor, mask: Tensor | None, line: str) -> None:
    """Shape, dtype, extremes, and what is bad last and loud."""
    assert str(nanscope.summarise(tensor, mask)) == line


def test_a_mask_that_does_not_fit_is_an_error() -> None:
    """The message names both shapes."""
    with pytest.raises(ValueError, match=r"shape \[3\] does not broadcast to \[2, 4\]"):
        summarise(torch.zeros(2, 4), torch.ones(3))


def test_gradients_do_not_flow_into_a_summary() -> None:
    """Looking at a tensor leaves the graph alone."""
    x = torch.tensor([1.0, NAN], requires_grad=True)
    y = x * 2
    assert summarise(y).nan == 1
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
