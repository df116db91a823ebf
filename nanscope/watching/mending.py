"""What was done about the bad gradients of one backward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nanscope.verdict.proof import Proof


@dataclass(slots=True)
class Mending:
    """One backward pass. proof: the edit whose gradients are taken, None where none is. loss: of the edited program, without a scale
    against underflow. seconds: that it took. passed: leaves whose gradient had gone on before anything was known to be bad. left: leaves
    whose gradient goes on as it comes. decided: nothing is looked for any more."""

    proof: Proof | None = None
    loss: float = math.nan
    seconds: float = 0.0
    passed: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    decided: bool = False
