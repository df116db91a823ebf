"""What an operator does not check by itself, checked before a call runs: no program reaches memory that is not its tensors'.

Every operator of the table was called with arguments out of all bounds, on tensors that end at a page which may not be read
(`tests/fuzz/operators.py`). Nearly all of them check what they are given: indices, sizes, strides, labels. The rest stand here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.program.attention import unfit
from nanscope.program.calls import overload
from nanscope.program.ops import ATTENTIONS, ROUNDED_DIVISIONS
from nanscope.torch_inside import EVERY_DIVISION_STOPS, schema_of

# What a loss computes in and a file may hold. Quantised, packed and raw dtypes have no kernels for most of what a program does.
DTYPES = frozenset(
    (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    )
)  # fmt: skip

# torch takes a bare number for these, and a word for a device: only what `decode` makes of a file is meant
_MEANT: dict[str, Callable[[Any], bool]] = {
    "ScalarType": DTYPES.__contains__,
    "Layout": lambda arg: arg is torch.strided,
    "MemoryFormat": lambda arg: isinstance(arg, torch.memory_format),
    "Device": lambda arg: isinstance(arg, torch.device),
}


@lru_cache(maxsize=1024)
def _described(function: Any) -> tuple[tuple[tuple[int, str, str], ...], tuple[str, ...]]:
    """Position, name and kind of the arguments of a function that `_MEANT` speaks of; the names of all."""
    arguments = schema_of(function).arguments
    kinds = [str(argument.real_type).removeprefix("Optional[").removesuffix("]") for argument in arguments]
    special = tuple((n, arguments[n].name, kind) for n, kind in enumerate(kinds) if kind in _MEANT)
    return special, tuple(argument.name for argument in arguments)


def bound(function: Any, args: list[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; what is not given is not there."""
    return {**dict(zip(_described(function)[1], args, strict=False)), **kwargs}


def permitted(op: str, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the overload of a call whose arguments do no harm.

    Raises ProgramError for an operator outside the table, and for arguments that would make it read or write elsewhere, or never end.
    """
    function = overload(op)
    for position, name, kind in _described(function)[0]:
        arg = args[position] if position < len(args) else kwargs.get(name)
        if arg is not None and not _MEANT[kind](arg):
            raise ProgramError(f"{op} is given a {name} that no loss has", slug="program-call-unsafe")
    check = _CHECKS.get(op.split(".")[1])
    wrong = check(bound(function, args, kwargs)) if check is not None else None
    if wrong:
        raise ProgramError(f"{op} is not run: {wrong}", slug="program-call-unsafe")
    return function


def _elsewhere(given: Mapping[str, Any]) -> str | None:
    """`_reshape_alias` believes any size and stride: only those of the tensor's own elements."""
    tensor, size, stride = given.get("self"), given.get("size"), given.get("stride")
    if not isinstance(tensor, Tensor) or not isinstance(size, list) or not isinstance(stride, list):
        return None  # torch refuses it
    if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in (*size, *stride)) or math.prod(size) != math.prod(tensor.shape):
        return "its size and stride are not those of the tensor"
    reach = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    own = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return "it reaches outside of the tensor" if math.prod(size) and reach > own else None


def _expanded(given: Mapping[str, Any]) -> str | None:
    """torch's median along a dimension that was expanded reads behind the one element that is there."""
    tensor, dim = given.get("self"), given.get("dim")
    if not isinstance(tensor, Tensor) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        return None
    return "torch reads outside of a tensor that is expanded there" if tensor.shape[dim] > 1 and not tensor.stride(dim) else None


_UNCHECKED = {"trunc", *({"floor"} if EVERY_DIVISION_STOPS else ())}  # rounding modes


def _least_by_minus_one(given: Mapping[str, Any]) -> str | None:
    """The least integer divided by −1 is none any more, and where torch leaves that to the processor it stops the process."""
    dividend, divisor = given.get("self"), given.get("other")
    if given.get("rounding_mode") not in _UNCHECKED or not isinstance(dividend, Tensor):
        return None
    pair = [dividend, divisor if isinstance(divisor, Tensor) else torch.tensor(divisor if isinstance(divisor, (bool, int, float)) else 0)]
    dtype = torch.result_type(*pair)
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool or any(tensor.is_meta or not tensor.numel() for tensor in pair):
        return None
    least = bool((pair[0] == torch.iinfo(dtype).min).any()) and bool((pair[1] == -1).any())
    return "the least integer is divided by -1" if least else None


def _endless(given: Mapping[str, Any]) -> str | None:
    """torch adds 1 to a negative operand until it is positive: from the second order on, which is the derivative of the first."""
    order, tensor = given.get("n"), given.get("self")
    if not isinstance(order, int) or order < 1 or not isinstance(tensor, Tensor) or tensor.is_meta or not tensor.numel():
        return None
    return "it would hardly end" if bool((tensor < -64).any()) else None


_CHECKS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "_reshape_alias": _elsewhere,
    "median": _expanded,
    "nanmedian": _expanded,
    "div": _least_by_minus_one,
    **dict.fromkeys(ROUNDED_DIVISIONS, lambda given: _least_by_minus_one({**given, "rounding_mode": "floor"})),
    "polygamma": _endless,
    **dict.fromkeys(ATTENTIONS, unfit),
}
