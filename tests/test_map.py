"""The map: the window around the bad element, wherever it lies, and the cells that the loss does not count."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recorded import record
from torch import Tensor

from nanscope.replay.tries import NOTHING
from nanscope.verdict.incident import Picture
from nanscope.verdict.map import picture_of

MAP_ROWS, MAP_COLUMNS = 24, 64
ROWS, COLUMNS = 60, 150  # more than a map shows


def drawn(loss: Callable[..., Tensor], *tensors: Tensor) -> Picture | None:
    """The map of a loss that goes wrong."""
    recorded = record(loss, *tensors)
    return picture_of(recorded.replay())


def exponents(*shape: int, bad: tuple[int, ...], value: float = 99.0) -> Tensor:
    """Small numbers that are all different, and one that overflows in exp."""
    x = torch.arange(math.prod(shape)).reshape(shape) / math.prod(shape)
    x[bad] = value
    return x.requires_grad_()


def overflow(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio).mean()


def masked_sum(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return (torch.exp(log_ratio) * mask).sum()


WINDOWS = [  # bad element -> first row and column of the window
    ((0, 0), (0, 0)),
    ((0, COLUMNS - 1), (0, COLUMNS - MAP_COLUMNS)),
    ((ROWS - 1, 0), (ROWS - MAP_ROWS, 0)),
    ((ROWS - 1, COLUMNS - 1), (ROWS - MAP_ROWS, COLUMNS - MAP_COLUMNS)),
    ((30, 70), (30 - MAP_ROWS // 2, 70 - MAP_COLUMNS // 2)),
    ((MAP_ROWS // 2, MAP_COLUMNS // 2), (0, 0)),
    ((MAP_ROWS // 2 + 1, MAP_COLUMNS // 2 + 1), (1, 1)),
]


@pytest.mark.parametrize(("bad", "first"), WINDOWS)
def test_a_large_tensor_is_cut_around_the_bad_element(bad: tuple[int, int], first: tuple[int, int]) -> None:
    """In the middle where there is room, and never over an edge; the values are those of the exponent."""
    x = exponents(ROWS, COLUMNS, bad=bad)
    picture = drawn(overflow, x)
    assert picture is not None
    assert (picture.what, picture.rows, picture.columns) == ("log_ratio", ROWS, COLUMNS)
    assert (picture.first_row, picture.first_column) == first
    assert (picture.row, picture.column) == (bad[0] - first[0], bad[1] - first[1])
    window = x.detach()[first[0] : first[0] + MAP_ROWS, first[1] : first[1] + MAP_COLUMNS]
    assert torch.equal(torch.tensor(picture.values), window) and picture.values[picture.row][picture.column] == 99.0
    assert picture.masked is None


def test_a_small_tensor_is_shown_whole() -> None:
    """Fewer rows and columns than a map has room for."""
    picture = drawn(overflow, exponents(2, 5, bad=(1, 3)))
    assert picture is not None
    assert (picture.first_row, picture.first_column, picture.row, picture.column) == (0, 0, 1, 3)
    assert (len(picture.values), len(picture.values[0])) == (2, 5)


@pytest.mark.parametrize("bad", [0, 3, COLUMNS - 1])
def test_one_dimension_is_one_row(bad: int) -> None:
    """Packed tokens are a single line."""
    picture = drawn(overflow, exponents(COLUMNS, bad=(bad,)))
    assert picture is not None and (picture.rows, picture.columns, picture.row) == (1, COLUMNS, 0)
    assert picture.values[0][picture.column] == 99.0 and len(picture.values[0]) == MAP_COLUMNS
    assert picture.first_column + picture.column == bad


def test_more_dimensions_are_laid_in_rows() -> None:
    """The last one runs along the row, all others down."""
    picture = drawn(overflow, exponents(2, 3, 4, bad=(1, 2, 0)))
    assert picture is not None and (picture.rows, picture.columns) == (6, 4)
    assert (picture.row, picture.column) == (5, 0) and picture.values[5][0] == 99.0


def test_a_transposed_tensor_is_read_as_it_is_indexed() -> None:
    """Not as it lies in memory."""
    picture = drawn(lambda x: torch.exp(x.t()).mean(), exponents(4, 3, bad=(1, 2)))
    assert picture is not None and (picture.rows, picture.columns) == (3, 4)
    assert (picture.row, picture.column) == (2, 1) and picture.values[2][1] == 99.0


def test_masked_cells_are_those_of_the_mask() -> None:
    """Which tokens the loss does not count, cut like the values."""
    mask = (torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) % 7 > 2).float()
    mask[40, 100] = 0
    picture = drawn(masked_sum, exponents(ROWS, COLUMNS, bad=(40, 100)), mask)
    assert picture is not None and picture.masked is not None
    top, left = picture.first_row, picture.first_column
    assert torch.equal(torch.tensor(picture.masked), mask[top : top + MAP_ROWS, left : left + MAP_COLUMNS] == 0)
    assert picture.masked[picture.row][picture.column] is True


def test_a_mask_of_rows_is_spread_over_the_tokens() -> None:
    """[B, 1] masks whole completions."""
    picture = drawn(masked_sum, exponents(3, 4, bad=(1, 2)), torch.tensor([[1.0], [0.0], [1.0]]))
    assert picture is not None
    assert picture.masked == ((False,) * 4, (True,) * 4, (False,) * 4)


KEPT = torch.tensor([[True, False], [True, True]])


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: torch.where(KEPT, torch.exp(x), 0.0).mean(),
        lambda x: torch.where(~KEPT, 0.0, torch.exp(x)).mean(),
        lambda x: torch.exp(x)[KEPT].mean(),
    ],
    ids=["the first of two", "the second of two", "by an index"],
)
def test_a_selection_counts_as_a_mask(loss: Callable[..., Tensor]) -> None:
    """Whichever of its values says that an element is not picked."""
    picture = drawn(loss, exponents(2, 2, bad=(0, 1)))
    assert picture is not None and picture.masked == ((False, True), (False, False))


def test_what_a_clip_takes_out_is_no_mask() -> None:
    """It depends on the values, and marks no tokens."""

    def clipped(log_ratio: Tensor) -> Tensor:
        ratio = torch.exp(log_ratio)
        return torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()

    recorded = record(clipped, exponents(2, 3, bad=(1, 2)))
    picture = picture_of(recorded.replay())
    assert recorded.location is not None and [drop.how for drop in recorded.location.origin.drops] == ["clamp", "clip"]
    assert picture is not None and picture.masked is None


def test_a_mask_of_sums_is_one_of_their_tokens() -> None:
    """Where the loss sums first and leaves out a row, it leaves out all of its tokens."""
    picture = drawn(lambda x, mask: (torch.exp(x).sum(-1) * mask).sum(), exponents(3, 5, bad=(1, 2)), torch.tensor([1.0, 0.0, 1.0]))
    assert picture is not None and picture.values[picture.row][picture.column] == 99.0
    assert picture.masked == ((False,) * 5, (True,) * 5, (False,) * 5)


def test_a_mask_of_another_shape_is_left_out() -> None:
    """One that counts pairs of tokens says nothing of a token."""
    picture = drawn(lambda x, mask: (torch.exp(x)[:, :, None] * mask).sum(), exponents(3, 5, bad=(1, 2)), torch.zeros(3, 5, 2))
    assert picture is not None and picture.masked is None


def test_of_whole_numbers_there_is_no_map() -> None:
    """An exponent that is an integer is a count, and not what a map is for."""
    scale = torch.ones(2, 2, requires_grad=True)
    assert drawn(lambda x: (torch.exp(x) * scale).mean(), torch.tensor([[1, 99], [2, 3]])) is None


def test_of_anything_but_an_exponential_the_result_is_shown() -> None:
    """A quotient by its own name."""
    picture = drawn(lambda x: (1.0 / x).mean(), torch.tensor([[1.0, 0.0], [2.0, 4.0]], requires_grad=True))
    assert picture is not None and picture.what == "reciprocal"
    assert picture.values == ((1.0, math.inf), (0.5, 0.25))


def test_half_precision_is_shown_as_numbers() -> None:
    """A dtype that Python does not know is no reason to have no map."""
    picture = drawn(overflow, torch.tensor([[1.0, 12.0]], dtype=torch.float16, requires_grad=True))
    assert picture is not None and picture.values == ((1.0, 12.0),)


def test_there_is_nothing_to_draw_of_a_scalar_or_of_a_step_that_went_well() -> None:
    """No picture, and no error."""
    assert drawn(lambda x: torch.exp(x.sum()), torch.tensor([50.0, 50.0], requires_grad=True)) is None
    assert drawn(overflow, torch.zeros(2, 3, requires_grad=True)) is None
    assert picture_of(NOTHING) is None
