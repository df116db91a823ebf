"""Runs a recorded program in mixed precision: all of it in float64 but for one rounding, or as recorded but for one wide call.

    Rounded({7: own_errors(trace, 7)})  float64, and what call 7 has rounded put in, forward and backward: what that call alone costs
    Widened(values, {7}, float32)       as recorded, and call 7 in float32: what a `.float()` there gives back
    replaced(trace, {3: f})             float64, and value 3 becomes f(value 3): its gradient goes on as if it were the same

Notable: a rounding is put in as a difference. The call is run on the recorded operands, and its backward on the recorded gradients, in the
recorded dtype and in float64; what lies between is added to the float64 run. So what other calls have rounded is not blamed on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.locate.trace import Trace
from nanscope.program.calls import Call
from nanscope.program.cost import Allowance
from nanscope.program.perform import perform
from nanscope.program.run import Run

EXACT = torch.float64
Become = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Change:
    """How far a run is from the exact one.

    loss: difference. norm: of the gradient's norm, relative. gradient: ‖g − g₆₄‖ / ‖g₆₄‖. cosine: between the two, None for a gradient of
    0. What is not finite is infinitely far.
    """

    loss: float
    norm: float
    gradient: float
    cosine: float | None

    @property
    def finite(self) -> bool:
        """Are loss and gradient finite?"""
        return math.isfinite(self.loss) and math.isfinite(self.gradient)


def loss_of(run: Run, output: int) -> float:
    """Return what was differentiated: the sum of the output, in float64."""
    return float(run.values[output].double().sum())


def change(trace: Trace, run: Run, exact: Run) -> Change:
    """Compare a run with the exact one, over all leaves that collect a gradient."""
    off = loss_of(run, trace.program.output) - loss_of(exact, trace.program.output)
    squares = {"apart": 0.0, "own": 0.0, "exact": 0.0, "both": 0.0}
    for leaf in trace.program.leaves:
        if not leaf.diff or leaf.id not in exact.grads:
            continue
        wanted = exact.grads[leaf.id].double()
        got = run.grads[leaf.id].double() if leaf.id in run.grads else torch.zeros_like(wanted)
        for name, left, right in (
            ("apart", got - wanted, got - wanted),
            ("own", got, got),
            ("exact", wanted, wanted),
            ("both", got, wanted),
        ):
            squares[name] += float((left * right).sum())
    own, size = math.sqrt(max(squares["own"], 0.0)), math.sqrt(squares["exact"])
    if not all(map(math.isfinite, (off, *squares.values()))):
        return Change(off if math.isfinite(off) else math.inf, math.inf, math.inf, None)
    apart = math.sqrt(squares["apart"])
    cosine = squares["both"] / (own * size) if own and size else None
    return Change(off, (own - size) / size if size else own, apart / size if size else apart, cosine)


class _At(torch.autograd.Function):
    """A tensor that counts as another one: its gradient goes to that one as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, content: Tensor) -> Tensor:
        """The content."""
        ctx.dtype = tensor.dtype
        return content.clone()

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the content."""
        return received[0].to(ctx.dtype), None


class _Tap(torch.autograd.Function):
    """A tensor whose gradient is given something on its way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, added: Tensor) -> Tensor:
        """The tensor."""
        ctx.added = added
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient, with what is added to it."""
        return received[0] + ctx.added, None


def error_of(rounded: Tensor, exact: Tensor) -> Tensor:
    """Return what a result is off by, in float64; two equal infinities, and two NaN, are not off."""
    wide = rounded.detach().double()
    same = (wide == exact) | (wide.isnan() & exact.isnan())
    return torch.where(same, 0.0, wide - exact)


@dataclass(frozen=True, slots=True)
class OwnErrors:
    """What one call has rounded, of just what it was given, in float64.

    forward: value id → its result − that in float64. backward: value id → the gradient that it returned − that in float64.
    """

    forward: Mapping[int, Tensor]
    backward: Mapping[int, Tensor]

    @property
    def some(self) -> bool:
        """Has it rounded anything?"""
        return any(bool((error != 0).any()) for error in (*self.forward.values(), *self.backward.values()))


def own_errors(trace: Trace, index: int) -> OwnErrors:
    """Run one call on the recorded operands, and its backward on the recorded gradients, in the recorded dtype and in float64."""
    call = trace.program.calls[index]
    outs, grads = _both_ways(trace, call, None)
    exact_outs, exact_grads = _both_ways(trace, call, EXACT)
    return OwnErrors(
        {value: error_of(outs[value], tensor) for value, tensor in exact_outs.items()},
        {value: error_of(grads[value], tensor) for value, tensor in exact_grads.items() if value in grads},
    )


def _both_ways(trace: Trace, call: Call, dtype: torch.dtype | None) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return what a call makes, and what its node returns; dtype: compute in this one instead."""
    grads = trace.run.grads
    operands = {
        value: trace.values[value].detach() if dtype is None else _wide(trace.values[value].detach(), dtype) for value in call.inputs()
    }
    if call.grad:
        operands = {v: _wanting(t) if v in grads and t.is_floating_point() else t for v, t in operands.items()}
    device = next((tensor.device for tensor in operands.values()), torch.device("cpu"))
    made = zip(call.outs, perform(call, operands, dtype, device, call.grad), strict=False)
    outs = {out: tensor for out, tensor in made if out is not None and isinstance(tensor, Tensor) and tensor.is_floating_point()}
    ends = [out for out, tensor in outs.items() if tensor.requires_grad and out in grads]
    wanted = {value: tensor for value, tensor in operands.items() if tensor.requires_grad}
    if not ends or not wanted:
        return {out: tensor.detach() for out, tensor in outs.items()}, {}
    received = [grads[out].to(outs[out].dtype) for out in ends]
    returned = torch.autograd.grad([outs[out] for out in ends], list(wanted.values()), received, allow_unused=True)
    back = {value: grad for value, grad in zip(wanted, returned, strict=True) if grad is not None}
    return {out: tensor.detach() for out, tensor in outs.items()}, back


def _wanting(tensor: Tensor) -> Tensor:
    """A tensor of its own that collects a gradient."""
    return tensor.clone().requires_grad_()


@dataclass(frozen=True, slots=True)
class Rounded:
    """Executes a program in float64, and puts in what some of its calls have rounded, forward and backward: place of the call → that."""

    errors: Mapping[int, OwnErrors]

    def __call__(
        self,
        call: Call,
        values: Mapping[int, Tensor],
        dtype: torch.dtype | None,
        device: torch.device,
        grad: bool,
        allowance: Allowance | None = None,
        index: int = 0,
    ) -> list[Any]:
        """Execute one call, as `perform` does."""
        if index not in self.errors:
            return perform(call, values, dtype, device, grad, allowance, index)
        own, back = self.errors[index].forward, self.errors[index].backward
        read = {value: _tapped(values[value], back[value]) if value in back else values[value] for value in call.inputs()}
        results = perform(call, read, dtype, device, grad, allowance, index)
        with torch.set_grad_enabled(grad):
            made = zip(call.outs, results, strict=False)
            return [tensor + own[out] if out is not None and out in own else tensor for out, tensor in made]


@dataclass(frozen=True, slots=True)
class Widened:
    """Executes calls as recorded, and those of `calls` in a wider dtype; what follows is as wide as torch makes it of wide operands."""

    recorded: Mapping[int, Tensor]
    calls: Container[int]
    to: torch.dtype

    def __call__(
        self,
        call: Call,
        values: Mapping[int, Tensor],
        dtype: torch.dtype | None,
        device: torch.device,
        grad: bool,
        allowance: Allowance | None = None,
        index: int = 0,
    ) -> list[Any]:
        """Execute one call, as `perform` does."""
        read = {value: values[value] for value in call.inputs()}
        if index in self.calls:
            return perform(call, {v: _wide(t, self.to) for v, t in read.items()}, self.to, device, grad, allowance, index)
        if all(tensor.dtype is self.recorded[value].dtype for value, tensor in read.items()):
            return perform(call, read, dtype, device, grad, allowance, index)
        try:
            return perform(call, read, dtype, device, grad, allowance, index)
        except ProgramError:  # operands of two dtypes, which not every operator takes
            return perform(call, {v: _wide(t, self.to) for v, t in read.items()}, dtype, device, grad, allowance, index)


@dataclass(frozen=True, slots=True)
class _Replaced:
    becomes: Mapping[int, Become]

    def __call__(
        self,
        call: Call,
        values: Mapping[int, Tensor],
        dtype: torch.dtype | None,
        device: torch.device,
        grad: bool,
        allowance: Allowance | None = None,
        index: int = 0,
    ) -> list[Any]:
        results = perform(call, values, dtype, device, grad, allowance, index)
        with torch.set_grad_enabled(grad):
            made = zip(call.outs, results, strict=False)
            return [self._of(out, tensor) for out, tensor in made]

    def _of(self, out: int | None, tensor: Any) -> Any:
        return _at(tensor, self.becomes[out](tensor.detach())) if out is not None and out in self.becomes else tensor


def replaced(trace: Trace, becomes: Mapping[int, Become]) -> Run:
    """Run a program in float64 with some of its values as others: value id → what is made of it."""
    tensors = trace.tensors
    tensors |= {value: becomes[value](tensors[value].double()) for value in becomes if value in tensors}
    return trace.program.execute(tensors, dtype=EXACT, performer=_Replaced(becomes))


def _tapped(tensor: Tensor, added: Tensor) -> Tensor:
    found: Tensor = _Tap.apply(tensor, added) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return found


def _at(tensor: Tensor, content: Tensor) -> Tensor:
    found: Tensor = _At.apply(tensor, content) if tensor.requires_grad else content  # type: ignore[no-untyped-call]
    return found


def _wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < torch.finfo(dtype).bits else tensor
