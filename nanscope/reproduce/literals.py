"""A tensor as source: a list of numbers where there are few, zeros or ones with what differs from them where there are many."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

WIDE = 96  # characters of a line
FEW = 24  # elements that are listed
APART = 6  # elements of a large tensor that are set one by one
DIRECT = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
)  # fmt: skip - what `torch.tensor` makes of numbers


def tensor_lines(name: str, tensor: Tensor, *, grad: bool) -> list[str]:
    """Return the lines that make a tensor, float32 unless they say otherwise. grad: a gradient is wanted."""
    tensor = tensor.detach().cpu()
    if tensor.dtype not in DIRECT:
        return [f"{name} = {_listed(tensor.float(), {})}.to({tensor.dtype})" + (".requires_grad_()" if grad else "")]
    options = {"dtype": str(tensor.dtype)} if _is_said(tensor) else {}
    wanted = {**options, "requires_grad": "True"} if grad else options
    if tensor.numel() and tensor.dim():
        base, many = Counter(_words(tensor)).most_common(1)[0]
        if many == tensor.numel() and many > 3:
            return [f"{name} = {_filled(tensor, base, wanted)}"]
        if tensor.numel() > FEW and tensor.numel() - many <= APART:
            lines = [f"{name} = {_filled(tensor, base, options)}"]
            for place, word in enumerate(_words(tensor)):
                if word != base:
                    index = ", ".join(map(str, _unravel(place, tensor.shape)))
                    lines.append(f"{name}[{index}] = {word}")
            return [*lines, f"{name}.requires_grad_()"] if grad else lines
    if tensor.numel() > FEW and tensor.dim() > 1 and tensor.shape[0] <= APART and all(_is_constant(row) for row in tensor):
        rows = [_words(row.flatten()[:1])[0] for row in tensor]
        base = Counter(rows).most_common(1)[0][0]
        lines = [f"{name} = {_filled(tensor, base, options)}", *(f"{name}[{n}] = {word}" for n, word in enumerate(rows) if word != base)]
        return [*lines, f"{name}.requires_grad_()"] if grad else lines
    return _wrapped(f"{name} = {_listed(tensor, wanted)}")


def _is_constant(tensor: Tensor) -> bool:
    first = tensor.flatten()[0]
    return bool((tensor == first).all()) or bool(torch.isnan(tensor).all())


def _wrapped(line: str) -> list[str]:
    """A line of many numbers, broken after commas."""
    return textwrap.wrap(line, WIDE, subsequent_indent=" " * 4, break_long_words=False, break_on_hyphens=False)


def listed_numbers(tensor: Tensor) -> int:
    """Return how many of its numbers a script has to list."""
    if tensor.numel() <= FEW:
        return tensor.numel()
    apart = tensor.numel() - int(torch.unique(tensor.detach().cpu(), return_counts=True)[1].max())
    return apart if apart <= APART else tensor.numel()


def _is_said(tensor: Tensor) -> bool:
    """Would torch take the numbers for another dtype?"""
    return tensor.dtype not in (torch.float32, torch.int64, torch.bool) or (tensor.dtype is not torch.float32 and not tensor.numel())


def _filled(tensor: Tensor, word: str, options: dict[str, str]) -> str:
    shape = ", ".join(map(str, tensor.shape))
    said = dict(options)
    if not tensor.is_floating_point():
        said.setdefault("dtype", str(tensor.dtype))
        said = {"dtype": said.pop("dtype"), **said}
    rest = "".join(f", {key}={value}" for key, value in said.items())
    if word in ("0.0", "0", "False"):
        return f"torch.zeros({shape}{rest})"
    if word in ("1.0", "1", "True"):
        return f"torch.ones({shape}{rest})"
    return f"torch.full(({shape}{',' * (tensor.dim() == 1)}), {word}{rest})"


def _listed(tensor: Tensor, options: dict[str, str]) -> str:
    rest = "".join(f", {key}={value}" for key, value in options.items())
    if not tensor.numel():
        return f"torch.zeros({', '.join(map(str, tensor.shape)) or '()'}{rest})"
    return f"torch.tensor({_nested(_words(tensor), tuple(tensor.shape))}{rest})"


def _nested(words: Sequence[str], shape: tuple[int, ...]) -> str:
    if not shape:
        return words[0]
    step = len(words) // shape[0]
    return f"[{', '.join(_nested(words[n * step : (n + 1) * step], shape[1:]) for n in range(shape[0]))}]"


def _words(tensor: Tensor) -> list[str]:
    return [_word(element, tensor.dtype) for element in tensor.flatten().tolist()]


def _word(value: object, dtype: torch.dtype) -> str:
    if isinstance(value, complex):
        return f"complex({_word(value.real, torch.float64)}, {_word(value.imag, torch.float64)})"
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "torch.nan"
    if math.isinf(value):
        return "torch.inf" if value > 0 else "-torch.inf"
    exact = torch.tensor(value, dtype=dtype)
    for digits in range(1, 18):  # the fewest that make the same number again
        word = repr(float(f"{value:.{digits}g}"))
        if bool(torch.tensor(float(word), dtype=dtype) == exact):
            return word
    return repr(value)


def _unravel(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        found.append(place % size)
        place //= size
    return tuple(reversed(found))
