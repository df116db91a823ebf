"""Arguments of calls as JSON data and back; what was not written here is refused."""

from __future__ import annotations

import math
from typing import Any

import torch

from nanscope.program.calls import Arg, Ref

_NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encode(arg: Arg) -> Any:
    """Return an argument as JSON data: {"v": id} for values, {"dtype": …} and the like for what JSON does not have."""
    if isinstance(arg, Ref):
        return {"v": arg.id}
    if isinstance(arg, (tuple, list)):
        return [encode(item) for item in arg]
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    kind = type(arg).__name__  # dtype, device, memory_format, layout
    return {kind: str(arg).removeprefix("torch.")}


DEEPEST = 8  # lists within lists of one argument; aten takes lists of tensors, and no deeper ones


def decode(data: Any, depth: int = 0) -> Arg:
    """Return the argument that `encode` wrote. depth: of the lists that it stands in."""
    if depth > DEEPEST:
        raise ValueError("an argument is nested too deeply")
    if isinstance(data, list):
        return tuple(decode(item, depth + 1) for item in data)
    if not isinstance(data, dict):
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        raise ValueError(f"cannot read the argument {data!r}")
    ((kind, text),) = data.items()
    if kind == "v":
        return Ref(int(text))
    if kind == "float":
        return _NONFINITE[text]
    if kind == "device":
        return torch.device("cpu")
    found = getattr(torch, text, None) if isinstance(text, str) and text.isidentifier() else None
    if kind in ("dtype", "memory_format", "layout") and isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
        return found
    raise ValueError(f"cannot read the argument {data!r}")
