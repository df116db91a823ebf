"""Performs one call of a program, under bounds that a file cannot exceed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.program.calls import Arg, Call, Ref, overload
from nanscope.program.ops import FLOAT_FACTORIES, RANGES, SIZED_BY_CONTENT

MAX_ELEMENTS = 1 << 31  # one result of a program from a file; beyond it the file is refused, not executed


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
    made: int | None = 0,
    index: int = 0,
) -> tuple[list[Any], int]:
    """Execute one call on the values it reads; return its results and how many elements they have.

    dtype: compute in this floating dtype instead of the recorded one. grad: with gradients.
    made: the elements that the calls before it made, None if there is no need to count. index: its place in the program, for the error.
    Raises ProgramError if it cannot be executed.
    """
    function = overload(call.op)
    args = [_resolve(arg, values, dtype, device) for arg in call.args]
    kwargs = {name: _resolve(arg, values, dtype, device) for name, arg in call.kwargs}
    if dtype is not None and kwargs.get("dtype") is None and _makes_floats(call, args):
        kwargs["dtype"] = dtype
    try:
        size = 0 if made is None else _elements(call, function, args, kwargs)
        if made is not None and made + size > MAX_ELEMENTS:
            raise ProgramError(f"call {index} ({call.op}) takes the program beyond {MAX_ELEMENTS} elements", slug="program-too-large")
        with torch.set_grad_enabled(grad):
            result = function(*args, **kwargs)
    except _FAILURES as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ProgramError(f"call {index} ({call.op}) failed: {first}", slug="program-call-failed") from error
    return (list(result) if isinstance(result, (tuple, list)) else [result]), size


def _makes_floats(call: Call, args: list[Any]) -> bool:
    """Does a factory that names no dtype give the default one?"""
    if call.name == "full":
        return len(args) > 1 and isinstance(args[1], float)
    if call.name == "arange":
        return any(isinstance(arg, float) for arg in args)
    return call.name in FLOAT_FACTORIES


# What a call with arguments from a hostile file may raise.
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError, AttributeError, AssertionError, MemoryError, RecursionError)


def _elements(call: Call, function: Any, args: list[Any], kwargs: dict[str, Any]) -> int:
    """Return how many elements a call will make, worked out without making them: a file must not be able to ask for all memory."""
    huge = any(isinstance(arg, (int, float)) and MAX_ELEMENTS < abs(arg) < math.inf for arg in args)
    if huge and call.name in RANGES:
        return MAX_ELEMENTS + 1  # torch itself overflows on such sizes
    if call.name in SIZED_BY_CONTENT:
        return sum(tensor.numel() for tensor in _tensors(args))  # at most about what goes in
    if call.name == "repeat_interleave":
        repeats = [arg for arg in args if isinstance(arg, Tensor) and not arg.is_floating_point()]
        if repeats:
            total: int = int(repeats[-1].sum())
            return total * max(1, int(args[0].numel()))
    result = function(*_on_meta(args), **{**{name: _on_meta(arg) for name, arg in kwargs.items()}, **_meta_device(function)})
    return sum(tensor.numel() for tensor in _tensors(result))


def _meta_device(function: Any) -> dict[str, Any]:
    named = any(argument.name == "device" for argument in function._schema.arguments)
    return {"device": torch.device("meta")} if named else {}


def _on_meta(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
    if isinstance(arg, list):
        return [_on_meta(item) for item in arg]
    return arg


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
