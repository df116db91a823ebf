"""Runs a program a few rows at a time, so that a large batch is never held in float64 as a whole.

A loss computes most of its values row by row, and meets the other rows in sums only. Such a program is split: what belongs to one row is
computed for a few rows, summed, and forgotten; backward computes it again. The numbers are those of the whole batch up to rounding, for
sums are added up in another order: good for comparing gradients, not for asking whether a step comes out bit for bit.

    values per row   [B, …]: leaves of at least two dimensions, and what pointwise calls, reductions along a row and the like make of them
    sums             where all rows meet: `sum` or `mean` over the first dimension
    the rest         small, computed once
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.program.calls import Arg, Call
from nanscope.program.cost import Allowance
from nanscope.program.flow import dims_of, element_flow
from nanscope.program.numbers import tensor_bytes
from nanscope.program.ops import CHOICES, EXPANSIONS, INSIDE_ROW, SIZED, SUMS, Flow
from nanscope.program.perform import perform
from nanscope.program.program import Program
from nanscope.program.run import Run, begin_at, begin_at_one
from nanscope.program.shelf import give_back


def execute_ends(program: Program, tensors: dict[int, Tensor], dtype: torch.dtype | None = None) -> Run:
    """Run a program for its output and the gradients of its leaves; a large one by rows, if that is possible."""
    if tensor_bytes(tensors) < LARGE:
        return program.execute(tensors, dtype=dtype, ends=True)
    run = execute_by_rows(program, tensors, dtype) or program.execute(tensors, dtype=dtype, ends=True)
    give_back()
    return run


LARGE = 16 << 20  # bytes of the leaves from which on a program is run by rows
AT_ONCE = 1 << 15  # elements of a leaf that each thread takes in one go: they stay in its cache, and in memory that the process has


_PARTS = {"aten.mean.default": "aten.sum.default", "aten.mean.dim": "aten.sum.dim_IntList"}


class _Mixed(Exception):
    """The rows of this program meet in another way than in sums."""


def execute_by_rows(
    program: Program, leaves: Mapping[int, Tensor], dtype: torch.dtype | None = None, at_once: int | None = None
) -> Run | None:
    """Run a program forward and backward by rows; None if its rows cannot be told apart.

    dtype: compute in this floating dtype instead of the recorded ones. at_once: elements of the largest leaf that are taken at a time.
    Returns the leaves, the output and the gradients of the leaves. Raises ProgramError as `Program.execute` does.
    """
    try:
        plan = _Plan.of(program, leaves)
    except (_Mixed, NanscopeError, RuntimeError):
        return None
    return _Execution(plan, leaves, dtype, at_once or elements_at_once()).run()


def elements_at_once() -> int:
    """How many elements of a tensor are best taken together."""
    return AT_ONCE * max(2, torch.get_num_threads())


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a program is split. rows: B. by_row: ids of the values per row. met: indices of the calls in which the rows meet.
    shapes: of all values, as tensors without content."""

    program: Program
    rows: int
    by_row: frozenset[int]
    met: frozenset[int]
    shapes: Mapping[int, Tensor]

    @staticmethod
    def of(program: Program, leaves: Mapping[int, Tensor]) -> _Plan:
        largest = max((leaves[leaf.id] for leaf in program.leaves if leaf.id in leaves), key=Tensor.numel, default=None)
        if largest is None or largest.dim() < 2 or largest.shape[0] < 2 or any(leaf.id not in leaves for leaf in program.leaves):
            raise _Mixed
        rows = largest.shape[0]
        shapes = {leaf.id: leaves[leaf.id].to("meta") for leaf in program.leaves}
        by_row = {value for value, tensor in shapes.items() if tensor.dim() >= 2 and tensor.shape[0] == rows}
        met: set[int] = set()
        allowance = Allowance.of(shapes.values(), len(program.calls)) if program.foreign else None
        for index, call in enumerate(program.calls):
            results = perform(call, shapes, None, torch.device("meta"), False, allowance, index)
            made = {out: tensor for out, tensor in zip(call.outs, results, strict=False) if out is not None and isinstance(tensor, Tensor)}
            shapes |= made
            if not any(value in by_row for value in call.inputs()):
                continue
            if _meets(call, shapes):
                met.add(index)
            elif all(_stays(call, out, shapes, by_row, rows) for out in made):
                by_row |= set(made)
            else:
                raise _Mixed
        if program.output in by_row:
            raise _Mixed
        return _Plan(program, rows, frozenset(by_row), frozenset(met), shapes)


def _meets(call: Call, shapes: Mapping[int, Tensor]) -> bool:
    """Does a call add up all rows?"""
    if call.name not in SUMS:
        return False
    operand = shapes[next(iter(call.inputs()))]
    dims = dims_of(call, operand)
    return not dims or 0 in dims


def _stays(call: Call, out: int, shapes: Mapping[int, Tensor], by_row: set[int], rows: int) -> bool:
    """Does row b of a result come of row b of the operands, and of nothing else that differs between rows?"""
    result, name, flow = shapes[out], call.name, element_flow(call)
    mine = [shapes[value] for value in call.inputs() if value in by_row]
    others = [shapes[value] for value in call.inputs() if value not in by_row]
    if result.dim() == 0 or result.shape[0] != rows:
        return False
    if flow is Flow.POINTWISE or name in CHOICES:
        return all(tensor.dim() == result.dim() for tensor in mine) and all(tensor.dim() <= result.dim() for tensor in others)
    first = mine[0]
    if flow in (Flow.REDUCE, Flow.ALONG):
        return len(mine) == 1 and not others and 0 not in (dims_of(call, first) or (0,))
    if name.endswith("_like"):
        return len(mine) == 1
    if name in SIZED:
        sizes = call.args[1] if len(call.args) > 1 else None
        whole = len(sizes) == first.dim() if name in EXPANSIONS and isinstance(sizes, tuple) else first.is_contiguous()
        return len(mine) == 1 and isinstance(sizes, tuple) and bool(sizes) and sizes[0] in (rows, -1) and whole
    if name in INSIDE_ROW:
        dim = call.args[1] if len(call.args) > 1 else None
        whole = all(tensor.shape[0] == rows and tensor.dim() == first.dim() for tensor in (*mine, *others))
        return isinstance(dim, int) and dim % (first.dim() + (name == "unsqueeze")) != 0 and (whole if name == "gather" else not others)
    return False


@dataclass(slots=True)
class _Execution:
    plan: _Plan
    leaves: Mapping[int, Tensor]
    dtype: torch.dtype | None
    at_once: int
    grads: dict[int, Tensor] = field(default_factory=dict)

    def run(self) -> Run:
        program, plan = self.plan.program, self.plan
        values: dict[int, Tensor] = {}
        for leaf in program.leaves:
            if leaf.id not in plan.by_row:
                values[leaf.id] = self._leaf(self.leaves[leaf.id], leaf.diff)
        device = next((tensor.device for tensor in self.leaves.values()), torch.device("cpu"))
        with torch.autocast(device.type, enabled=False):
            for index, call in enumerate(program.calls):
                if index in plan.met:
                    values[_only(call)] = self._met(call, values)
                elif not any(out in plan.by_row for out in call.outs):
                    results = perform(call, values, self.dtype, device, call.grad, index=index)
                    values.update((out, result) for out, result in zip(call.outs, results, strict=False) if out is not None)
            output = values[program.output]
            if output.requires_grad:
                begin_at_one(output)
        for leaf in program.leaves:
            grad = values[leaf.id].grad if leaf.id in values and leaf.diff else None
            if grad is not None:
                self.grads[leaf.id] = grad
        return Run({**self.leaves, program.output: output.detach()}, self.grads)

    def grad_of(self, leaf: int, dtype: torch.dtype) -> Tensor:
        """Return the gradient of a leaf, for all rows, that parts are added to."""
        if leaf not in self.grads:
            whole = self.leaves[leaf]
            self.grads[leaf] = torch.zeros(whole.shape, dtype=dtype, device=whole.device)
        return self.grads[leaf]

    def _leaf(self, tensor: Tensor, diff: bool) -> Tensor:
        tensor = tensor.detach()
        if self.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        return tensor.requires_grad_() if diff and tensor.is_floating_point() else tensor

    def _met(self, call: Call, values: dict[int, Tensor]) -> Tensor:
        """The sum of all rows, with a backward pass that computes them again."""
        part = self.plan.program.slice(next(iter(call.inputs())))
        calls = tuple(c for c in part.calls if any(out in self.plan.by_row for out in c.outs))
        read = sorted({value for c in (*calls, call) for value in c.inputs() if value in values})
        leaves = tuple(leaf.id for leaf in part.leaves if leaf.id in self.plan.by_row)
        steps = tuple(_Step.of(c, self.plan) for c in (*calls, replace(call, op=_PARTS.get(call.op, call.op))))
        sums = _Sums(self, call, steps, leaves, tuple(read), call.grad and self._is_last(call))
        hook = torch.zeros((), requires_grad=True)  # so that a sum of rows that only read leaves has a gradient, too
        with torch.set_grad_enabled(call.grad):
            result: Tensor = _Met.apply(sums, hook, *(values[value] for value in read))  # type: ignore[no-untyped-call]
        return result

    def _is_last(self, call: Call) -> bool:
        """Is it one number that the program ends in? `begin_at_one` begins there."""
        out, shapes = _only(call), self.plan.shapes
        return out == self.plan.program.output and shapes[out].numel() == 1 and not shapes[out].is_complex()


def _only(call: Call) -> int:
    return next(out for out in call.outs if out is not None)


@dataclass(frozen=True, slots=True)
class _Step:
    """One call for some of the rows. cut: values that are not by row, but broadcast against some that are, and give their rows. sized: it
    is told how many rows there are."""

    call: Call
    cut: tuple[int, ...]
    sized: bool

    @staticmethod
    def of(call: Call, plan: _Plan) -> _Step:
        dims, whole = plan.shapes[_only(call)].dim(), [value for value in call.inputs() if value not in plan.by_row]
        cut = (value for value in whole if (shape := plan.shapes[value].shape) and shape[0] == plan.rows and len(shape) == dims)
        return _Step(call, tuple(cut), call.name in SIZED and isinstance(call.args[1], tuple) and call.args[1][0] == plan.rows)

    def perform(self, values: dict[int, Tensor], rows: slice, dtype: torch.dtype | None, device: torch.device, grad: bool) -> None:
        """Make it, and add what it makes to the values."""
        call = replace(self.call, args=_resized(self.call, rows.stop - rows.start)) if self.sized else self.call
        given = {**values, **{value: values[value][rows] for value in self.cut}} if self.cut else values
        results = perform(call, given, dtype, device, call.grad and grad)
        values.update((out, result) for out, result in zip(call.outs, results, strict=False) if out is not None)


@dataclass(frozen=True, slots=True)
class _Sums:
    """The calls that lead to one sum over the rows. call: the last of them, in which they meet; steps: all, the last as the sum of a part.
    leaves: those per row that they read; read: other values.

    ending: its gradient will be 1, so that backward need not wait until all rows are summed, and compute them again.
    """

    execution: _Execution
    call: Call
    steps: tuple[_Step, ...]
    leaves: tuple[int, ...]
    read: tuple[int, ...]
    ending: bool

    def chunks(self) -> Iterator[slice]:
        """Yield the rows to take at a time."""
        plan = self.execution.plan
        width = max(tensor.numel() // plan.rows for tensor in (plan.shapes[leaf.id] for leaf in plan.program.leaves))
        step = max(1, self.execution.at_once // max(width, 1))
        for start in range(0, plan.rows, step):
            yield slice(start, min(start + step, plan.rows))

    def of(self, rows: slice, small: tuple[Tensor, ...], *, grad: bool) -> tuple[Tensor, dict[int, Tensor]]:
        """Return what some rows add to the sum, and their leaves."""
        execution, plan = self.execution, self.execution.plan
        diff = {leaf.id for leaf in plan.program.leaves if leaf.diff}
        own = {leaf: execution._leaf(execution.leaves[leaf][rows], leaf in diff and grad) for leaf in self.leaves}
        values = {**dict(zip(self.read, small, strict=True)), **own}
        device = next(iter(own.values())).device
        for step in self.steps:
            step.perform(values, rows, execution.dtype, device, grad)
        return values[_only(self.call)], own

    def back(self, rows: slice, small: tuple[Tensor, ...], received: Tensor | None, found: list[Tensor | None]) -> Tensor:
        """Compute what some rows add to the sum, and add their gradients to those of the leaves, and to those of the other values.

        received: the gradient of the sum, None if that is 1. found: the gradients of `small`. Returns what the rows add.
        """
        with torch.enable_grad():
            fresh = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in small)
            part, own = self.of(rows, fresh, grad=True)
            if part.requires_grad:
                begin_at(part, (torch.ones_like(part) if received is None else received.to(part.dtype)) * _share(self))
        for leaf, tensor in own.items():
            if tensor.grad is not None:
                self.execution.grad_of(leaf, tensor.dtype)[rows] += tensor.grad
        for position, tensor in enumerate(fresh):
            if tensor.grad is not None:
                before = found[position]
                found[position] = tensor.grad if before is None else before + tensor.grad
        return part.detach()


def _resized(call: Call, count: int) -> tuple[Arg, ...]:
    sizes = call.args[1]
    return (call.args[0], (count, *sizes[1:]), *call.args[2:]) if isinstance(sizes, tuple) else call.args


class _Met(torch.autograd.Function):
    """The sum over all rows of what `_Sums` computes for some."""

    @staticmethod
    def forward(ctx: Any, sums: _Sums, hook: Tensor, *small: Tensor) -> Tensor:
        ctx.sums, ctx.found = sums, [None] * len(small)
        ctx.save_for_backward(*small)
        total: Tensor | None = None
        for rows in sums.chunks():
            part = sums.back(rows, small, None, ctx.found) if sums.ending else sums.of(rows, small, grad=False)[0]
            total = part.double() if total is None else total + part.double()
        assert total is not None
        whole: Tensor = (total * _share(sums)).to(part.dtype)
        return whole

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[Tensor | None, ...]:
        sums: _Sums = ctx.sums
        for rows in () if sums.ending else sums.chunks():
            sums.back(rows, ctx.saved_tensors, received[0], ctx.found)
        return (None, None, *ctx.found)


def _share(sums: _Sums) -> float:
    """What the sum is multiplied by: 1, or of a mean one over the number of its elements."""
    call, shapes = sums.call, sums.execution.plan.shapes
    if call.name != "mean":
        return 1.0
    operand = shapes[next(iter(call.inputs()))]
    return shapes[_only(call)].numel() / max(operand.numel(), 1)
