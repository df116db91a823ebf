"""A mean over what is left when NaN were taken out leads to the NaN when nothing is left, and only then."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recorded import leaf, record
from torch import Tensor

from nanscope.locate.origin import Phase

MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "nanmean": lambda x: x.nanmean(),
    "of rows": lambda x: x.mean(1).nanmean(),
    "a row": lambda x: x.nanmean(1).sum(),
    "of products": lambda x: (x.sum(1) * 2).nanmean(),
    "picked": lambda x: x[~x.isnan()].mean(),
    "picked as finite": lambda x: x[torch.isfinite(x)].mean(),
    "masked_select": lambda x: torch.masked_select(x, ~x.isnan()).mean(),
    "filled": lambda x: torch.where(x.isnan(), 0.0, x).sum() / (~x.isnan()).sum(),
    "counted in float": lambda x: x.nansum() / (x == x).float().sum(),
    "a mean of picked rows": lambda x: x.mean(1)[~x.mean(1).isnan()].mean(),
}


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_a_mean_of_nothing_but_nan_leads_to_the_nan(mean: Callable[[Tensor], Tensor]) -> None:
    """The division 0 / 0 is a consequence; the batch is at fault."""
    old = torch.full((3, 4), math.nan)
    found = record(lambda logps, old: mean(logps - old), leaf(3, 4), old).location
    assert found is not None and (found.phase, found.origin.op, found.origin.index) == (Phase.INPUT, "input", (0, 0))


def test_the_row_that_has_nothing_left_is_the_one() -> None:
    """Other rows may have lost a number, too: theirs did no harm."""
    old = torch.zeros(3, 4)
    old[0, 1] = math.nan
    old[2] = math.nan
    found = record(lambda logps, old: (logps - old).nanmean(1).sum(), leaf(3, 4), old).location
    assert found is not None and (found.phase, found.origin.index) == (Phase.INPUT, (2, 0))


EMPTY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an empty mask": lambda x, mask: (x * mask).sum() / mask.sum(),
    "an empty choice": lambda x, mask: x[mask > 0].mean(),
    "no rows": lambda x, mask: x[:0].nanmean(),
    "a mask of one that is NaN, too": lambda x, mask: x.nansum() / (mask * (~x.isnan())).sum(),
}


@pytest.mark.parametrize("mean", EMPTY.values(), ids=EMPTY)
def test_a_mean_over_nothing_else_stays_the_origin(mean: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Nothing bad was left out: the mask was empty."""
    found = record(mean, leaf(3, 4), torch.zeros(3, 4)).location
    assert found is not None and found.origin.born and found.origin.op in ("div", "mean")
