"""A call as a person would write it into a line of theirs: `clamp(x, -20, 20)` is `x.clamp(min=-20.0, max=20.0)`, `add(x, 1)` is `x + 1`.

    written("exp", (Phrase("a - b", SUM),), {})      (a - b).exp()

Operands are texts already; nothing is looked up, and nothing is run. A script, which has to say every operator to the bit, has an idiom for
each (`reproduce.idioms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from nanscope.program.spelling import ATOM, CASTS, INFIX, PREFIX, PRODUCT, SIGN, Phrase, function_of

_CALLED = frozenset(  # what is written as a function; every other one is a method
    (
        "where", "zeros_like", "ones_like", "full_like", "stack", "cat", "maximum", "minimum", "special_log_ndtr", "softplus",
        "log_sigmoid_forward", "_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax", "logsumexp",
    )
)  # fmt: skip
_SHORT_OF = {"_softmax": 2, "_log_softmax": 2, "_safe_softmax": 2}  # arguments that a person gives
_KEYWORD = {"clamp_min": ("clamp", "min"), "clamp_max": ("clamp", "max")}
_CARRIES = frozenset(("alias", "clone", "lift_fresh", "detach_copy"))  # of which a formula says nothing


def written(name: str, args: Sequence[Phrase | None], kwargs: Mapping[str, object]) -> Phrase | None:
    """Return a call in the words of torch, None if there are none. name: of the operator, bare. args: in the operator's order."""
    if name in _CARRIES and args:
        return args[0]
    if name == "_to_copy" and args and args[0] is not None:
        dtype = kwargs.get("dtype")
        if not isinstance(dtype, torch.dtype) or dtype not in CASTS:
            return None
        cast = f".{CASTS[dtype]}()"
        return args[0] if args[0].text.endswith(cast) else Phrase(f"{args[0].inside(ATOM)}{cast}")
    if any(arg is None for arg in args[:1]) or not args:
        return None
    special = _SPECIAL.get(name)
    given = args[: _SHORT_OF.get(name, len(args))]
    if special is not None:
        return special(given, kwargs)
    texts = [number(None) if arg is None else arg for arg in given]
    if name in INFIX and len(texts) == 2 and not kwargs:
        sign, binds = INFIX[name]
        return Phrase(f"{texts[0].inside(ATOM)} {sign} {texts[1].inside(ATOM)}", binds)
    if name in PREFIX and len(texts) == 1 and not kwargs:
        return Phrase(f"{PREFIX[name]}{texts[0].inside(ATOM)}", SIGN)
    words = [text.text for text in texts]
    named = [f"{key}={shown.text}" for key, value in kwargs.items() if (shown := literal(value)) is not None]
    if len(named) < len(kwargs):
        return None
    if name in _CALLED:
        return Phrase(f"{function_of(name)}({', '.join([*words, *named])})")
    method, keyword = _KEYWORD.get(name, (name, ""))
    if not hasattr(torch.Tensor, method) or method.startswith("_"):
        return None
    rest = [f"{keyword}={words[1]}"] if keyword else words[1:]
    return Phrase(f"{texts[0].inside(ATOM)}.{method}({', '.join([*rest, *named])})")


def _clamp(args: Sequence[Phrase | None], _: Mapping[str, object]) -> Phrase | None:
    bounds = [f"{key}={arg.text}" for key, arg in zip(("min", "max"), args[1:], strict=False) if arg is not None]
    return Phrase(f"{args[0].inside(ATOM)}.clamp({', '.join(bounds)})") if args[0] is not None and bounds else None


def _nan_to_num(args: Sequence[Phrase | None], _: Mapping[str, object]) -> Phrase | None:
    named = [f"{key}={arg.text}" for key, arg in zip(("nan", "posinf", "neginf"), args[1:], strict=False) if arg is not None]
    return Phrase(f"{args[0].inside(ATOM)}.nan_to_num({', '.join(named)})") if args[0] is not None else None


def _spread(name: str) -> Callable[[Sequence[Phrase | None], Mapping[str, object]], Phrase | None]:
    def text(args: Sequence[Phrase | None], kwargs: Mapping[str, object]) -> Phrase | None:
        shown = {key: literal(value) for key, value in kwargs.items() if value is not None and value is not False}
        if args[0] is None or any(value is None for value in shown.values()):
            return None
        dims = [] if len(args) < 2 or args[1] is None else [args[1].text]
        return Phrase(
            f"{args[0].inside(ATOM)}.{name}({', '.join([*dims, *(f'{key}={value.text}' for key, value in shown.items() if value)])})"
        )

    return text


_SPECIAL: dict[str, Callable[[Sequence[Phrase | None], Mapping[str, object]], Phrase | None]] = {
    "clamp": _clamp,
    "nan_to_num": _nan_to_num,
    "std": _spread("std"),
    "var": _spread("var"),
}


def literal(value: object) -> Phrase | None:
    """Return a number, a flag, a dtype or a list of numbers as it is written, None for anything else."""
    if isinstance(value, torch.dtype):
        return Phrase(str(value))
    if isinstance(value, (list, tuple)):
        items = [literal(item) for item in value]
        if any(item is None for item in items):
            return None
        words = [item.text for item in items if item is not None]
        return Phrase(words[0]) if len(words) == 1 else Phrase(f"({', '.join(words)})")
    return number(value) if value is None or isinstance(value, (bool, int, float)) else None


def number(value: bool | int | float | None) -> Phrase:
    """Return a number as it is written: 0.0, 1e-08, float("inf"), a quarter of the largest one of a dtype by that name."""
    if isinstance(value, float) and not math.isfinite(value):
        return Phrase(f'float("{value}")')
    if isinstance(value, float):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            if abs(value) == torch.finfo(dtype).max / 4:
                return Phrase(f"torch.finfo({dtype}).{'max' if value > 0 else 'min'} / 4", PRODUCT)
        value = _short(value)
    return Phrase(repr(value), SIGN if isinstance(value, (int, float)) and value < 0 else ATOM)


def _short(value: float) -> float:
    """The shortest number that is the same in float32, of one that float32 holds; or in float64."""
    single = torch.float32 if torch.tensor(value, dtype=torch.float32).double() == value else torch.float64
    wanted = torch.tensor(value, dtype=single)
    return next((n for digits in range(1, 17) if torch.tensor(n := float(f"{value:.{digits}g}"), dtype=single) == wanted), value)
