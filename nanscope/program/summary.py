"""What a tensor holds, in one line.

>>> str(nanscope.summarise(ratio, mask))
'[3, 5] float32, 0.9048 … 1.105, 3 of 15 bad, first at [1, 3], 2 masked, +inf!, NaN! ×2'
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.program.numbers import dtype_name, plain
from nanscope.text import number, show_index, unravel


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
            low, high = number(self.minimum), number(self.maximum)
            parts.append(low if self.minimum == self.maximum else f"{low} … {high}")
        if not math.prod(self.shape):
            parts.append("empty")
        if self.first:  # of a scalar it is ()
            parts.append(f"{self.nonfinite} of {math.prod(self.shape)} bad, first at {show_index(self.first)}")
        if self.nonfinite:
            parts += [] if self.masked is None else [f"{self.masked} masked"]
            counts = ((self.neginf, "−inf!"), (self.posinf, "+inf!"), (self.nan, "NaN!"))
            parts += [f"{name} ×{many}" if many > 1 else name for many, name in counts if many]
        return ", ".join(parts)


def summarise(tensor: Tensor, mask: Tensor | None = None) -> TensorSummary:
    """Return what a tensor holds.

    tensor: any shape, any dtype; integers and bools are finite, a complex element is bad if either part is.
    mask:   broadcastable to `tensor`; true where the loss reads.
    Raises ValueError if `mask` does not broadcast.
    """
    shape, excluded = tuple(tensor.shape), None
    if mask is not None:
        try:
            excluded = ~mask.detach().bool().expand(shape)
        except RuntimeError:
            raise ValueError(f"a mask of shape {list(mask.shape)} does not broadcast to {list(shape)}") from None
    values = plain(tensor)
    nan, posinf, neginf = torch.isnan(values), values == math.inf, values == -math.inf
    bad = nan | posinf | neginf
    finite = values[~bad]
    low, high = torch.aminmax(finite) if finite.numel() else (None, None)
    return TensorSummary(
        shape=shape,
        dtype=dtype_name(tensor.dtype),
        minimum=None if low is None else float(low),
        maximum=None if high is None else float(high),
        nan=int(nan.sum()),
        posinf=int(posinf.sum()),
        neginf=int(neginf.sum()),
        first=unravel(int(bad.flatten().int().argmax()), shape) if bool(bad.any()) else None,
        masked=None if excluded is None else int((bad & excluded).sum()),
    )
