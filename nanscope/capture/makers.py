"""Which of the calls that wait has made a tensor: by identity, which nothing else can have as long as they wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from nanscope.capture import raw
from nanscope.capture.entries import Operator, tensors_of
from nanscope.capture.raw import Raw
from nanscope.torch_inside import base_of

NOBODY = -1  # no call that waits
LIGHT = 1 << 21  # bytes of a tensor that waits; a larger one is held for no longer than it takes to understand the call
WHOLE = 1 << 22  # and of the memory that a view which waits is a part of
ANYWAY = 8  # times as much may wait of what lasts for a step anyway
GRAPH = 1 << 20  # bytes that stand for the graph of an argument that no waiting call has made: it may keep the activations of a model


@dataclass(slots=True)
class Makers:
    """light: what waiting calls have read and made: the number of that which has made it, if any. fleeting: the same of what was made of no
    tensor, which may be gone."""

    light: dict[int, int] = field(default_factory=dict)
    fleeting: dict[int, int] = field(default_factory=dict)

    def enter(self, call: Raw, number: int) -> int:
        """A call waits. Returns the bytes that are held for it alone."""
        operator, args, _, results, seen, *_ = call
        held = 0
        for tensor in tensors_of(args):
            if id(tensor) not in self.light:
                self.light[id(tensor)] = NOBODY
                held += max(held_for(tensor, operator.lasting), 0)
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


def held_for(tensor: Tensor, lasting: bool) -> int:
    """Return the bytes that are held for an argument which no other waiting call holds, −1 if it cannot wait. lasting: see `Operator`."""
    wanted = tensor.requires_grad
    if type(tensor) is Parameter or (lasting and not wanted):  # which the model holds, too; but not for ever, where no step comes
        if tensor.layout is not torch.strided or tensor.is_nested:
            return -1
        return 0 if type(tensor) is Parameter else tensor.nbytes // ANYWAY
    size = size_of(tensor)
    if size >= 0 and base_of(tensor) is not None:
        whole = tensor.untyped_storage().nbytes()
        size = whole if whole <= WHOLE else -1
    return size + GRAPH if size >= 0 and wanted and not tensor.is_leaf else size


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor, −1 if it cannot wait."""
    size = tensor.nbytes
    if size > LIGHT or tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype.is_complex:
        return -1
    return size
