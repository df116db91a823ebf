"""What a tensor holds, in one line.

>>> str(nanscope.summarise(ratio, mask))
'[3, 5] float32, 0.9048 … 1.105, 3 of 15 bad, first at [1, 3], 2 masked, +inf!, NaN! ×2'

Notable: everything is counted where the tensor lies, piece by piece so that a large one is never held a second time, and crosses to the
host at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.program.local import local
from nanscope.program.numbers import dtype_name, plain
from nanscope.text import number, show_index, unravel

PIECE = 1 << 22  # elements that are looked at together, in float64
SAMPLE = 1 << 20  # elements of which the median is taken; of a larger tensor it is that of as many, spread evenly


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """What a tensor holds; `str()` of it is the line.

    minimum, maximum: of the finite elements, of complex ones the magnitude; None where there are none.
    nan, posinf, neginf: elements. first: index of the first of them. masked: how many of them the mask excludes, None without a mask.
    """

    shape: tuple[int, ...]
    dtype: str
    minimum: float | None
    maximum: float | None
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    first: tuple[int, ...] | None = None
    masked: int | None = None

    @property
    def nonfinite(self) -> int:
        """Number of elements that are NaN or infinite."""
        return self.nan + self.posinf + self.neginf

    def __str__(self) -> str:
        parts = [f"{show_index(self.shape)} {self.dtype}"]
        if self.minimum is not None:
            parts.append(span(self.minimum, self.maximum))
        if not math.prod(self.shape):
            parts.append("empty")
        if self.first:  # of a scalar it is ()
            parts.append(f"{self.nonfinite} of {math.prod(self.shape)} bad, first at {show_index(self.first)}")
        if self.nonfinite:
            parts += [] if self.masked is None else [f"{self.masked} masked"]
            parts += loud(self.nan, self.posinf, self.neginf)
        return ", ".join(parts)


def span(low: float | None, high: float | None) -> str:
    """Return the extremes of some elements: "−2 … 1.5"."""
    return number(low) if low == high else f"{number(low)} … {number(high)}"


def loud(nan: int, posinf: int, neginf: int) -> list[str]:
    """Return what is bad, NaN last."""
    counts = ((neginf, "−inf!"), (posinf, "+inf!"), (nan, "NaN!"))
    return [f"{name} ×{many}" if many > 1 else name for many, name in counts if many]


def summarise(tensor: Tensor, mask: Tensor | None = None) -> TensorSummary:
    """Return what a tensor holds.

    tensor: any shape, any dtype; integers and bools are finite, a complex element is bad if either part is.
    mask:   broadcastable to `tensor`; true where the loss reads.
    Raises TypeError for something that is no tensor, ValueError if `mask` does not broadcast, and NanscopeError with the slug
    "no-numbers" for a tensor whose numbers cannot be read (of the device "meta", or one that stands for others).
    """
    checked_pair(tensor, mask)
    part = local(tensor)
    if part is None:
        raise NanscopeError(f"a {type(tensor).__name__} on {tensor.device} holds no numbers that can be read", slug="no-numbers")
    fits = mask is not None and part.shape == tensor.shape
    found = counted(part, mask if fits else None)
    return TensorSummary(
        shape=tuple(part.shape),
        dtype=dtype_name(tensor.dtype),
        minimum=found.minimum,
        maximum=found.maximum,
        nan=found.nan,
        posinf=found.posinf,
        neginf=found.neginf,
        first=found.first,
        masked=found.masked,
    )


def checked_pair(tensor: object, mask: object) -> None:
    """Raise TypeError if either is no tensor, ValueError if the mask does not broadcast to the tensor."""
    for name, given in (("tensor", tensor), ("mask", mask)):
        if not isinstance(given, Tensor) and not (name == "mask" and given is None):
            hint = ": torch.as_tensor(…) makes one" if hasattr(given, "__array__") or isinstance(given, (int, float, list, tuple)) else ""
            raise TypeError(f"{name} takes a tensor, not {type(given).__name__}{hint}")
    if isinstance(tensor, Tensor) and isinstance(mask, Tensor) and not _fits(mask, tensor):
        raise ValueError(f"a mask of shape {list(mask.shape)} does not broadcast to {list(tensor.shape)}")


def _fits(mask: Tensor, tensor: Tensor) -> bool:
    return mask.is_nested or tensor.is_nested or broadcasts(mask.shape, tensor.shape)


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Does a tensor of one shape broadcast to the other one?"""
    return len(shape) <= len(to) and all(own in (1, size) for own, size in zip(reversed(shape), reversed(to), strict=False))


@dataclass(frozen=True, slots=True)
class Contents:
    """What was counted in a tensor. minimum, median, maximum: of the finite elements, None where there are none; sampled: the median is of
    a part of them. first: of the bad elements. selected: elements that the mask reads; low, high: of the finite ones among them. masked:
    bad elements that it leaves out. None without a mask."""

    minimum: float | None
    median: float | None
    maximum: float | None
    sampled: bool
    zeros: int
    nan: int
    posinf: int
    neginf: int
    first: tuple[int, ...] | None
    selected: int | None
    low: float | None
    high: float | None
    masked: int | None


def counted(tensor: Tensor, mask: Tensor | None) -> Contents:
    """Count what a tensor of plain memory holds, in one transfer. mask: broadcasts to it. Reads, and records nothing for autograd."""
    with torch.no_grad():
        if tensor.device.type == "mps":  # which has no float64
            tensor, mask = tensor.cpu(), None if mask is None else mask.cpu()
        tensor = tensor.detach()
        reads = None if mask is None else mask.detach().to(tensor.device).bool().expand(tensor.shape)
        every = -(-tensor.numel() // SAMPLE) or 1
        rows, samples, ends = list[Tensor](), list[Tensor](), [0]
        for piece, of_mask in _pieces(tensor, reads):
            values = plain(piece).flatten()
            row, finite = _row(values, None if of_mask is None else of_mask.flatten())
            rows.append(row)
            samples.append(finite if every == 1 else finite[_spread(len(finite), every, len(rows), finite.device)])
            ends.append(ends[-1] + values.numel())
        if not rows:
            return Contents(None, None, None, False, 0, 0, 0, 0, None, None if mask is None else 0, None, None, None if mask is None else 0)
        median = torch.nanmedian(torch.cat(samples))
        *found, middle = torch.cat([*rows, median[None]]).tolist()
    table = [found[n : n + WIDE] for n in range(0, len(found), WIDE)]
    low, high, zeros, nan, posinf, neginf, _, selected, low_read, high_read, masked = zip(*table, strict=True)
    first = next((end + int(line[6]) for end, line in zip(ends, table, strict=False) if sum(line[3:6])), None)
    return Contents(
        minimum=_finite(min(low)),
        median=None if math.isnan(middle) else middle,
        maximum=_finite(max(high)),
        sampled=every > 1,
        zeros=int(sum(zeros)),
        nan=int(sum(nan)),
        posinf=int(sum(posinf)),
        neginf=int(sum(neginf)),
        first=None if first is None else unravel(first, tensor.shape),
        selected=None if mask is None else int(sum(selected)),
        low=None if mask is None else _finite(min(low_read)),
        high=None if mask is None else _finite(max(high_read)),
        masked=None if mask is None else int(sum(masked)),
    )


WIDE = 11  # numbers of a piece


def _row(values_N: Tensor, reads_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the numbers of a piece, [WIDE] float64 where it lies, and its elements with NaN for what is not finite, [N]."""
    nan, posinf, neginf = torch.isnan(values_N), values_N == math.inf, values_N == -math.inf
    bad = nan | posinf | neginf
    at_most, at_least = torch.where(bad, math.inf, values_N), torch.where(bad, -math.inf, values_N)
    numbers = [at_most.amin(), at_least.amax(), (values_N == 0).sum(), nan.sum(), posinf.sum(), neginf.sum(), bad.int().argmax()]
    if reads_N is None:
        numbers += [numbers[0]] * 4
    else:
        read = torch.where(reads_N, at_most, math.inf).amin(), torch.where(reads_N, at_least, -math.inf).amax()
        numbers += [reads_N.sum(), *read, (bad & ~reads_N).sum()]
    return torch.stack([n.double() for n in numbers]), torch.where(bad, math.nan, values_N)


def _spread(many: int, every: int, turn: int, device: torch.device) -> Tensor:
    """Return one of so many positions of some, in the steps of the golden section: every n-th one would be of a few columns only. turn: of
    several parts, the how manieth this is; each begins elsewhere."""
    step, wanted = round(0.618 * many) or 1, -(-many // every)
    while math.gcd(step, many) > 1:
        step += 1
    return torch.arange(turn * wanted, (turn + 1) * wanted, device=device) * step % many


def _pieces(tensor: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the parts of a tensor, and of its mask, in the order of its elements, none larger than is looked at together."""
    if not tensor.numel():
        return
    if tensor.numel() <= PIECE:
        yield tensor, mask
        return
    axis = next(axis for axis, size in enumerate(tensor.shape) if size > 1)  # the first one: what follows another then stands behind it
    each = max(1, PIECE * tensor.shape[axis] // tensor.numel())
    for start in range(0, tensor.shape[axis], each):
        here = axis, start, min(each, tensor.shape[axis] - start)
        yield from _pieces(tensor.narrow(*here), None if mask is None else mask.narrow(*here))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
