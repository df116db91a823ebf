"""`nanscope.show`: all there is to say of a tensor in one line, in a debugger, a notebook or a log.

>>> nanscope.show(ratio, mask)
[3, 5] float32 cpu, 0.9048 … 1.105, median 1, 12 of 15 counted: 0.9048 … 1.105, 3 of 15 bad, first at [1, 3], 2 masked, +inf!, NaN! ×2

Notable: whatever the tensor is, there is a line. What holds no numbers that can be read is told with its shape, and why it cannot. Nothing
of the program that is being looked at sees it: no mode, no tape and no graph, and no rank is asked for its part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope import torch_inside as inside
from nanscope.program.local import is_wrapper, local
from nanscope.program.numbers import dtype_name
from nanscope.program.summary import Contents, broadcasts, checked_pair, counted, loud, span
from nanscope.text import count, number, show_index


@dataclass(frozen=True, slots=True, repr=False)
class Glance:
    """All there is to say of a tensor; its `repr` is the line.

    shape: as text, since that of a nested tensor is no row of numbers. kind: what it is where it is more, or less, than memory; "" for an
    ordinary one. elements: how many were looked at: of a sparse tensor the stored ones, of a distributed one the part in this process.
    counts: what is in them, None where nothing can be read; unread: why not.
    """

    shape: str
    dtype: str
    device: str
    requires_grad: bool
    kind: str
    elements: int
    counts: Contents | None
    unread: str = ""

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        head = " ".join([self.shape, self.dtype, self.device, *(["requires_grad"] if self.requires_grad else [])])
        return ", ".join(filter(None, [head, self.kind, *([self.unread] if self.counts is None else self._held(self.counts))]))

    def _held(self, found: Contents) -> list[str]:
        """The numbers in words, what is bad last."""
        bad = found.nan + found.posinf + found.neginf
        parts = ["empty"] if not self.elements else []
        if found.minimum is not None:
            parts.append(span(found.minimum, found.maximum))
            if self.elements - bad > 1 and found.minimum != found.maximum:
                parts.append(f"median {'≈ ' * found.sampled}{number(found.median)}")
        if found.zeros and (found.minimum, found.maximum) != (0, 0):
            parts.append(f"{count(found.zeros, 'zero')}")
        if found.selected is not None:
            read = "" if found.low is None else f": {span(found.low, found.high)}"
            parts.append(f"{found.selected} of {self.elements} counted{read}")
        if bad and self.elements > 1:
            where = f", first at {show_index(found.first)}" if found.first and not self.kind else ""
            parts.append(f"{bad} of {self.elements} bad{where}")
        if bad and found.masked is not None:
            parts.append(f"{found.masked} masked")
        return [*parts, *loud(found.nan, found.posinf, found.neginf)]


def show(tensor: Tensor, mask: Tensor | None = None) -> Glance:
    """Return all there is to say of a tensor, as something that shows itself as one line.

    Shape, dtype, device; smallest, largest and middle of the finite elements (of complex ones the magnitude), how many are 0; with a mask
    how many it counts and between what they lie; last what is bad: how many elements, where the first one is, how many of them are masked.

    tensor: any shape, dtype, layout and device. mask: broadcastable to `tensor`; true where the loss reads.
    The numbers cross from the device once. The median of more than a million elements is that of a million, evenly spread.
    Raises TypeError for something that is no tensor, ValueError if `mask` does not broadcast.
    """
    with torch.no_grad(), inside.without_functions(), inside.without_modes():
        checked_pair(tensor, mask)
        kind, unread, part = _kind(tensor), "", None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            unread = "not read while a CUDA graph is captured"
        else:
            part, unread = _readable(tensor)
        found = None
        if part is not None:
            try:
                found = counted(part, _same(mask, part))
            except (RuntimeError, NotImplementedError, TypeError) as error:  # a dtype that torch cannot convert, a device that is lost
                unread = f"not read ({str(error).strip().splitlines()[0][:120]})"
        return Glance(
            shape=_shape(tensor),
            dtype=dtype_name(tensor.dtype),
            device=str(tensor.device),
            requires_grad=tensor.requires_grad,
            kind=kind,
            elements=part.numel() if part is not None else 0,
            counts=found,
            unread=unread,
        )


def _readable(tensor: Tensor) -> tuple[Tensor | None, str]:
    """Return what can be read of a tensor, or why nothing can."""
    part = local(inside.lowered(tensor))
    if part is not None:
        return part, ""
    if tensor.is_meta:
        return None, "no numbers: a meta tensor is a shape alone"
    if is_wrapper(type(tensor)):
        return None, f"no numbers that can be read in a {type(tensor).__name__}"
    return None, "no memory at present: it was let go of"


def _kind(tensor: Tensor) -> str:
    if inside.lowered(tensor) is not tensor:
        under = inside.lowered(tensor)
        return f"inside vmap: all {show_index(under.shape)} of it" if under.shape != tensor.shape else "inside a transform"
    if tensor.is_nested:
        return f"nested, {count(tensor.size(0), 'row')}"
    if tensor.layout is not torch.strided:
        name = str(tensor.layout).removeprefix("torch.")
        return f"{name}, {inside.nonzeros(tensor)} stored" if not tensor.is_meta else name
    if is_wrapper(type(tensor)):
        return f"{type(tensor).__name__}, the part in here" if local(tensor) is not None else type(tensor).__name__
    return "quantized" if tensor.is_quantized else ""


def _shape(tensor: Tensor) -> str:
    try:
        return show_index(tensor.shape)
    except RuntimeError:  # a nested tensor whose rows differ in more than one size
        return f"[{tensor.size(0)}, …]"


def _same(mask: Tensor | None, part: Tensor) -> Tensor | None:
    """The mask, where it fits what is read: stored elements and parts have no mask of their own."""
    if mask is None:
        return None
    own = local(inside.lowered(mask))
    return own if own is not None and broadcasts(own.shape, part.shape) else None
