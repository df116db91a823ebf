"""From a loss per token to the scalar: masks, sums, and what they are divided by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from nanscope.given import check_fields


class Masking(StrEnum):
    """How a mask is applied. Neither helps after an exp that overflowed: inf · 0 is NaN, forward in one case and backward in both."""

    NONE = "none"
    MULTIPLY = "multiply"  # x · m
    WHERE = "where"  # x where m, else 0


class Guard(StrEnum):
    """How a denominator n is kept from 0."""

    RAW = "raw"  # n, so that nothing valid gives 0/0
    FLOOR = "floor"  # max(n, 1)
    EPSILON = "epsilon"  # n + 1e-8


class Over(StrEnum):
    """What a reduction sums over, and what it divides by; N tokens, B rows, n_i tokens in row i."""

    TOKENS = "tokens"  # Σ_it x / N
    TOTAL = "total"  # Σ_it x
    ROW_MEANS = "row_means"  # Σ_i (Σ_t x / n_i) / B
    ROW_SUMS = "row_sums"  # Σ_i Σ_t x / B
    LONG_ROWS = "long_rows"  # Σ_i n_i (Σ_t x / T) / B, padding included: Liger's luspo
    VALUES = "values"  # the mean of what is there: one value per row


@dataclass(frozen=True, slots=True)
class Reduction:
    """From [B, T] to the scalar.

    mask:     how masked tokens leave the sum. empty: how rows without a token leave it; NONE: they count as rows, with 0.
    count:    N or B of the whole batch, over all ranks and micro-batches; None counts what is here.
    guard:    of that count. row_guard: of n_i. horizon: a constant that divides each row as well; None is T.
    factor:   data-parallel size and the like, on the result.
    """

    over: Over = Over.TOKENS
    mask: Masking = Masking.MULTIPLY
    empty: Masking = Masking.NONE
    count: float | None = None
    guard: Guard = Guard.FLOOR
    row_guard: Guard = Guard.FLOOR
    horizon: float | None = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


def masked(x: Tensor, mask: Tensor, how: Masking) -> Tensor:
    """Return x with the mask applied; shapes broadcast."""
    return _MASKED[how](x, mask)


_MASKED: dict[Masking, Callable[[Tensor, Tensor], Tensor]] = {
    Masking.NONE: lambda x, mask: x,
    Masking.MULTIPLY: lambda x, mask: x * mask,
    Masking.WHERE: lambda x, mask: torch.where(mask > 0, x, 0.0),
}


GUARDED: dict[Guard, Callable[[Tensor], Tensor]] = {
    Guard.RAW: lambda n: n,
    Guard.FLOOR: lambda n: n.clamp(min=1.0),
    Guard.EPSILON: lambda n: n + 1e-8,
}


def reduce(x: Tensor, mask_BT: Tensor, how: Reduction) -> Tensor:
    """Reduce a loss per token, [B, T] or [B, 1], to the scalar that is differentiated."""
    return _REDUCED[how.over](x, mask_BT, how) * how.factor


def _over_tokens(x: Tensor, mask_BT: Tensor, how: Reduction) -> Tensor:
    return masked(x, mask_BT, how.mask).sum() / _count(tokens(mask_BT), how)


def _over_rows(x: Tensor, mask_BT: Tensor, how: Reduction) -> Tensor:
    tokens_B = tokens_B1(mask_BT).squeeze(-1)
    row_B = masked(x, mask_BT, how.mask).sum(-1)
    if how.over is Over.ROW_MEANS:
        row_B = row_B / GUARDED[how.row_guard](tokens_B)
    filled_B = (tokens_B > 0).to(x.dtype)
    rows = filled_B if how.empty is not Masking.NONE else torch.ones_like(filled_B)
    return masked(row_B, filled_B, how.empty).sum() / _count(tokens(rows), how) / _horizon(mask_BT, how)


def _over_long_rows(x: Tensor, mask_BT: Tensor, how: Reduction) -> Tensor:
    return (x * tokens_B1(mask_BT)).mean()


_REDUCED: dict[Over, Callable[[Tensor, Tensor, Reduction], Tensor]] = {
    Over.TOKENS: _over_tokens,
    Over.TOTAL: lambda x, mask_BT, how: masked(x, mask_BT, how.mask).sum(),
    Over.ROW_MEANS: _over_rows,
    Over.ROW_SUMS: _over_rows,
    Over.LONG_ROWS: _over_long_rows,
    Over.VALUES: lambda x, mask_BT, how: x.mean(),
}


def tokens(mask_BT: Tensor) -> Tensor:
    """Return how many tokens a mask holds, in float32 at least: bfloat16 counts to 256 and stays there."""
    return mask_BT.sum(dtype=torch.promote_types(mask_BT.dtype, torch.float32))


def tokens_B1(mask_BT: Tensor) -> Tensor:
    """Return the same for each row, [B, 1]."""
    return mask_BT.sum(-1, keepdim=True, dtype=torch.promote_types(mask_BT.dtype, torch.float32))


def _count(here: Tensor, how: Reduction) -> Tensor:
    return GUARDED[how.guard](here if how.count is None else torch.full_like(here, how.count))


def _horizon(mask_BT: Tensor, how: Reduction) -> float:
    return float(mask_BT.shape[-1]) if how.horizon is None else how.horizon


def divisor(mask_BT: Tensor, how: Reduction) -> Tensor:
    """Return what the sum of the tokens is divided by under this reduction: a scalar, or [B, 1] where it differs between rows."""
    if how.over is Over.TOKENS:
        return _count(tokens(mask_BT), how)
    rows_B1 = torch.full_like(mask_BT[:, :1], len(mask_BT) * _horizon(mask_BT, how))
    return rows_B1 * GUARDED[how.row_guard](tokens_B1(mask_BT)) if how.over is Over.ROW_MEANS else rows_B1
