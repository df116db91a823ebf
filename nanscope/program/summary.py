"""What a tensor holds, in one line's worth of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.program.numbers import plain
from nanscope.text import unravel


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """What a tensor holds. Magnitudes are over the finite elements, None where there are none.

    numel, nan, posinf, neginf, zeros: elements. minimum, maximum, absmax, mean: accumulated in float64.
    first: index of the first non-finite element. masked: non-finite elements that the mask excludes, None without a mask.
    """

    shape: tuple[int, ...]
    dtype: str
    numel: int
    nan: int
    posinf: int
    neginf: int
    zeros: int
    minimum: float | None
    maximum: float | None
    absmax: float | None
    mean: float | None
    first: tuple[int, ...] | None
    masked: int | None = None

    @property
    def nonfinite(self) -> int:
        """Number of elements that are NaN or infinite."""
        return self.nan + self.posinf + self.neginf


def summarise(tensor: Tensor, mask: Tensor | None = None) -> TensorSummary:
    """Count what a tensor holds.

    tensor: any shape, any dtype; integers and bools are finite, a complex element is bad if either part is.
    mask:   broadcastable to `tensor`; true where the loss reads.
    Raises ValueError if `mask` does not broadcast.
    """
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    where = None
    if mask is not None:
        try:
            where = mask.detach().bool().expand(shape)
        except RuntimeError:
            raise ValueError(f"a mask of shape {list(mask.shape)} does not broadcast to {list(shape)}") from None
    values = plain(tensor)
    if values.numel() == 0:
        return TensorSummary(shape, dtype, 0, 0, 0, 0, 0, None, None, None, None, None, None if mask is None else 0)
    nan, posinf, neginf = torch.isnan(values), values == math.inf, values == -math.inf
    bad = nan | posinf | neginf
    finite = values[~bad]
    flat = int(bad.flatten().int().argmax())
    first = unravel(flat, shape) if bool(bad.flatten()[flat]) else None
    some = finite.numel() > 0
    return TensorSummary(
        shape=shape,
        dtype=dtype,
        numel=values.numel(),
        nan=int(nan.sum()),
        posinf=int(posinf.sum()),
        neginf=int(neginf.sum()),
        zeros=int((values == 0).sum()),
        minimum=float(finite.min()) if some else None,
        maximum=float(finite.max()) if some else None,
        absmax=float(finite.abs().max()) if some else None,
        mean=float(finite.mean()) if some else None,
        first=first,
        masked=None if where is None else int((bad & ~where).sum()),
    )
