"""What is said in a script: in a docstring, beside the line that goes wrong, and as the asserts, all in words and numbers of ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from nanscope.causes import Cause
from nanscope.locate.origin import Element
from nanscope.program.calls import Computes
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.reproduce.alike import Failed, Reason
from nanscope.text import listed, show_index
from nanscope.verdict.sentence import reason

SHOWN = 3  # operands of a calculation that is told


def first_line(why: Reason) -> str:
    """Return what goes wrong, as a sentence."""
    title = "it is not known why" if why.cause is Cause.UNKNOWN else reason(why.seen, why.cause)
    return f"{title[:1].upper()}{title[1:]}."


def beside(failed: Failed) -> str:
    """Return what is said beside the line that makes, or brings, the first harmful value."""
    origin = failed.origin
    place = f" at {show_index(origin.index)}" if math.prod(origin.shape) > 1 else ""
    outside = ", which the loss leaves out" if origin.masked else ""
    if failed.failure.largest is not None:
        return f"{said(origin.value)}{place}: finite, and the gradient is huge"
    if math.isfinite(origin.value):
        return f"{said(origin.value)} here{place}, and the gradient is not finite"
    if not origin.born:
        return f"{said(origin.value)} comes in here{place}{outside}"
    return f"{said(origin.value)} here{place}{outside}"


def second_line(failed: Failed, name: str, output: str, gradients: list[str]) -> str:
    """Return where it goes wrong, and how far that got. name: of the value that goes wrong first, as the script calls it."""
    origin = failed.origin
    place = show_index(origin.index) if math.prod(origin.shape) > 1 else ""
    made = f"{name}{place} = {_calculation(origin)}" if origin.born else f"{name}{place} comes in as {said(origin.value)}"
    outside = ", which the loss leaves out" if origin.masked else ""
    return f"{made}{outside}: {_harm(failed, output, gradients)}."


def _calculation(origin: Element) -> str:
    numbers = [said(operand.value) for operand in origin.operands]
    if not 0 < len(numbers) <= SHOWN:
        return said(origin.value)
    if origin.op in _SIGNS and len(numbers) == 2:
        return f"{numbers[0]} {_SIGNS[origin.op]} {numbers[1]} = {said(origin.value)}"
    return f"{origin.op.strip('_')}({', '.join(numbers)}) = {said(origin.value)}"


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def _harm(failed: Failed, output: str, gradients: list[str]) -> str:
    trace, program = failed.trace, failed.trace.program
    value = trace.values[program.output]
    if program.computes is not Computes.LOSS:
        return f"{output} is not finite"
    of = listed(gradients)
    told = f"the gradient of {of} is" if len(gradients) == 1 else f"the gradients of {of} are"
    if failed.failure.largest is not None:
        return f"everything is finite, and {told} up to {failed.failure.largest:.2g}"
    if failed.failure.loss:
        return f"the loss is finite, and {told} not"
    return f"the loss is {kind(value)}" + (f", and {told} not finite" if gradients else "")


def kind(tensor: Tensor) -> str:
    """Return what a tensor that is not finite is."""
    return "NaN" if bool(torch.isnan(tensor.detach().float()).any()) else "inf"


def said(value: float) -> str:
    """Return a number for a script, in ASCII."""
    return "NaN" if math.isnan(value) else f"{value or 0.0:.6g}"


def bad_gradients(program: Program, run: Run) -> list[int]:
    """Return the leaves whose gradient is not finite."""
    return [leaf.id for leaf in program.leaves if leaf.id in run.grads and not bool(torch.isfinite(run.grads[leaf.id]).all())]


def asserts(failed: Failed, output: str, names: Mapping[int, str]) -> Iterator[str]:
    """Yield what holds while the fault is there. names: of the leaves."""
    trace, program = failed.trace, failed.trace.program
    value = trace.values[program.output]
    if program.computes is not Computes.LOSS:
        yield f"assert not torch.isfinite({output}).all()"
        return
    if failed.failure.largest is not None:
        largest = max(trace.run.grads, key=lambda leaf: float(trace.run.grads[leaf].abs().max()) if leaf in names else -1.0)
        yield f"assert {names[largest]}.grad.abs().max() > 1e{math.floor(math.log10(max(failed.failure.largest, 1e-30)))}"
        return
    if not failed.failure.loss:
        yield f"assert torch.is{kind(value).lower()}({output})"
    else:
        yield f"assert torch.isfinite({output})  # nothing is seen of it here"
    yield from _each([names[leaf] for leaf in bad_gradients(program, trace.run)], "assert not torch.isfinite({}.grad).all()")


def healthy(program: Program, run: Run, output: str, names: Mapping[int, str]) -> Iterator[str]:
    """Yield what holds where the fault is mended."""
    yield f"assert torch.isfinite({output})" if program.computes is Computes.LOSS else f"assert torch.isfinite({output}).all()"
    yield from _each([names[leaf.id] for leaf in program.leaves if leaf.id in run.grads], "assert torch.isfinite({}.grad).all()")


def _each(names: Sequence[str], line: str) -> Iterator[str]:
    """The same line for each name; of many, in a loop."""
    if len(names) <= 2:
        yield from (line.format(name) for name in names)
        return
    yield f"for leaf in ({', '.join(names)}):"
    yield f"    {line.format('leaf')}"
