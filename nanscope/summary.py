"""From a tensor to numbers: the one-pass guard that runs during training, and the full summary that runs on a hit.

The only reader of tensor values during capture. NaN and infinities survive a norm, so one pass over memory tells both the gradient
norm and whether anything is non-finite; the exact look follows only when the norm is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.indices import unravel


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


def plain(tensor: Tensor) -> Tensor:
    """Return the values as float64, on the device they are on; complex numbers by the part that is worse."""
    values = tensor.detach()
    if values.is_quantized:
        values = values.dequantize()
    if values.is_complex():
        parts = torch.view_as_real(values).double()
        worst = torch.where(torch.isfinite(parts[..., 0]), parts[..., 1], parts[..., 0])
        return torch.where(torch.isfinite(worst), torch.hypot(parts[..., 0], parts[..., 1]), worst)
    return values.double()


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor in one pass, on the device and without a transfer: shape [len(tensors)], float32.

    A NaN or an infinity in a tensor is one in its norm. The reverse does not hold: finite elements may have an infinite norm.
    """
    if not tensors:
        return torch.zeros(0)
    usable = [t.detach() for t in tensors]
    special = [t if t.is_floating_point() and t.dtype.itemsize > 1 and t.numel() else _widened(t) for t in usable]
    found = torch._foreach_norm(special, 2.0)
    return torch.stack([norm.float() for norm in found])


def _widened(tensor: Tensor) -> Tensor:
    """fp8, integer, complex and empty tensors have no norm of their own."""
    if tensor.numel() == 0:
        return torch.zeros(1, device=tensor.device)
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.float()


def is_finite(tensor: Tensor) -> Tensor:
    """Return a bool scalar on the tensor's device: true if every element is finite. Reads the memory once, transfers nothing."""
    values = _widened(tensor.detach()) if tensor.is_complex() or tensor.dtype.itemsize == 1 or not tensor.numel() else tensor.detach()
    if not values.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=values.device)
    low, high = torch.aminmax(values)
    return torch.isfinite(low) & torch.isfinite(high)


def count_bad(tensors: Sequence[Tensor]) -> int:
    """Return how many of the tensors hold a non-finite element; exact, and looks closer only where a norm is suspicious."""
    if not tensors:
        return 0
    suspicious = (~torch.isfinite(norms(tensors))).nonzero().flatten().tolist()
    return sum(not bool(is_finite(tensors[index])) for index in suspicious)


def exponent_limit(dtype: torch.dtype) -> float:
    """Return the largest x, in nats, for which exp(x) is finite: 88.72 in float32 and bfloat16, 11.09 in float16."""
    return math.log(torch.finfo(dtype).max)


def headroom_bits(tensor_absmax: float, dtype: torch.dtype) -> float:
    """Return how many doublings are left before a magnitude leaves the range of its dtype."""
    if tensor_absmax <= 0:
        return math.inf
    return math.log2(torch.finfo(dtype).max) - math.log2(tensor_absmax)
