"""How values lie in memory: every answer is that of a list of the positions of all elements."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanscope.capture.account import Balance
from nanscope.capture.entries import Value
from nanscope.capture.layout import copy_of, covers, first_row, is_dense, is_turned, lie_apart, meet, memory_order, overlaps
from nanscope.capture.values import Values

MEMORY = torch.arange(64.0)
VIEWS = st.tuples(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=0, max_size=3), st.integers(0, 12)
)  # (size, stride) of each dimension, offset


def view(drawn: tuple[list[tuple[int, int]], int]) -> Tensor:
    dimensions, offset = drawn
    return MEMORY.as_strided([size for size, _ in dimensions], [stride for _, stride in dimensions], offset)


def value_of(tensor: Tensor) -> Value:
    return Values(Balance(1 << 20), None).leaf(tensor)


def positions(tensor: Tensor) -> list[int]:
    steps = [[n * stride for n in range(size)] for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return sorted(tensor.storage_offset() + sum(index) for index in itertools.product(*steps))


@given(VIEWS)
def test_elements_that_are_one_memory_are_noticed(drawn: tuple[list[tuple[int, int]], int]) -> None:
    """Never missed; and never seen where dimensions lie inside each other, as slices and transposed ones do."""
    tensor = view(drawn)
    found = overlaps(value_of(tensor))
    assert found or len(set(positions(tensor))) == tensor.numel()
    assert not overlaps(value_of(MEMORY.view(4, 4, 4)[1:, ::2].transpose(0, 2)))


@given(VIEWS)
def test_dense_is_without_gaps(drawn: tuple[list[tuple[int, int]], int]) -> None:
    """A dense value takes as many positions as it has elements, one after the other; what covers memory begins where that does."""
    tensor = view(drawn)
    taken = positions(tensor)
    dense = taken == list(range(taken[0], taken[0] + tensor.numel()))
    assert is_dense(value_of(tensor)) == dense
    assert covers(value_of(tensor), tensor.untyped_storage()) == (dense and taken == list(range(64)))
    assert covers(value_of(MEMORY.view(8, 8).t()), MEMORY.untyped_storage())


@given(VIEWS, VIEWS)
def test_two_values_meet_where_they_share_a_position(
    one: tuple[list[tuple[int, int]], int], other: tuple[list[tuple[int, int]], int]
) -> None:
    """Element by element: two columns lie between each other and do not meet."""
    a, b = view(one), view(other)
    assert meet(value_of(a), value_of(b)) == bool(set(positions(a)) & set(positions(b)))
    assert not meet(value_of(MEMORY.view(8, 8)[:, :4]), value_of(MEMORY.view(8, 8)[:, 4:]))


@given(
    st.lists(st.integers(0, 6), max_size=3),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=3, max_size=3),
    st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_what_lies_apart_does_not_meet(strides: list[int], sizes: list[tuple[int, int]], offsets: tuple[int, int]) -> None:
    """Whatever the strides; and the pieces of a split do, along whichever dimension."""
    one, other = (view(([(size[n], stride) for size, stride in zip(sizes, strides, strict=False)], offsets[n])) for n in (0, 1))
    assert not (lie_apart(value_of(one), value_of(other)) and meet(value_of(one), value_of(other)))
    for dim in range(3):
        first, second, _ = MEMORY[:60].view(3, 5, 4).movedim(0, dim).split([1, 1, 1], dim)
        assert lie_apart(value_of(first), value_of(second)) and lie_apart(value_of(second), value_of(first))


@given(VIEWS)
def test_a_copy_lies_as_the_original_where_elements_are_one_memory(drawn: tuple[list[tuple[int, int]], int]) -> None:
    """An expanded row stays one; the elements are the same in any case, and the memory is another."""
    tensor = view(drawn)
    value = value_of(tensor)
    copy = copy_of(value, tensor)
    assert torch.equal(copy, tensor) and copy.untyped_storage().data_ptr() != MEMORY.untyped_storage().data_ptr()
    assert copy.stride() == tensor.stride() or not overlaps(value)


def test_the_order_of_memory() -> None:
    """From the slowest dimension to the fastest."""
    turned = value_of(MEMORY.view(2, 4, 8).permute(2, 0, 1))
    assert memory_order(turned) == (1, 2, 0) and is_turned(turned)
    assert not is_turned(value_of(MEMORY.view(2, 4, 8)))


@given(VIEWS, VIEWS)
def test_rows_of_another_tensor_are_told_by_the_first(
    one: tuple[list[tuple[int, int]], int], other: tuple[list[tuple[int, int]], int]
) -> None:
    """What is said to be rows from some place on is just these elements."""
    whole, part = view(one), view(other)
    start = first_row(whole, part) if whole.dim() else None
    if start is not None:
        assert positions(whole[start : start + len(part)]) == positions(part)
    if whole.dim() and whole.stride(0):
        assert [first_row(whole, whole[row:]) for row in range(len(whole))] == list(range(len(whole)))
