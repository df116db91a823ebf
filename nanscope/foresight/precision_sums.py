"""Where sums and differences lose bits: the order in which a sum is added up, and what cancels in a difference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.foresight.precision_run import EXACT, error_of
from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Ref
from nanscope.program.flow import dims_of
from nanscope.program.numbers import dtype_name
from nanscope.program.ops import SHIFTS, SUMS
from nanscope.program.perform import perform


@dataclass(frozen=True, slots=True)
class Summed:
    """A sum or a mean, in several orders.

    terms: of each result. condition: Σ|x| / |Σx| at the result that matters most: what a relative error of a term becomes.
    recorded, backwards, pairwise: how far the loss is moved, to first order, by the sum as recorded, from the last term to the first, and
    by halves, all in the recorded dtype, against float64. agree: recorded and backwards are the same numbers.
    """

    call: int
    dtype: str
    terms: int
    condition: float
    recorded: float
    backwards: float
    pairwise: float
    agree: bool


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A difference of nearly equal numbers.

    bits: of the dtype. median, most: bits that cancel, over the elements that the loss depends on. equal: of those, how many are exactly 0.
    """

    call: int
    dtype: str
    bits: int
    median: float
    most: float
    elements: int
    equal: int


def sums(trace: Trace, sensitivity: Mapping[int, Tensor]) -> Iterator[Summed]:
    """Yield every sum of several terms that the loss depends on. sensitivity: ∂loss / ∂value, in float64."""
    for index, call in enumerate(trace.program.calls):
        out, value = call.outs[0], next(call.inputs(), None)
        if call.name not in SUMS or out is None or value is None or out not in sensitivity:
            continue
        operand, result = trace.values[value].detach(), trace.values[out].detach()
        terms = operand.numel() // max(result.numel(), 1)
        if terms < 2 or not operand.is_floating_point() or operand.dtype is EXACT:
            continue
        dims = tuple(dim % operand.dim() for dim in dims_of(call, operand)) or tuple(range(operand.dim()))
        weight = sensitivity[out]
        exact = _again(call, {value: operand.double()}, EXACT)
        turned = _again(call, {value: operand.flip(dims)}, None)
        halves = _by_halves(operand.to(result.dtype), dims).reshape(result.shape)
        halves = halves / terms if call.name == "mean" else halves
        size = _again(call, {value: operand.double().abs()}, EXACT)
        at = int((weight * exact).abs().nan_to_num(0.0, 0.0, 0.0).flatten().argmax())
        whole = float(exact.flatten()[at])
        recorded, backwards, pairwise = (float((error_of(found, exact) * weight).sum()) for found in (result, turned, halves))
        condition = abs(float(size.flatten()[at]) / whole) if whole else math.inf
        same = bool(torch.equal(turned, result))
        yield Summed(index, dtype_name(result.dtype), terms, condition, recorded, backwards, pairwise, same)


def _again(call: Call, values: Mapping[int, Tensor], dtype: torch.dtype | None) -> Tensor:
    device = next(iter(values.values())).device
    result: Tensor = perform(call, values, dtype, device, False)[0]
    return result


def _by_halves(operand: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The sum over some dimensions in pairs of neighbours, then pairs of these, and so on, each rounded to the dtype."""
    kept = [dim for dim in range(operand.dim()) if dim not in dims]
    rows = operand.permute(*kept, *dims).reshape(*(operand.shape[dim] for dim in kept), -1)
    while rows.shape[-1] > 1:
        if rows.shape[-1] % 2:
            rows = torch.nn.functional.pad(rows, (0, 1))
        rows = rows[..., ::2] + rows[..., 1::2]
    return rows[..., 0]


def cancelled(trace: Trace, sensitivity: Mapping[int, Tensor]) -> Iterator[Cancelled]:
    """Yield every difference, or sum of opposite signs, in which at least one bit cancels that the loss depends on."""
    for index, call in enumerate(trace.program.calls):
        out = call.outs[0]
        if call.name not in SHIFTS or out is None or out not in sensitivity:
            continue
        result = trace.values[out].detach()
        if not result.is_floating_point():
            continue
        left, right = (_side(trace, arg) for arg in call.args[:2])
        counts = (sensitivity[out] != 0).expand(result.shape) & torch.isfinite(result)
        largest = torch.maximum(left.abs(), right.abs()).expand(result.shape)[counts]
        own = result.double().abs()[counts]
        lost = (largest / own).log2()[own > 0].clamp(min=0.0)
        if len(own) and len(lost) and float(lost.max()) >= 1:
            bits = 1 - round(math.log2(torch.finfo(result.dtype).eps))
            ordered = lost.sort().values
            yield Cancelled(
                index,
                dtype_name(result.dtype),
                bits,
                float(ordered[len(ordered) // 2]),
                float(ordered[-1]),
                len(own),
                int((own == 0).sum()),
            )


def _side(trace: Trace, arg: object) -> Tensor:
    """A side of a difference; a factor that it has by name is 1 or −1 in all that is met."""
    if isinstance(arg, Ref):
        return trace.values[arg.id].detach().double()
    if isinstance(arg, (int, float)):
        return torch.tensor(float(arg), dtype=EXACT)
    raise ProgramError(f"{arg!r} is no side of a difference", slug="program-call-failed")
