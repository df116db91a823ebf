"""Is a gradient bad only because half precision could not hold it? Asked of the very call that made it, run once more in float32.

    hidden = F.silu(gate) * up         in float16, of finite numbers; the gradient that comes in is 2956, `up` is 474

The same operands and the same incoming gradient give 1.4e6 in float32: finite, and beyond 65504; or something on the way there is, as
the cube in the derivative of `rsqrt`, however small what it is multiplied by. What overflows in float32 as well, or is no number there, is
another matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.locate.backward import returned_to
from nanscope.locate.origin import Element
from nanscope.locate.trace import Trace
from nanscope.program.calls import Computes
from nanscope.program.perform import perform
from nanscope.snapshot.observation import Phase
from nanscope.torch_inside import Mode

HALF = torch.float16  # the other one ends where float32 does
LARGEST = torch.finfo(HALF).max


def leaves_half(origin: Element, phase: Phase, trace: Trace) -> bool:
    """Is the gradient that the backward of an origin made, or that was added up for it, beyond the range of half precision and no more?"""
    if phase is not Phase.BACKWARD or origin.call is None or not math.isfinite(origin.value) or trace.program.computes is not Computes.LOSS:
        return False
    call = trace.program.calls[origin.call]
    if not any(trace.values[value].dtype is HALF for value in (origin.value_id, *call.inputs())):
        return False
    try:
        trace = trace if trace.run.returned else Trace.of(trace.program, trace.tensors)
        pairs = list(_pairs(trace, origin))
    except (ProgramError, RuntimeError):  # it cannot be run in float32
        return False
    return bool(pairs) and all(bool(_beyond(made, exact, on_the_way)) for made, exact, on_the_way in pairs)


class _Larger(Mode):
    """Sees whether a finite number beyond the range of half precision is made."""

    made = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor) and item.is_floating_point():
                self.made = self.made or bool((torch.isfinite(item) & (item.abs() > LARGEST)).any())
        return result


def _pairs(trace: Trace, origin: Element) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield each gradient in half precision that went bad there, with what float32 makes of the same, and whether something that float32
    made on the way is too large for half precision."""
    came = trace.run.grads.get(origin.value_id)
    if came is None:
        return
    if not bool(torch.isfinite(came).all()):  # it came of several, and each of them is finite
        parts = [part for index in trace.program.consumers.get(origin.value_id, ()) for part in _reached(trace, index, origin.value_id)]
        if came.dtype is HALF and parts and all(bool(torch.isfinite(part).all()) for part in parts):
            yield came, torch.stack([part.float() for part in parts]).sum(0), False
        return
    assert origin.call is not None
    call = trace.program.calls[origin.call]
    wide = {value: trace.values[value].detach() for value in call.inputs()}
    wide = {value: tensor.float().requires_grad_() if tensor.is_floating_point() else tensor for value, tensor in wide.items()}
    results = perform(call, wide, torch.float32, came.device, True, None, origin.call)
    result = next(one for one, out in zip(results, call.outs, strict=False) if out == origin.value_id)
    read = [value for value, tensor in wide.items() if tensor.requires_grad]
    with _Larger() as larger:  # type: ignore[no-untyped-call]
        exact = torch.autograd.grad(result, [wide[value] for value in read], came.float(), allow_unused=True)
    for value, twin in zip(read, exact, strict=True):
        for made in _reached(trace, origin.call, value):
            if twin is not None and made.dtype is HALF and not bool(torch.isfinite(made).all()):
                yield made, twin, larger.made


def _reached(trace: Trace, index: int, value: int) -> Iterator[Tensor]:
    return returned_to(trace, index, value) if index in trace.run.returned else iter(())


def _beyond(made: Tensor, exact: Tensor, on_the_way: bool) -> Tensor:
    """Is all that is bad finite in float32, and too large for half precision, or what it was made by?"""
    bad = ~torch.isfinite(made)
    return (torch.isfinite(exact[bad]) & ((exact[bad].abs() > LARGEST) | on_the_way)).all()
