"""What the same numbers give in float64: an overflow that a later call made finite again, and wrong; a loss that is nothing but rounding.

    variance = x.pow(2).mean(-1)        inf in half precision
    x * torch.rsqrt(variance)           rsqrt(inf) is 0, and so is the whole row: the loss is finite, and knows nothing of this token

Most overflows are absorbed rightly: tanh and a clamp make of an infinity what they make of the number that it stands for. So nothing is
said of an overflow before its twin was run: the calls that read it once more in float64, where it is none. What comes out of the model,
or of the last line before the loss is one number, has to be another one by far, at an element that the loss depends on. Where the code says
what becomes of an infinity, that is what it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanscope.locate.describe import crossing_at, element_at
from nanscope.locate.facts import facts_of
from nanscope.locate.forward import ALIKE, bad_sources, is_intended
from nanscope.locate.origin import Location
from nanscope.locate.spike import spike
from nanscope.locate.trace import Spot, Trace
from nanscope.program.calls import Call, Computes, Leaf
from nanscope.program.flow import spread
from nanscope.program.numbers import at, first_nonfinite
from nanscope.program.ops import CHECKS, COMPARISONS, SELECTORS, Flow, flow_of
from nanscope.program.program import Program
from nanscope.snapshot.observation import Phase
from nanscope.text import number, show_index, unravel

FEW = 8  # overflows of one step that are looked at
WRONG = 0.1  # of the root mean square of a tensor: what half precision rounds is far less
NOISE = 8.0  # times what float64 changes where no overflow had a hand in it
ANOTHER = 0.5  # of a loss: by so much float64 gives another one, where it is made of rounding


@dataclass(frozen=True, slots=True)
class Twin:
    """What is wrong although it is finite. words: what became of it, and what float64 gives."""

    location: Location
    words: str


def absorbed(trace: Trace) -> Twin | None:
    """Return the first overflow out of which finite and wrong numbers were made that the loss depends on, None if there is none.

    trace: of a loss that is finite, with the gradients inside.
    """
    if trace.program.computes is not Computes.LOSS:
        return None
    born = list(_overflows(trace))
    twin = _in_float64(trace, [index for index, _, _ in born]) if born else {}
    infinite = {value: torch.isinf(trace.values[value]).cpu() for _, value, _ in born}
    beside = _reached(trace, infinite) if twin else {}
    for _, value, flats in born[:FEW] if twin else ():
        harmed = _harmed(trace, twin, _reached(trace, {value: infinite[value]}), beside)
        if harmed is not None:
            flat = next((flat for flat in flats[:FEW] if _meets(_reached_by(trace, value, flat), harmed)), flats[0])
            return _told(trace, twin, (value, flat), harmed)
    return None


def residue(trace: Trace) -> Twin | None:
    """Return the quotient that made a loss huge by what rounding had left in its denominator, None if there is none.

    trace: of a loss that is finite, with the gradients inside.
    """
    location = spike(trace)
    if location is None or location.phase is not Phase.FORWARD or not facts_of(location, trace).cancelled:
        return None
    loss = float(trace.values[trace.program.output].double().sum())
    exact = float(trace.program.execute(trace.tensors, dtype=torch.float64, backward=False, ends=True).values[trace.program.output].sum())
    apart = abs(loss - exact)
    if not apart > max(1.0, ANOTHER * abs(loss)):
        return None
    return Twin(location, f"made of rounding: the same numbers in float64 give {number(exact)}")


def _overflows(trace: Trace) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the calls that made infinities of finite numbers: index, value, and where in it these are."""
    for index, call in enumerate(trace.program.calls):
        if flow_of(call.op) in (Flow.MOVE, Flow.CREATE) or call.name in SELECTORS or _has_infinity(call):
            continue
        for out in call.outs:
            if out is None or first_nonfinite(trace.values[out]) is None or is_intended(trace, call):
                continue
            infinite = torch.isinf(trace.values[out].flatten()).nonzero().flatten()[:ALIKE].tolist()
            flats = [flat for flat in infinite if not bad_sources(trace, call, out, flat)]
            if flats:
                yield index, out, flats


def _has_infinity(call: Call) -> bool:
    return any(isinstance(arg, float) and not math.isfinite(arg) for arg in (*call.args, *(arg for _, arg in call.kwargs)))


def _answers(call: Call) -> bool:
    """Does the code ask there whether a number is finite, or say what becomes of one that is infinite? Then it knows of the overflow, and
    means what it makes of it."""
    if call.name == "nan_to_num":
        stated = dict(zip(("nan", "posinf", "neginf"), call.args[1:], strict=False)) | dict(call.kwargs)
        return stated.get("posinf") is not None
    return call.name in CHECKS or (call.name in COMPARISONS and _has_infinity(call))


def _in_float64(trace: Trace, first: Iterable[int]) -> Mapping[int, Tensor]:
    """Run calls once more, and all that read what they make, in float64; what they read themselves is as it was. Nothing if the loss does
    not come of them."""
    program, begun = trace.program, set(first)
    made: set[int] = set()
    calls: list[Call] = []
    for index, call in enumerate(program.calls):
        if index in begun or not (made.isdisjoint(call.inputs()) or _answers(call)):
            calls.append(call)
            made.update(out for out in call.outs if out is not None)
    if program.output not in made:
        return {}
    read = sorted({value for call in calls for value in call.inputs()} - made)
    leaves = tuple(Leaf(value, None, "data", False) for value in read)
    part = replace(program, leaves=leaves, calls=tuple(calls))
    return part.execute({value: trace.values[value] for value in read}, dtype=torch.float64, backward=False).values


def _reached_by(trace: Trace, value: int, flat: int) -> dict[int, Tensor]:
    """Return which elements depend on one, value by value."""
    mark = torch.zeros(trace.values[value].numel(), dtype=torch.bool)
    mark[flat] = True
    return _reached(trace, {value: mark.reshape(trace.values[value].shape)})


def _reached(trace: Trace, marks: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return which elements depend on some that are marked, value by value."""
    marked = dict(marks)
    for call in trace.program.calls:
        if any(read in marked for read in call.inputs()) and not any(out in marked for out in call.outs) and not _answers(call):
            marked.update(spread(call, trace.values, marked))
    return marked


def _harmed(trace: Trace, twin: Mapping[int, Tensor], marked: Mapping[int, Tensor], beside: Mapping[int, Tensor]) -> Spot | None:
    """Return the first element that is far from its twin where it may not be, None if none is. beside: marks what any overflow reaches."""
    for value in _ends(trace.program, marked, trace.values):
        wrong = _wrong(trace, twin, value, marked[value], beside[value])
        if bool(wrong.any()):
            return value, int((wrong.flatten() > 0).int().argmax())
    return None


def _ends(program: Program, marked: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> list[int]:
    """What comes out of the model; where nothing does, what is the last before a single number is made of it."""
    several = [value for value in marked if values[value].numel() > 1 and values[value].is_floating_point()]
    inside = [value for value in several if (call := program.maker(value)) is not None and call.module]
    out = [value for value in inside if any(not reader.module for reader in program.readers(value))]
    last = [value for value in several if all(values[o].numel() == 1 for r in program.readers(value) for o in r.outs if o is not None)]
    return out or last


def _wrong(trace: Trace, twin: Mapping[int, Tensor], value: int, mark: Tensor, reached: Tensor) -> Tensor:
    """Return by how much elements are wrong that the loss depends on, 0 where they are not."""
    here, exact, gradient = trace.values[value].double(), twin[value], trace.run.grads.get(value)
    mark, reached = mark.to(here.device), reached.to(here.device)
    fine = torch.isfinite(here) & torch.isfinite(exact)
    apart = torch.where(fine, (here - exact).abs(), 0.0)
    if gradient is None or not bool(fine.any()):
        return torch.zeros_like(apart)
    beside = apart[fine & ~reached]
    noise = float(beside.max()) if beside.numel() else 0.0
    least = max(WRONG * float(exact[fine].square().mean().sqrt()), NOISE * noise)
    return torch.where(mark & (apart > least) & (gradient != 0), apart, 0.0)


def _meets(marked: Mapping[int, Tensor], spot: Spot) -> bool:
    value, flat = spot
    return value in marked and bool(marked[value].flatten()[flat])


def _told(trace: Trace, twin: Mapping[int, Tensor], origin: Spot, harmed: Spot) -> Twin:
    """Describe an overflow, where it became finite, and what that came to."""
    marked = _reached_by(trace, *origin)
    path, words = [origin], []
    taken = _absorber(trace, twin, marked, origin[0])
    if taken is not None:
        call, spot = taken
        path.append(spot)
        words.append(f"{call.name} makes {number(at(trace.values[spot[0]], spot[1]))} of it")
    if (row := _row_of_one(trace, marked)) is not None:
        words.append(row)
    if harmed not in path:
        path.append(harmed)
    value, flat = harmed
    here, exact = at(trace.values[value], flat), at(twin[value], flat)
    index = show_index(unravel(flat, trace.values[value].shape))
    words.append(f"{trace.names.name(value) or 'what comes of it'} is {number(here)} at {index} where float64 gives {number(exact)}")
    chain = tuple(crossing_at(trace, *spot) for spot in path)
    return Twin(Location(Phase.FORWARD, element_at(trace, *origin), chain), ", ".join(words))


def _absorber(trace: Trace, twin: Mapping[int, Tensor], marked: Mapping[int, Tensor], value: int) -> tuple[Call, Spot] | None:
    """Return the first call that made finite and wrong numbers of infinite ones, and one of these."""
    infinite = {value}
    for call in trace.program.calls:
        if infinite.isdisjoint(call.inputs()):
            continue
        for out in (out for out in call.outs if out is not None and out in marked and out != value):
            own = trace.values[out].flatten()
            bad = marked[out].flatten().to(own.device)
            if bool(torch.isinf(own[bad]).any()):
                infinite.add(out)
            elif out in twin and bool((wrong := bad & (own.double() != twin[out].flatten())).any()):
                return call, (out, int(wrong.int().argmax()))
    return None


def _row_of_one(trace: Trace, marked: Mapping[int, Tensor]) -> str | None:
    """Say that a whole row became the same number where others did not, None if none did."""
    for value, mark in marked.items():
        tensor = trace.values[value]
        if tensor.dim() < 2 or tensor.shape[-1] < 2 or not tensor.is_floating_point() or not bool(torch.isfinite(tensor[mark]).all()):
            continue
        rows = tensor.detach().flatten(0, -2)
        flat = (rows == rows[:, :1]).all(1)
        bad = flat & mark.flatten(0, -2).all(1).to(flat.device)
        if bool(bad.any()) and not bool(flat[~bad].any()) and not bool(flat.all()):
            index = show_index(unravel(int(bad.int().argmax()), tensor.shape[:-1]))
            return f"the whole row {index} of {trace.names.name(value) or 'the result'} is {number(float(rows[bad][0, 0]))}"
    return None
