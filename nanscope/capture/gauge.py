"""The gauge, one reading a step: how close the exponents of a loss came to overflow, from tensors that the tape holds anyway.

A trend towards zero headroom is the warning before the incident: exp overflows above 88.72 nats in float32, 11.09 in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from nanscope.locate.names import Names
from nanscope.program.calls import Ref
from nanscope.program.numbers import exponent_limit
from nanscope.program.ops import NATURAL_EXPONENTIALS
from nanscope.program.program import Program


@dataclass(frozen=True, slots=True)
class Dials:
    """Where to read the gauge in programs of one structure.

    exponents: calls whose argument 0 is raised to e. masks: (call, argument) of mask tensors. clips: (call, low, high) of clipped ratios.
    """

    exponents: tuple[int, ...]
    masks: tuple[tuple[int, int], ...]
    clips: tuple[tuple[int, float, float], ...]

    @staticmethod
    def of(program: Program) -> Dials:
        """Find them; once for each structure, since names have to be looked up."""
        namer = Names(program)
        exponents, masks, clips = [], [], []
        for index, call in enumerate(program.calls):
            name = call.name
            if name in NATURAL_EXPONENTIALS:
                exponents.append(index)
            for position, arg in enumerate(call.args):
                if isinstance(arg, Ref) and namer.says_mask(arg.id):
                    masks.append((index, position))
            if name == "clamp" and len(call.args) == 3 and isinstance(call.args[0], Ref):
                low, high = call.args[1], call.args[2]
                if isinstance(low, (int, float)) and isinstance(high, (int, float)) and 0 < low < 1 < high:
                    clips.append((index, float(low), float(high)))
        return Dials(tuple(exponents), tuple(masks), tuple(clips))


@dataclass(frozen=True, slots=True)
class Reading:
    """The extremes of one step, in nats; clipped is a fraction of the counted tokens. None: not seen."""

    highest: float | None = None
    highest_masked: float | None = None
    headroom: float | None = None
    clipped: float | None = None

    def joined(self, other: Reading) -> Reading:
        """Return the extremes over two micro-batches."""

        def worst(a: float | None, b: float | None, low: bool = False) -> float | None:
            both = [x for x in (a, b) if x is not None]
            return (min(both) if low else max(both)) if both else None

        return Reading(
            worst(self.highest, other.highest),
            worst(self.highest_masked, other.highest_masked),
            worst(self.headroom, other.headroom, low=True),
            worst(self.clipped, other.clipped),
        )


KEPT_DIALS = 64  # structures of programs that are remembered: a loss over sequences of any length has one for each


class Gauge:
    """Reads programs, and remembers where to look in those of the structures seen last."""

    def __init__(self) -> None:
        self._dials: dict[tuple[tuple[str, int], ...], Dials] = {}

    def read(self, program: Program, held: Callable[[int], Tensor | None]) -> Reading:
        """Return the extremes of a step. held: what is known of a value, by its id."""
        key = tuple((call.op, call.site) for call in program.calls)
        dials = self._dials.pop(key, None) or Dials.of(program)
        self._dials[key] = dials
        if len(self._dials) > KEPT_DIALS:
            del self._dials[next(iter(self._dials))]
        wanted = {*((index, 0) for index in (*dials.exponents, *(clip[0] for clip in dials.clips))), *dials.masks}
        args = [program.calls[index].args[position] for index, position in wanted]
        values = {arg.id: tensor for arg in args if isinstance(arg, Ref) and (tensor := held(arg.id)) is not None}
        return read_gauge(dials, program, values)


def read_gauge(dials: Dials, program: Program, values: Mapping[int, Tensor]) -> Reading:
    """Read the extremes off the tensors of a step; what is not held is not seen. Transfers a few numbers, on a CPU only."""
    highest = masked_highest = headroom = clipped = None
    read = [program.calls[index].args[position] for index, position in dials.masks]
    masks = [values[arg.id] for arg in read if isinstance(arg, Ref) and arg.id in values]
    for index in dials.exponents:
        arg = program.calls[index].args[0]
        operand = values.get(arg.id) if isinstance(arg, Ref) else None
        if operand is None or operand.device.type != "cpu" or not operand.is_floating_point() or not operand.numel():
            continue
        operand = operand.detach()
        counted = _counted(masks, operand)
        if counted is None:
            inside, outside = float(operand.amax()), None
        else:
            low = operand.new_full((), -float("inf"))
            inside = float(operand.where(counted, low).amax())
            outside = float(operand.where(~counted, low).amax()) if not bool(counted.all()) else None
        highest = inside if highest is None else max(highest, inside)
        if outside is not None:
            masked_highest = outside if masked_highest is None else max(masked_highest, outside)
        left = exponent_limit(operand.dtype) - max(inside, -float("inf") if outside is None else outside)
        headroom = left if headroom is None else min(headroom, left)
    for index, low_bound, high_bound in dials.clips:
        arg = program.calls[index].args[0]
        ratio = values.get(arg.id) if isinstance(arg, Ref) else None
        if ratio is None or ratio.device.type != "cpu" or not ratio.numel():
            continue
        out = (ratio.detach() < low_bound) | (ratio.detach() > high_bound)
        counted = _counted(masks, ratio)
        tokens = int(counted.sum()) if counted is not None else ratio.numel()
        if tokens:
            clipped = float((out & counted if counted is not None else out).sum()) / tokens
        break
    return Reading(highest, masked_highest, headroom, clipped)


def _counted(masks: list[Tensor], like: Tensor) -> Tensor | None:
    """The tokens that every mask of that shape lets through, None if there is no such mask."""
    counted: Tensor | None = None
    for mask in masks:
        if mask.shape == like.shape:
            counted = mask.bool() if counted is None else counted & mask.bool()
    return counted
