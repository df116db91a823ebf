"""A call as a person would write it in torch: `clamp(x, -20, 20)` is `x.clamp(-20.0, 20.0)`, `add(x, 1)` is `x + 1`.

    written("exp", "aten.exp.default", (Text("a - b", False),), {})      (a - b).exp()

Operands are texts already; nothing is looked up, and nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Text:
    """An expression. atomic: it may stand before a dot or beside an operator without parentheses."""

    text: str
    atomic: bool = True

    @property
    def operand(self) -> str:
        """The expression as a part of a larger one."""
        return self.text if self.atomic else f"({self.text})"


Argument: TypeAlias = Text | None

_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "remainder": "%", "floor_divide": "//", "matmul": "@", "mm": "@",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "logical_and": "&", "logical_or": "|",
}  # fmt: skip
_PREFIXES = {"neg": "-", "bitwise_not": "~", "logical_not": "~"}
_FUNCTIONS = {  # what is written as a function; every other one is a method
    "where": "torch.where", "zeros_like": "torch.zeros_like", "ones_like": "torch.ones_like", "stack": "torch.stack", "cat": "torch.cat",
    "maximum": "torch.maximum", "minimum": "torch.minimum", "special_log_ndtr": "torch.special.log_ndtr", "softplus": "F.softplus",
    "log_sigmoid_forward": "F.logsigmoid", "_softmax": "torch.softmax", "_log_softmax": "torch.log_softmax",
    "_safe_softmax": "torch._safe_softmax", "logsumexp": "torch.logsumexp", "linalg_slogdet": "torch.linalg.slogdet",
    "softmax": "torch.softmax", "log_softmax": "torch.log_softmax", "full_like": "torch.full_like",
}  # fmt: skip
_SHORT_OF = {"_softmax": 2, "_log_softmax": 2, "_safe_softmax": 2}  # arguments that a person gives
_KEYWORD = {"clamp_min": ("clamp", "min"), "clamp_max": ("clamp", "max")}
_CASTS = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16", torch.float64: "double"}
_CARRIES = frozenset(("alias", "clone", "lift_fresh", "detach_copy"))  # of which a formula says nothing


def written(name: str, args: Sequence[Argument], kwargs: Mapping[str, object]) -> Text | None:
    """Return a call in the words of torch, None if there are none. name: of the operator, bare. args: in the operator's order."""
    if name in _CARRIES and args:
        return args[0]
    if name == "_to_copy" and args and args[0] is not None:
        dtype = kwargs.get("dtype")
        if not isinstance(dtype, torch.dtype) or dtype not in _CASTS:
            return None
        cast = f".{_CASTS[dtype]}()"
        return args[0] if args[0].text.endswith(cast) else Text(f"{args[0].operand}{cast}")
    if any(arg is None for arg in args[:1]) or not args:
        return None
    special = _SPECIAL.get(name)
    given = args[: _SHORT_OF.get(name, len(args))]
    if special is not None:
        return special(given, kwargs)
    texts = [number(None) if arg is None else arg for arg in given]
    if name in _SIGNS and len(texts) == 2 and not kwargs:
        return Text(f"{texts[0].operand} {_SIGNS[name]} {texts[1].operand}", False)
    if name in _PREFIXES and len(texts) == 1 and not kwargs:
        return Text(f"{_PREFIXES[name]}{texts[0].operand}", False)
    words = [text.text for text in texts]
    named = [f"{key}={shown.text}" for key, value in kwargs.items() if (shown := literal(value)) is not None]
    if len(named) < len(kwargs):
        return None
    if name in _FUNCTIONS:
        return Text(f"{_FUNCTIONS[name]}({', '.join([*words, *named])})")
    method, keyword = _KEYWORD.get(name, (name, ""))
    if not hasattr(torch.Tensor, method) or method.startswith("_"):
        return None
    rest = [f"{keyword}={words[1]}"] if keyword else words[1:]
    return Text(f"{texts[0].operand}.{method}({', '.join([*rest, *named])})")


def _clamp(args: Sequence[Argument], _: Mapping[str, object]) -> Text | None:
    bounds = [f"{key}={arg.text}" for key, arg in zip(("min", "max"), args[1:], strict=False) if arg is not None]
    return Text(f"{args[0].operand}.clamp({', '.join(bounds)})") if args[0] is not None and bounds else None


def _nan_to_num(args: Sequence[Argument], _: Mapping[str, object]) -> Text | None:
    named = [f"{key}={arg.text}" for key, arg in zip(("nan", "posinf", "neginf"), args[1:], strict=False) if arg is not None]
    return Text(f"{args[0].operand}.nan_to_num({', '.join(named)})") if args[0] is not None else None


def _spread(name: str) -> Callable[[Sequence[Argument], Mapping[str, object]], Text | None]:
    def text(args: Sequence[Argument], kwargs: Mapping[str, object]) -> Text | None:
        shown = {key: literal(value) for key, value in kwargs.items() if value is not None and value is not False}
        if args[0] is None or any(value is None for value in shown.values()):
            return None
        dims = [] if len(args) < 2 or args[1] is None else [args[1].text]
        return Text(f"{args[0].operand}.{name}({', '.join([*dims, *(f'{key}={value.text}' for key, value in shown.items() if value)])})")

    return text


_SPECIAL: dict[str, Callable[[Sequence[Argument], Mapping[str, object]], Text | None]] = {
    "clamp": _clamp,
    "nan_to_num": _nan_to_num,
    "std": _spread("std"),
    "var": _spread("var"),
}


def literal(value: object) -> Text | None:
    """Return a number, a flag, a dtype or a list of numbers as it is written, None for anything else."""
    if isinstance(value, torch.dtype):
        return Text(str(value))
    if isinstance(value, (list, tuple)):
        items = [literal(item) for item in value]
        if any(item is None for item in items):
            return None
        words = [item.text for item in items if item is not None]
        return Text(words[0]) if len(words) == 1 else Text(f"({', '.join(words)})")
    return number(value) if value is None or isinstance(value, (bool, int, float)) else None


def number(value: bool | int | float | None) -> Text:
    """Return a number as it is written: 0.0, 1e-08, float("inf"), a quarter of the largest one of a dtype by that name."""
    if isinstance(value, float) and not math.isfinite(value):
        return Text(f'float("{value}")')
    if isinstance(value, float):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            if abs(value) == torch.finfo(dtype).max / 4:
                return Text(f"torch.finfo({dtype}).{'max' if value > 0 else 'min'} / 4", False)
        value = _short(value)
    return Text(repr(value), not (isinstance(value, (int, float)) and value < 0))


def _short(value: float) -> float:
    """The shortest number that is the same in float32, of one that float32 holds; or in float64."""
    single = torch.float32 if torch.tensor(value, dtype=torch.float32).double() == value else torch.float64
    wanted = torch.tensor(value, dtype=single)
    return next((n for digits in range(1, 17) if torch.tensor(n := float(f"{value:.{digits}g}"), dtype=single) == wanted), value)
