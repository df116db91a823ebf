"""Indices, against numpy; counts and lists as people say them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanscope.errors import words_of
from nanscope.text import count, listed, ravel, show_index, unravel

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_unravel_and_ravel_are_numpys(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Both directions agree with numpy's row-major order, for scalars too, and undo each other."""
    size = int(np.prod(shape, dtype=int))
    flat = data.draw(st.integers(0, size - 1))
    index = unravel(flat, shape)
    assert index == tuple(int(i) for i in np.unravel_index(flat, shape))
    assert ravel(index, shape) == flat


def test_a_scalar_has_the_empty_index() -> None:
    """A tensor without dimensions has one element, at []."""
    assert unravel(0, ()) == ()
    assert ravel((), ()) == 0


def test_an_empty_shape_does_not_divide_by_zero() -> None:
    """Asking for a position in a tensor without elements is pointless, but no crash."""
    assert unravel(0, (3, 0)) == (0, 0)


def test_an_index_of_the_wrong_rank_is_refused() -> None:
    """An index that is too short would silently name another element."""
    with pytest.raises(ValueError):
        ravel((1,), (2, 3))


def test_an_index_is_shown_as_people_write_it() -> None:
    """Brackets, a comma and a space; a scalar's is empty."""
    assert show_index((2, 27)) == "[2, 27]"
    assert show_index(()) == "[]"


@pytest.mark.parametrize(("many", "noun", "words"), [(0, "row", "0 rows"), (1, "row", "1 row"), (2, "batch", "2 batches")])
def test_a_count_and_its_noun_agree(many: int, noun: str, words: str) -> None:
    """One is one."""
    assert count(many, noun) == words


@pytest.mark.parametrize(("words", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")])
def test_a_list_is_said(words: list[str], text: str) -> None:
    """Commas, and one "and"."""
    assert listed(words) == text


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ValueError("a\nb"), "ValueError: a"), (MemoryError(), "MemoryError"), (OSError(" \n"), "OSError"), (KeyError("k"), "KeyError: 'k'")],
)
def test_an_error_is_told_in_one_line(error: Exception, expected: str) -> None:
    """What torch says of an operator that it does not have fills a screen."""
    assert words_of(error) == expected
