"""What is left of the gradients of a backward pass when the next one begins.

Nothing in torch tells when gradients are zeroed. So a few of them are looked at when the next backward pass begins: are they gone?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from nanscope.capture.raw import NONE, SoFar
from nanscope.program.local import is_plain, local
from nanscope.torch_inside import nonzeros, writes_counted
from nanscope.watching.recording import Recording

Weight = TypeVar("Weight", bound=Tensor)

FEW = 8  # parameters of a module that are looked at


class Fate(StrEnum):
    """What became of gradients. unseen: none that could be looked at had one."""

    KEPT = "kept"
    DROPPED = "dropped"
    UNSEEN = "unseen"


class Left(NamedTuple):
    """A parameter as a backward pass left it: where its gradient and it lie, and how often gradient and weight had been written to."""

    parameter: Tensor
    address: int
    size: int
    version: int
    weight_version: int
    weight_address: int

    @staticmethod
    def of(parameter: Tensor) -> Left | None:
        """Note it, None if it has no gradient."""
        grad = _local(parameter.grad)
        if grad is None:
            return None
        return Left(parameter, _address(grad), grad.numel(), writes_counted(grad), writes_counted(parameter), _place(parameter))

    def has_moved(self) -> bool:
        """Has somebody written to the weight since, or put other memory in its place, as `vector_to_parameters` does?"""
        return (writes_counted(self.parameter), _place(self.parameter)) != (self.weight_version, self.weight_address)

    def is_kept(self) -> bool:
        """Is the gradient still there? Reads it only where somebody has written to it."""
        grad = _local(self.parameter.grad)
        if grad is None:
            return False
        return (_address(grad), writes_counted(grad)) == (self.address, self.version) or not _is_zero(grad)


class Leavings:
    """A few parameters as the last backward pass left them."""

    def __init__(self) -> None:
        self._left: list[Left] = []
        self.until = NONE  # calls that the tape had seen by then
        self._few: WeakKeyDictionary[nn.Module, list[Tensor]] = WeakKeyDictionary()

    def take(self, recording: Recording, calls: SoFar = NONE) -> None:
        """A backward pass has ended. calls: that the tape has seen."""
        self.until = calls
        modules = {id(model): model for call in recording.calls for model in call.models}
        leaves = [tensor for tensor in recording.leaves if tensor.requires_grad and tensor.is_leaf]
        weights = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)][:FEW]
        looked_at: list[Tensor] = [*weights, *(parameter for module in modules.values() for parameter in self._few_of(module))]
        looked_at = looked_at or leaves[:FEW]  # beside weights, an input that wants a gradient keeps it until it is gone
        self._left = [left for parameter in looked_at if (left := Left.of(parameter)) is not None]

    def forget(self) -> None:
        """The step is over, or nothing is known of it any more."""
        self._left = []

    def fate(self) -> Fate:
        """What became of the gradients since?"""
        if not self._left:
            return Fate.UNSEEN
        return Fate.KEPT if any(left.is_kept() for left in self._left) else Fate.DROPPED

    def weights_moved(self) -> bool:
        """Has somebody written to the weights since?"""
        return any(left.has_moved() for left in self._left)

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters that are looked at."""
        return [left.parameter for left in self._left]

    def __iter__(self) -> Iterator[Left]:
        return iter(self._left)

    def _few_of(self, module: nn.Module) -> list[Tensor]:
        """A few of its parameters from all over it; looked for anew where none of them has a gradient."""
        few = self._few.get(module)
        if few is None or all(parameter.grad is None for parameter in few):
            few = self._few[module] = spread([parameter for parameter in module.parameters() if parameter.grad is not None])
        return few


def spread(parameters: Sequence[Weight], most: int = FEW) -> list[Weight]:
    """Return a few of them, from all over the model."""
    return list(parameters[:: max(1, len(parameters) // most)])[:most]


def _local(grad: Tensor | None) -> Tensor | None:
    """This rank's part of a gradient: asking for the whole would be a collective."""
    return grad if grad is None or grad.is_sparse else local(grad)


def _address(grad: Tensor) -> int:
    return 0 if grad.is_sparse else grad.data_ptr()


def _place(parameter: Tensor) -> int:
    """Where a weight lies; 0 where its shard may lie elsewhere whenever it is gathered."""
    return parameter.data_ptr() if is_plain(parameter) else 0


def _is_zero(grad: Tensor) -> bool:
    return not nonzeros(grad) if grad.is_sparse else not bool(grad.any())
