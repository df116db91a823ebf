"""Questions to the numbers in tensors: are they finite, how large, how near to the end of their dtype. Most stay on the device.

Of a tensor that is spread over ranks, or wrapped, its part in here is asked (`local`); what cannot be read counts as finite, and as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nanscope.program.local import local
from nanscope.torch_inside import norms_of, without_modes

_NORMED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})  # dtypes that have a norm of their own
with without_modes():  # else, to whoever imports this under one that hands out tensors without content, they would be of those
    _ANSWERS = {fine: torch.tensor(fine, device="cpu") for fine in (True, False)}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as people write it: float32."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensors: Mapping[int, Tensor]) -> int:
    """Return the bytes that tensors take in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def smallest(dtype: torch.dtype) -> float:
    return {torch.float16: 1e-4, torch.bfloat16: 1e-6, torch.float64: 1e-12}.get(dtype, 1e-8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Are two tensors the same, bit by bit (a NaN equals itself)? What cannot be read is the same as nothing."""
    one, other = local(a), local(b)
    if one is None or other is None or a.shape != b.shape or one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = one, other
    same = (a == b) | (torch.isnan(a) & torch.isnan(b)) if a.is_floating_point() else a == b
    return bool(same.all())


NEAR = 0.05  # of the largest element


def is_near(a: Tensor, b: Tensor) -> bool:
    """Are two tensors the same but for rounding, and bad in the same places?"""
    one, other = local(a), local(b)
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return False
    one, other = plain(one), plain(other)
    fine = torch.isfinite(one)
    same = fine | (one == other) | (torch.isnan(one) & torch.isnan(other))
    apart = torch.where(fine, one - other, 0.0).abs()
    return bool(same.all() & (apart <= NEAR * torch.where(fine, other, 0.0).abs().amax()).all()) if one.numel() else True


def first_nonfinite(tensor: Tensor) -> int | None:
    """Return the flat position of the first element that is NaN or infinite, None if there is none. Counted in the part that is here."""
    part = local(tensor)
    if part is None:
        return None
    tensor = part
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return None
    bad = ~torch.isfinite(tensor.flatten() if tensor.dtype.itemsize > 1 else tensor.flatten().float())
    position = int(bad.int().argmax())
    return position if bool(bad[position]) else None


def at(tensor: Tensor, flat: int) -> float:
    """Return one element as a float, of the part that is here; of a complex number its magnitude, or what is bad in it."""
    part = local(tensor)
    if part is None:
        return math.nan
    element = part.flatten()[flat]
    return float(plain(element) if element.is_complex() else element)


def quantiles(numbers: Tensor, *shares: float) -> list[float]:
    """Return quantiles of finite numbers, between the two that are next to each, as `torch.quantile` does. numbers: at least one.

    Nothing is sorted, and there may be any number of them.
    """
    flat, found = numbers.flatten(), []
    for share in shares:
        rank, part = divmod(share * (flat.numel() - 1), 1)
        low = high = torch.kthvalue(flat, int(rank) + 1).values
        if part and int((flat <= low).sum()) == int(rank) + 1:  # the next one is another number
            high = torch.where(flat > low, flat, math.inf).min()
        found.append(float(torch.lerp(low, high, part)))
    return found


def plain(tensor: Tensor) -> Tensor:
    """Return the values as float64, on the device they are on; complex numbers by the part that is worse."""
    values = tensor.detach()
    if values.is_quantized:
        values = values.dequantize()
    if values.is_complex():
        parts = torch.view_as_real(values.resolve_conj()).double()
        worst = torch.where(torch.isfinite(parts[..., 0]), parts[..., 1], parts[..., 0])
        return torch.where(torch.isfinite(worst), torch.hypot(parts[..., 0], parts[..., 1]), worst)
    return values.double()


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor in one pass, on the device and without a transfer: shape [len(tensors)], float32.

    A NaN or an infinity in a tensor is one in its norm. The reverse does not hold: finite elements may have an infinite norm.
    """
    if not tensors:
        return torch.zeros(0)
    parts = [_readable(tensor) for tensor in tensors]
    return joined(norms_of([part if part.dtype in _NORMED and part.numel() else _widened(part) for part in parts], 2.0))


def joined(numbers: Sequence[Tensor]) -> Tensor:
    """Return tensors of one number each as one, where most of them are: shape [len(numbers)], float32."""
    dtype = numbers[0].dtype
    if not all(one.dtype is dtype and not one.dim() for one in numbers) or len({one.device for one in numbers}) > 1:
        device = next((one.device for one in numbers if not one.is_cpu), numbers[0].device)  # of a model that lies on several
        numbers = [one.reshape(()).to(device, torch.float32) for one in numbers]
    return torch.stack(list(numbers)).float()


def _readable(tensor: Tensor) -> Tensor:
    part = local(tensor)
    return torch.zeros(0) if part is None else part


def _widened(tensor: Tensor) -> Tensor:
    """fp8, integer, complex and empty tensors have no norm of their own."""
    if tensor.numel() == 0:
        return torch.zeros(1, device=tensor.device)
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.float()


def is_binary(tensor: Tensor) -> bool:
    """Is every element 0 or 1, as those of a mask are?"""
    return bool(((tensor == 0) | (tensor == 1)).all())


def is_spoilt(tensor: Tensor) -> bool:
    """Is an element NaN, or +inf? An −inf is most often a mask."""
    return tensor.is_floating_point() and bool(tensor.numel()) and not bool((tensor.detach() < math.inf).all())


def is_finite(tensor: Tensor) -> Tensor:
    """Return a bool scalar on the tensor's device: true if every element is finite. Reads the memory once, transfers nothing."""
    part = _readable(tensor)
    values = _widened(part) if part.is_complex() or part.dtype.itemsize == 1 or not part.numel() else part
    if not values.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=values.device)
    if values.is_cpu:  # where an answer waits for nothing, and each call is as dear as reading a small tensor
        return _ANSWERS[all(math.isfinite(one.item()) for one in (torch.aminmax(values) if values.dim() else (values,)))]
    low, high = torch.aminmax(values)
    return (low * 0 + high * 0) == 0  # each times 0 is 0 if it is finite, else NaN; in fewer calls than `isfinite` makes


def largest_in(tensor: Tensor) -> float:
    """Return the largest magnitude in a tensor that has elements, NaN if one is. The norm that says the same takes five times as long."""
    if tensor.is_complex():
        return float(torch.linalg.vector_norm(tensor, math.inf))
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high))


def count_bad(tensors: Sequence[Tensor]) -> int:
    """Return how many of the tensors hold a non-finite element; exact, and looks closer only where a norm is suspicious."""
    if not tensors:
        return 0
    suspicious = [index for index, norm in enumerate(norms(tensors).tolist()) if not math.isfinite(norm)]
    return sum(not bool(is_finite(tensors[index])) for index in suspicious)


def exponent_limit(dtype: torch.dtype) -> float:
    """Return the largest x, in nats, for which exp(x) is finite: 88.72 in float32 and bfloat16, 11.09 in float16."""
    return math.log(torch.finfo(dtype).max)


def headroom_bits(tensor_absmax: float, dtype: torch.dtype) -> float:
    """Return how many doublings are left before a magnitude leaves the range of its dtype."""
    if tensor_absmax <= 0:
        return math.inf
    return math.log2(torch.finfo(dtype).max) - math.log2(tensor_absmax)
