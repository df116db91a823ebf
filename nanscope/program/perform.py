"""Performs one call of a program, under bounds that a file cannot exceed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.program.attention import HERE, attended
from nanscope.program.calls import Arg, Call, Ref, recorded
from nanscope.program.cost import Allowance, cost, without_content
from nanscope.program.ops import ATTENTIONS, FLOAT_FACTORIES, flow_of
from nanscope.program.safety import bound, permitted

# Call, what it reads, dtype, device, with gradients, allowance, its place in the program → its results.
Performer: TypeAlias = Callable[[Call, Mapping[int, Tensor], torch.dtype | None, torch.device, bool, Allowance | None, int], list[Any]]


def _resolve(arg: Arg, values: Mapping[int, Tensor], dtype: torch.dtype | None, device: torch.device) -> Any:
    if isinstance(arg, Ref):
        try:
            return values[arg.id]
        except KeyError:
            raise ProgramError(f"the program reads value {arg.id} before it is made", slug="program-missing-value") from None
    if isinstance(arg, tuple):
        return [_resolve(item, values, dtype, device) for item in arg]
    if isinstance(arg, torch.dtype) and dtype is not None and arg.is_floating_point:
        return dtype
    if isinstance(arg, torch.device):
        return device  # a step is replayed where its tensors are
    return arg


def perform(
    call: Call,
    values: Mapping[int, Tensor],
    dtype: torch.dtype | None,
    device: torch.device,
    grad: bool,
    allowance: Allowance | None = None,
    index: int = 0,
) -> list[Any]:
    """Execute one call on the values it reads; return its results.

    dtype: compute in this floating dtype instead of the recorded one. grad: with gradients.
    allowance: what the program may still take, None if this process has recorded it: then operators beside those of the table run, too,
    and there is no need to count. index: its place in the program, for the error.
    Raises ProgramError if it cannot be executed, or must not be.
    """
    args = [_resolve(arg, values, dtype, device) for arg in call.args]
    kwargs = {name: _resolve(arg, values, dtype, device) for name, arg in call.kwargs}
    try:
        listed = allowance is not None or flow_of(call.op) is not None
        function = permitted(call.op, args, kwargs) if listed else recorded(call.op)
        if dtype is not None and kwargs.get("dtype") is None and makes_floats(call.name, args):
            kwargs["dtype"] = dtype
        if allowance is not None:
            allowance.charge(index, call.op, cost(function, args, kwargs, allowance.most))
        with torch.set_grad_enabled(grad):
            if call.name in ATTENTIONS and device.type == "cpu" and call.name != HERE:
                result: Any = attended(bound(function, args, kwargs), len(call.outs))
            elif device.type == "meta":
                result = without_content(function, args, kwargs)
            else:
                result = function(*args, **kwargs)
    except FAILURES as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ProgramError(f"call {index} ({call.op}) failed: {first}", slug="program-call-failed") from error
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    if any(isinstance(tensor, Tensor) and min(tensor.shape, default=0) < 0 for tensor in results):  # torch lets some views have that
        raise ProgramError(f"call {index} ({call.op}) makes a tensor of a negative size", slug="program-call-unsafe")
    return results


def makes_floats(name: str, args: Sequence[object]) -> bool:
    """Does a factory that names no dtype give the default one? name: of the operator, as it stands in the tables."""
    if name == "full":
        return len(args) > 1 and isinstance(args[1], float)
    if name == "arange":
        return any(isinstance(arg, float) for arg in args)
    return name in FLOAT_FACTORIES


# What a call with arguments from a hostile file may raise.
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError, MemoryError, RecursionError)
