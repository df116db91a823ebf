"""What the numbers of one tensor come to, those that the loss counts beside those that it leaves out: range, quantiles, histogram.

Notable: a large tensor is gone through in pieces, which stay in the processor's cache; of most the smallest and the largest number say all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 1 << 16  # elements that are looked at together
SAMPLE = 1 << 17  # elements that quantiles are taken of
BINS = 32
OUTLYING = 1.5  # times what lies between the quartiles: so far beyond them a number is an outlier (Tukey)

Piece = tuple[Tensor, Tensor | None]  # elements, and which of them the loss leaves out


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often which number occurs. low, high: ends of the bins, which are alike; counted, masked: finite elements in each.
    below, above: how many of these lie beyond the ends, and are in the bins there."""

    low: float
    high: float
    counted: tuple[int, ...]
    masked: tuple[int, ...]
    below: int = 0
    above: int = 0


@dataclass(frozen=True, slots=True)
class Distribution:
    """counts: elements that are bad, and how many of these the loss leaves out. least, most: the range of all that are finite.

    low, median, high: quantiles of the finite ones that the loss counts, at 5, 50 and 95 %; of all finite ones where it counts none.
    ends: the range of these without outliers. NaN where there are none.
    """

    counts: tuple[int, int]
    least: float
    most: float
    low: float
    median: float
    high: float
    ends: tuple[float, float]
    histogram: Histogram | None

    @staticmethod
    def of(flat: Tensor, masked: Tensor | None, limit: float | None) -> Distribution:
        """Go through a tensor. flat: floating. masked: which elements the loss leaves out, in the same shape; None where nobody knows.
        limit: above it an element is bad, too."""
        counts, none = badness(flat, masked, limit), math.nan
        least, most = _range(flat, None)
        if math.isnan(least):
            return Distribution(counts, none, none, none, none, none, (none, none), None)
        hidden = masked if masked is not None and _counts_some(flat, masked) else None
        ranked = _sample(flat, hidden)
        if not len(ranked):
            return Distribution(counts, least, most, none, none, none, _range(flat, hidden), None)
        low, median, high = (_quantile(ranked, share) for share in (0.05, 0.5, 0.95))
        first, third = (float(ranked[round(share * (len(ranked) - 1))]) for share in (0.25, 0.75))  # each a number that there is
        room = OUTLYING * (third - first) or high - low  # where half of them are alike, the rest is no outlier for that
        ends = _range(flat, hidden, *((first - room, third + room) if room > 0 else ()))
        return Distribution(counts, least, most, low, median, high, ends, histogram(flat, masked, ends))


def bad_in(tensor: Tensor, limit: float | None) -> Tensor:
    """Return which elements are not finite or beyond a limit."""
    bad = ~torch.isfinite(tensor)
    return bad | (tensor > limit) if limit is not None else bad


def badness(flat: Tensor, masked: Tensor | None, limit: float | None) -> tuple[int, int]:
    """Return how many elements are bad, and how many of these the loss leaves out."""
    bad = hidden = 0
    for piece, left_out in _pieces(flat, masked):
        low, high = _ends(piece)
        if not (math.isfinite(low) and math.isfinite(high) and (limit is None or high <= limit)):
            wrong = bad_in(piece, limit)
            bad += int(wrong.sum())
            hidden += int((wrong & left_out).sum()) if left_out is not None else 0
    return bad, hidden


def _pieces(flat: Tensor, masked: Tensor | None) -> Iterator[Piece]:
    line = flat.reshape(-1) if flat.dtype.itemsize > 1 else flat.reshape(-1).float()  # of eight bits torch finds no ends
    hidden = None if masked is None else masked.reshape(-1)
    for start in range(0, len(line), PIECE):
        yield line[start : start + PIECE], None if hidden is None else hidden[start : start + PIECE]


def _ends(piece: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(piece)
    return float(low), float(high)


def _counts_some(flat: Tensor, masked: Tensor) -> bool:
    """Is one of those finite that the loss counts?"""
    return any(bool((torch.isfinite(piece) & ~hidden).any()) for piece, hidden in _pieces(flat, masked) if hidden is not None)


def _range(flat: Tensor, hidden: Tensor | None, least: float = -math.inf, most: float = math.inf) -> tuple[float, float]:
    """The smallest and the largest finite number between two, NaN where there is none. hidden: what does not count."""
    low, high = math.inf, -math.inf
    for piece, left_out in _pieces(flat, hidden):
        own_low, own_high = _ends(piece)
        if low <= own_low and own_high <= high:
            continue
        if left_out is not None or not (math.isfinite(own_low) and math.isfinite(own_high) and least <= own_low and own_high <= most):
            inside = torch.isfinite(piece) & (piece >= least) & (piece <= most)
            inside = inside if left_out is None else inside & ~left_out
            own_low, own_high = float(torch.where(inside, piece, math.inf).min()), float(torch.where(inside, piece, -math.inf).max())
        low, high = min(low, own_low), max(high, own_high)
    return (low, high) if low <= high else (math.nan, math.nan)


def _sample(flat: Tensor, hidden: Tensor | None) -> Tensor:
    """What counts, sorted; of a large tensor a part of it, spread evenly."""
    step = max(1, flat.numel() // SAMPLE)
    part = flat.reshape(-1)[::step]
    fine = torch.isfinite(part) if hidden is None else torch.isfinite(part) & ~hidden.reshape(-1)[::step]
    return part[fine].double().sort().values


def _quantile(ranked: Tensor, share: float) -> float:
    """The quantile of sorted numbers, between the two that are next to it."""
    below, part = divmod(share * (len(ranked) - 1), 1)
    return float(torch.lerp(ranked[int(below)], ranked[math.ceil(below + part)], part))


def histogram(flat: Tensor, masked: Tensor | None, ends: tuple[float, float]) -> Histogram | None:
    """Count the finite elements between two ends, those that the loss leaves out apart; None where there is nothing between them."""
    low, high = ends
    if not 0 < high - low < math.inf:
        return None
    counts, below, above = torch.zeros(2 * BINS + 1, dtype=torch.int64), 0, 0
    for piece, left_out in _pieces(flat, masked):
        own_low, own_high = _ends(piece)
        fine = None if math.isfinite(own_low) and math.isfinite(own_high) else torch.isfinite(piece)
        if not (low <= own_low and own_high <= high):
            there = piece if fine is None else piece[fine]
            below += int((there < low).sum())
            above += int((there > high).sum())
        known = piece if fine is None else torch.where(fine, piece, low)
        bins = torch.sub(known.double(), low).mul_(BINS / (high - low)).clamp_(0, BINS - 1).int()
        bins = bins if left_out is None else torch.add(bins, left_out, alpha=BINS)
        counts += torch.bincount(bins if fine is None else torch.where(fine, bins, 2 * BINS), minlength=2 * BINS + 1)
    told = counts.tolist()
    return Histogram(low, high, tuple(told[:BINS]), tuple(told[BINS : 2 * BINS]), below, above)
