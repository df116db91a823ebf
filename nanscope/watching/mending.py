"""What is done about the bad gradients of one backward pass, and who is asked for that while it goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from nanscope.verdict.proof import Proof

Gradients = tuple[Tensor | None, ...]  # that a node of autograd returns or receives, by position


@dataclass(slots=True)
class Mending:
    """One backward pass. proof: the edit whose gradients are taken, None where none is. loss: as that edit gives it, before a scale against
    underflow. seconds: that it took. passed: leaves whose gradient had gone on before anything was known to be bad. own: leaves that get
    that of the edit. decided: nothing is looked for any more."""

    proof: Proof | None = None
    loss: float = math.nan
    seconds: float = 0.0
    passed: set[int] = field(default_factory=set)
    own: set[int] = field(default_factory=set)
    decided: bool = False

    def close(self) -> None:
        """The backward pass is over: what is left of it are words and numbers."""
        if self.proof is not None:
            self.proof = replace(self.proof, grads={}, recorded={})


class Mends(Protocol):
    """Is asked by the hooks of a backward pass what goes on in the place of a gradient. Never raises."""

    mending: Mending

    def edge(self, leaf: int, gradient: Tensor) -> Tensor | None:
        """Of a tensor that the loss reads: None for the gradient itself."""

    def function(self, node: Any, returned: Gradients, received: Gradients) -> Gradients | None:
        """Of a custom function: None for what it has returned."""
