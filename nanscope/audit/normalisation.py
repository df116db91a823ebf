"""How the advantages of a batch were normalised, told from the numbers alone: by group, over the tokens, or one after the other.

    normalised(advantages_BT, mask_BT)      # Normalised(per=GROUP, twice=Twice.SEEN, size=4, …)

Notable: to whiten is an affine map, so a second one leaves a trace where the first was per group: every group then has the same mean and
the same deviation, but no longer 0 and 1. Where a group had 0 and 1 and the batch has, too, a second one changed nothing.

Shapes: B rows, T response tokens, G rows of one prompt, which stand together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

ZERO = 1e-3  # of a mean, in deviations
ONE = 1e-2  # of a deviation: an epsilon of 1e-4 beside the spread of rewards between 0 and 1 is less
ALIKE = 1e-3  # relative: two groups have one deviation; of more, chance does not make them alike within five times that


class Twice(StrEnum):
    """Were the advantages normalised a second time?"""

    SEEN = "seen"  # the numbers can hardly be explained otherwise
    HIDDEN = "hidden"  # mean 0 and deviation 1 both ways: a second one would have changed nothing
    PADDING = "padding"  # normalised over the batch with a mean that counted padding
    NO = "no"


@dataclass(frozen=True, slots=True)
class Normalised:
    """Means and (unbiased) deviations of the advantages.

    mean, spread: over the valid tokens. mean_all: over all positions, padding included; None for one advantage per row.
    size: rows of a group, None if no grouping fits. groups: how many of them have a spread. group_mean, group_spread: what they have in
    common. per_row: one advantage for all tokens of a row. over_rows: mean 0 and deviation 1 hold over the rows, not over the tokens.
    """

    twice: Twice
    per_row: bool
    mean: float
    spread: float
    mean_all: float | None = None
    size: int | None = None
    groups: int = 0
    group_mean: float = 0.0
    group_spread: float = 0.0
    over_rows: bool = False


def normalised(advantages_BT: Tensor, mask_BT: Tensor, size: int | None = None) -> Normalised:
    """Measure how advantages were normalised.

    advantages_BT: [B, T], or [B, 1] for one per row. size: rows of a group, None tries every size that divides B; groups stand together.
    """
    given_BT = advantages_BT.detach().to(torch.float64)
    valid_BT = mask_BT > 0
    wide_BT = given_BT.expand(mask_BT.shape)
    tokens_N = wide_BT[valid_BT]
    if len(tokens_N) < 2 or not bool(torch.isfinite(tokens_N).all()):
        return Normalised(Twice.NO, False, _mean(tokens_N), 0.0)
    mean, spread = _mean(tokens_N), tokens_N.std().item()
    row_B = _per_row(wide_BT, valid_BT)
    if row_B is None:
        mean_all = wide_BT.mean().item() if bool(torch.isfinite(wide_BT).all()) else None
        return Normalised(_over_padding(tokens_N, mean_all), False, mean, spread, mean_all)
    sizes = [size] if size else [n for n in range(2, len(row_B) + 1) if len(row_B) % n == 0]
    fits = [found for n in sizes if (found := _by_group(row_B, n, mean, spread, len(tokens_N))) is not None]
    return next(iter(fits), Normalised(Twice.NO, True, mean, spread))


def _mean(x_N: Tensor) -> float:
    return x_N.mean().item() if len(x_N) else 0.0


def _per_row(wide_BT: Tensor, valid_BT: Tensor) -> Tensor | None:
    """Return the advantage of each row, [B]; None if it differs between the tokens of a row."""
    count_B1 = valid_BT.sum(-1, keepdim=True)
    inside_B1 = torch.where(valid_BT, wide_BT, 0.0).sum(-1, keepdim=True) / count_B1.clamp(min=1)
    row_B1 = torch.where(count_B1 > 0, inside_B1, wide_BT[:, :1])
    off_BT = torch.where(valid_BT, (wide_BT - row_B1).abs(), 0.0)
    return row_B1.squeeze(1) if bool((off_BT <= 1e-5 * (1 + row_B1.abs())).all()) else None


def _by_group(row_B: Tensor, size: int, mean: float, spread: float, tokens: int) -> Normalised | None:
    """Return what groups of this size have in common; None if nothing."""
    if size < 2 or len(row_B) % size or not bool(torch.isfinite(row_B).all()):
        return None
    group_GS = row_B.reshape(-1, size)
    means_G, spreads_G = group_GS.mean(1), group_GS.std(1)
    live_G = spreads_G > 1e-6 * (1 + means_G.abs())
    if not bool(live_G.any()) or not _alike(means_G, ZERO) or not _alike(spreads_G[live_G], ONE):
        return None
    group_mean, group_spread = means_G.mean().item(), spreads_G[live_G].mean().item()
    over_tokens, over_rows = _is_white(mean, spread, tokens), _is_white(row_B.mean().item(), row_B.std().item(), len(row_B))
    found = Normalised(Twice.NO, True, mean, spread, None, size, int(live_G.sum()), group_mean, group_spread, over_rows and not over_tokens)
    white = over_tokens or over_rows
    if _is_white(group_mean, group_spread, size):
        return replace(found, twice=Twice.HIDDEN) if white and size < len(row_B) else found
    if not white or not _alike(spreads_G[live_G], ALIKE * group_spread * (1 if found.groups == 2 else 5)):
        return None
    sorted_GS = group_GS[live_G].sort(1).values
    told = not _alike(sorted_GS, ALIKE)  # groups of the same numbers have one mean and deviation however they were normalised
    return replace(found, twice=Twice.SEEN) if told else None


def _is_white(mean: float, spread: float, count: int) -> bool:
    """Mean 0, and deviation 1 as either estimator of it has it."""
    biased = spread * ((count - 1) / count) ** 0.5
    return abs(mean) <= ZERO and min(abs(spread - 1), abs(biased - 1)) <= ONE


def _alike(x_G: Tensor, tolerance: float) -> bool:
    """Do groups differ by no more than this, number by number?"""
    return bool((x_G.amax(0) - x_G.amin(0) <= tolerance).all())


def _over_padding(tokens_N: Tensor, mean_all: float | None) -> Twice:
    """A mean over all positions is 0 and the valid tokens are off by what padding took: the second moment about that mean is 1."""
    second = tokens_N.square().mean().item()
    off = abs(tokens_N.mean().item()) > 10 * ZERO
    return Twice.PADDING if mean_all is not None and abs(mean_all) <= ZERO and abs(second - 1) <= ONE and off else Twice.NO
