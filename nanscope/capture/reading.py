"""What the gauge has read of one step, as numbers: extremes of the exponents, and means over the counted tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nanscope.objective.mismatch import Mismatch


@dataclass(frozen=True, slots=True)
class Spot:
    """An exponent in the code: the call that raises e to it. name: what the code calls it, None where it has no name there."""

    file: str
    line: int
    column: int
    function: str
    op: str
    name: str | None


@dataclass(frozen=True, slots=True)
class Extremes:
    """What e was raised to at one spot, in nats: largest and smallest, on tokens that count and on those that do not. limit: where exp
    overflows in its dtype. None: there is no such token, or nobody knows which ones count, and then all are among the counted."""

    spot: Spot
    limit: float
    highest: float | None = None
    lowest: float | None = None
    highest_masked: float | None = None
    lowest_masked: float | None = None

    def joined(self, other: Extremes) -> Extremes:
        """Return the extremes over two calls at the same spot."""
        return Extremes(
            self.spot,
            min(self.limit, other.limit),
            largest((self.highest, other.highest)),
            smallest((self.lowest, other.lowest)),
            largest((self.highest_masked, other.highest_masked)),
            smallest((self.lowest_masked, other.lowest_masked)),
        )


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over tokens, as the sum and the number of them: those of micro-batches add up."""

    total: float
    tokens: float

    @property
    def value(self) -> float | None:
        """The mean, None over nothing."""
        return self.total / self.tokens if self.tokens else None


@dataclass(frozen=True, slots=True)
class Reading:
    """One step. extremes: of each exponent. clipped: part of the counted ratios that the clip holds back, in the micro-batch with most.

    kl: of the KL that the loss forms. kl_old: from the policy before the batch's updates, k3 of the ratio. entropy: nat. mismatch: between
    the sampler and the trainer. None: not seen. unseen: for an exponent there was no room, and it may be the one that counts.
    """

    extremes: tuple[Extremes, ...] = ()
    clipped: float | None = None
    kl: Mean | None = None
    kl_old: Mean | None = None
    entropy: Mean | None = None
    mismatch: Mismatch | None = None
    unseen: bool = False

    @property
    def _all(self) -> tuple[Extremes, ...]:
        return () if self.unseen else self.extremes

    @property
    def highest(self) -> float | None:
        """The largest exponent on counted tokens, nat; None, as below, where one of them was not seen."""
        return largest(one.highest for one in self._all)

    @property
    def lowest(self) -> float | None:
        """The smallest one."""
        return smallest(one.lowest for one in self._all)

    @property
    def highest_masked(self) -> float | None:
        """The largest exponent on masked tokens, nat."""
        return largest(one.highest_masked for one in self._all)

    @property
    def lowest_masked(self) -> float | None:
        """The smallest one."""
        return smallest(one.lowest_masked for one in self._all)

    @property
    def headroom(self) -> float | None:
        """Nats that the nearest exponent has left before exp overflows."""
        tops = ((one.limit, largest((one.highest, one.highest_masked))) for one in self._all)
        return smallest(limit - top for limit, top in tops if top is not None)

    def joined(self, other: Reading) -> Reading:
        """Return the reading over two micro-batches."""
        known = {one.spot: one for one in self.extremes}
        known |= {one.spot: known[one.spot].joined(one) if one.spot in known else one for one in other.extremes}
        apart = [one for one in (self.mismatch, other.mismatch) if one is not None]
        return Reading(
            tuple(known.values()),
            largest((self.clipped, other.clipped)),
            _both(self.kl, other.kl),
            _both(self.kl_old, other.kl_old),
            _both(self.entropy, other.entropy),
            apart[0].joined(apart[1]) if len(apart) == 2 else next(iter(apart), None),
            self.unseen or other.unseen,
        )


def largest(numbers: Iterable[float | None]) -> float | None:
    """Return the largest of those that are there; one that is NaN is none."""
    return max((one for one in numbers if one is not None and not math.isnan(one)), default=None)


def smallest(numbers: Iterable[float | None]) -> float | None:
    """Return the smallest of those that are there."""
    return min((one for one in numbers if one is not None and not math.isnan(one)), default=None)


def _both(a: Mean | None, b: Mean | None) -> Mean | None:
    if a is None or b is None:
        return a or b
    return Mean(a.total + b.total, a.tokens + b.tokens)
