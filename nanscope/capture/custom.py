"""Custom autograd functions between model and loss: what their backward was given, so that it can be run once more, op by op.

A fused log-prob or entropy is called outside the model and brings a backward of its own. The tape sees what it returns, and nobody sees
what its backward does: gradients go in finite and come out NaN. So its node is watched, and where that happens (on a CPU; elsewhere
always, while it is small) what forward saved for it is held until the step is over.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.copies import Copies
from nanscope.capture.differentiated import Part
from nanscope.capture.mode import TapeMode
from nanscope.capture.modules import Address, place_of
from nanscope.capture.recomputing import is_checkpoint
from nanscope.capture.seal import Seal, is_marked, sealed
from nanscope.capture.source import definition_of
from nanscope.capture.tape import Tape
from nanscope.program.calls import Computes, Site
from nanscope.program.local import local
from nanscope.program.numbers import is_finite
from nanscope.program.program import Program
from nanscope.torch_inside import function_of

INSIDE = -1  # no leaf of the loss


@dataclass(frozen=True, slots=True)
class Backward:
    """One call of a custom function's backward.

    node: its context. saved: what forward saved. received, returned: gradients, of its results and of its arguments. leaf: id of the
    result in the program of the loss, INSIDE if it is none of its leaves. first: id from which on the values of its own program are.
    """

    node: Any
    saved: tuple[Tensor | None, ...]
    received: tuple[Tensor | None, ...]
    returned: tuple[Tensor | None, ...]
    leaf: int = INSIDE
    first: int = 0

    def bytes(self) -> int:
        """Return how much memory is held by it."""
        tensors = (*self.saved, *self.received, *self.returned)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def spoilt(self) -> bool:
        """Did a non-finite gradient come out although only finite ones went in? Waits for the device."""
        return _all_finite(self.received) and not _all_finite(self.returned)


@dataclass(frozen=True, slots=True)
class Repeated:
    """A gradient that a backward has made bad once more.

    program, tensors: that make it, None where it does not come of recorded calls. argument: of forward, whose gradient it is. flat: of the
    first element that is bad. unwritten: which ones nobody wrote. places: where the originals of the leaves lie. grads: ids of the
    gradients that came in, as far as they are read. seeds: of a leaf that a pass within it has made, what made the bad number by which
    that was weighted.
    """

    program: Program | None
    tensors: dict[int, Tensor]
    argument: str | None
    gradient: Tensor
    flat: int
    unwritten: Tensor
    places: Mapping[int, Address] = field(default_factory=dict)
    grads: tuple[int, ...] = ()
    seeds: Mapping[int, Part] = field(default_factory=dict)


def is_custom(node: Any) -> bool:
    """Is an autograd node that of a function in Python that runs code which is not torch's own?"""
    return not _module_of(node).startswith(("torch.", " ")) or is_checkpoint(node)


def is_of_ranks(node: Any) -> bool:
    """Is it that of one by which torch hands numbers from rank to rank, and gradients back?"""
    return _module_of(node).startswith("torch.distributed.")


def _module_of(node: Any) -> str:
    """Where the function of a node is written, " " if it is none."""
    function = function_of(node)
    return " " if function is None else str(getattr(function, "__module__", ""))


def backward_of(node: Any) -> tuple[str, Site | None]:
    """Return what a function is called, and where its backward is written."""
    name: str = function_of(node).__name__
    return name, definition_of(function_of(node).backward, f"{name}.backward")


def seen(
    node: Any, returned: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...], leaf: int = INSIDE, first: int = 0
) -> Backward:
    """Return what a post-hook of the node sees; what forward saved is still there."""
    return Backward(node, saved_by(node), received, returned, leaf, first)


def saved_by(node: Any) -> tuple[Tensor | None, ...]:
    """Return what forward saved for a node, as long as backward has not let go of it."""
    return tuple(node.saved_tensors)


def run_again(found: Backward, budget: int) -> Repeated | None:
    """Return the first gradient that a backward makes non-finite once more, in the same place; None if none is.

    It runs on copies, and memory that it makes without content is marked: what was in there the first time, nobody knows. Raises
    LookupError if there are none, and whatever the function raises.
    """
    copies = Copies(budget)
    saved, received, attributes = copies.of((found.saved, found.received, vars(found.node)))
    tape = Tape(budget)
    tape.known.length = found.first
    grads = [tape.value_of(tensor).id for tensor in received if tensor is not None]
    for tensor in received:
        if tensor is not None:
            tape.tag("grad", tensor)
    function = function_of(found.node)
    with torch.no_grad(), sealed(Seal(copies.own(), marks=True), [function, *copies.code]), TapeMode(tape):
        results = function.backward(_Context(found.node, saved, attributes), *received)
    for position, result in enumerate(results if isinstance(results, tuple) else (results,)):
        part = local(result) if isinstance(result, Tensor) else None
        bad = _bad_again(part, found.returned) if part is not None else None
        if part is None or bad is None:
            continue
        flat, argument = int(bad.flatten().int().argmax()), _argument(function, position)
        value = tape.find(result)
        if value is None:
            return Repeated(None, {}, argument, part, flat, is_marked(part))
        program, tensors = tape.program(value)
        seeds = tape.seeds_behind(program.leaves)
        read = dict(pair for _, own in ((program, tensors), *seeds.values()) for pair in own.items())
        places = {leaf: place_of(copies.original(tensor)) for leaf, tensor in read.items()}
        program = replace(program, computes=Computes.GRADIENT)
        return Repeated(program, tensors, argument, part, flat, is_marked(part), places, tuple(grads), seeds)
    return None


def _bad_again(result: Tensor, returned: tuple[Tensor | None, ...]) -> Tensor | None:
    """Return where a gradient is not finite that was not there the first time, either; None if nowhere."""
    bad = ~torch.isfinite(result) if result.is_floating_point() else torch.zeros(())
    before = [part for grad in returned if grad is not None and (part := local(grad)) is not None and part.shape == result.shape]
    for part in before:
        if bool((bad & ~torch.isfinite(part)).any()):
            return bad & ~torch.isfinite(part)
    return bad if bool(bad.any()) and not before else None


def _argument(function: Any, position: int) -> str | None:
    """Return what forward calls the argument whose gradient stands there."""
    try:
        names = list(inspect.signature(function.forward).parameters)
    except (TypeError, ValueError):
        return None
    own = function.setup_context is torch.autograd.Function.setup_context  # then the context comes first
    names = names[1:] if own else names
    return names[position] if position < len(names) else None


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
