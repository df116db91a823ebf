"""Which of the calls that wait has made a tensor: by identity, which nothing else can have as long as they wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nanscope.capture import raw
from nanscope.capture.entries import Operator, tensors_of
from nanscope.capture.raw import Raw
from nanscope.capture.weighing import GRAPH, held_for

NOBODY = -1  # no call that waits


@dataclass(slots=True)
class Makers:
    """light: what waiting calls have read and made: the number of that which has made it, if any. fleeting: the same of what was made of no
    tensor, which may be gone."""

    light: dict[int, int] = field(default_factory=dict)
    fleeting: dict[int, int] = field(default_factory=dict)

    def enter(self, call: Raw, number: int, graph: int = GRAPH) -> int:
        """A call waits. Returns the bytes that are held for it alone. graph: see `graph_of`."""
        operator, args, _, results, seen, *_ = call
        held = 0
        for tensor in tensors_of(args):
            if id(tensor) not in self.light:
                self.light[id(tensor)] = NOBODY
                held += max(held_for(tensor, operator.lasting, self.light, graph), 0)
        if not seen:
            self.fleeting.update({item.identity: number for item in results})
            return held
        self.make(operator, results, number)
        return held if operator.view else held + sum([item.nbytes for item in results])

    def make(self, operator: Operator, results: Sequence[Tensor], number: int) -> None:
        """It has made these of tensors that are entered."""
        for item in results:
            if operator.mutable or id(item) not in self.light:  # who hands on an argument has not made that
                self.light[id(item)] = number

    def number_of(self, tensor: Tensor, pending: Sequence[Any]) -> int:
        """Return the number of the call that has made a tensor. pending: all that wait, unless another thread has just taken them."""
        number = self.light.get(id(tensor), NOBODY)
        if number == NOBODY:
            number = self.fleeting.get(id(tensor), NOBODY)
            made = pending[number : number + 1] if number != NOBODY else ()
            if not any(item.handle.is_of(tensor) for call in made for item in call[raw.RESULTS]):
                return NOBODY
        return number

    def twin(self) -> Makers:
        """Return another one that knows the same."""
        return Makers(dict(self.light), dict(self.fleeting))
