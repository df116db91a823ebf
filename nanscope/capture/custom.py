"""Custom autograd functions between model and loss: what their backward was given, so that it can be run once more, op by op.

A fused log-prob or entropy is called outside the model and brings a backward of its own. The tape sees what it returns, and nobody sees
what its backward does: gradients go in finite and come out NaN. So its node is watched, and where that happens (on a CPU; elsewhere
always, while it is small) what forward saved for it is held until the step is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.copies import Copies
from nanscope.capture.mode import TapeMode
from nanscope.capture.seal import Seal, sealed
from nanscope.capture.source import definition_of
from nanscope.capture.tape import Tape
from nanscope.program.calls import Computes, Site
from nanscope.program.numbers import is_finite
from nanscope.program.program import Program
from nanscope.torch_inside import function_of


@dataclass(frozen=True, slots=True)
class Backward:
    """One call of a custom function's backward.

    node: its context. saved: what forward saved. received, returned: gradients, of its results and of its arguments. leaf: id of the
    result in the program of the loss.
    """

    node: Any
    saved: tuple[Tensor | None, ...]
    received: tuple[Tensor | None, ...]
    returned: tuple[Tensor | None, ...]
    leaf: int

    def bytes(self) -> int:
        """Return how much memory is held by it."""
        tensors = (*self.saved, *self.received, *self.returned)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def spoilt(self) -> bool:
        """Did a non-finite gradient come out although only finite ones went in? Waits for the device."""
        return _all_finite(self.received) and not _all_finite(self.returned)


def is_custom(node: Any) -> bool:
    """Is an autograd node that of a function in Python, and not one of torch's own?"""
    function = function_of(node)
    return function is not None and not str(getattr(function, "__module__", "")).startswith("torch.")


def backward_of(node: Any) -> tuple[str, Site | None]:
    """Return what a function is called, and where its backward is written."""
    name: str = function_of(node).__name__
    return name, definition_of(function_of(node).backward, f"{name}.backward")


def seen(node: Any, leaf: int, returned: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...]) -> Backward:
    """Return what a post-hook of the node sees; what forward saved is still there."""
    return Backward(node, tuple(node.saved_tensors), received, returned, leaf)


def run_again(found: Backward, budget: int) -> tuple[Program, dict[int, Tensor]] | None:
    """Return the program of the first non-finite gradient that a backward makes, and its leaves; None if a second run makes none.

    It runs on copies. Raises LookupError if there are none, and whatever the function raises.
    """
    copies = Copies(budget)
    saved, received, attributes = copies.of((found.saved, found.received, vars(found.node)))
    tape = Tape(budget)
    for tensor in received:
        if tensor is not None:
            tape.tag("grad", tensor)
    function = function_of(found.node)
    with torch.no_grad(), sealed(Seal(copies.own()), [function, *copies.code]), TapeMode(tape):
        results = function.backward(_Context(found.node, saved, attributes), *received)
    for result in results if isinstance(results, tuple) else (results,):
        if isinstance(result, Tensor) and not bool(is_finite(result)) and (value := tape.find(result)) is not None:
            program, tensors = tape.program(value)
            return replace(program, computes=Computes.GRADIENT), tensors
    return None


class _Context:
    """What a backward takes for its context: the saved tensors, which torch has let go of by now, and the attributes that forward set."""

    def __init__(self, node: Any, saved: tuple[Tensor | None, ...], attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self.saved_tensors = saved
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def _all_finite(tensors: tuple[Tensor | None, ...]) -> bool:
    return all(bool(is_finite(tensor)) for tensor in tensors if tensor is not None)
