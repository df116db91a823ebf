"""Intervals, and what it means to be held within one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.given import check_fields


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval; None is open on that side. Which unit it has is told by who holds it: a ratio or an exponent in nat."""

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def clamp(self, x: Tensor) -> Tensor:
        """Return x within the interval. The gradient is 0 outside of it and at NaN; an open interval is not an operation at all."""
        return x if self.low is None and self.high is None else torch.clamp(x, min=self.low, max=self.high)

    def exp(self) -> Bounds:
        """Return the interval that exp makes of this one, of exponents in nat."""
        low, high = (None if end is None else math.exp(min(end, 700.0)) for end in (self.low, self.high))  # e^710 is no float
        return Bounds(low, high)

    def holds(self, x: Tensor) -> Tensor:
        """Return where x is inside, bool; NaN is not."""
        return (x >= (-math.inf if self.low is None else self.low)) & (x <= (math.inf if self.high is None else self.high))

    def zero_outside(self, x: Tensor) -> Tensor:
        """Return x inside the interval and 0 elsewhere, also at NaN."""
        return torch.where(self.holds(x), x, 0.0)


OPEN = Bounds()

SAFE = Bounds(-20.0, 20.0)  # nat: exp(±20) is within fp32, and its gradient too
