"""Behind an overflow: the element of a tensor that is far out of that tensor's own range.

    ratio = torch.exp(log_probs - old_log_probs)      exp(197.3) = +inf
    old_log_probs[3, 8] = −200, where its median is −2.8 (5 % to 95 %: −6.1 … −0.4)

Two things make it the one to blame: it stands far outside of the others (Tukey's fences, three times the range of their middle half away
from that half, in size or in order of magnitude), and with their median in its place the origin is a number like any other. What came in
is asked first, then what the code has made of that without a gradient, in its order. A row that is far out as a whole comes before its
elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.locate.origin import Element, Location
from nanscope.locate.trace import Trace
from nanscope.program.calls import Leaf
from nanscope.program.numbers import at, is_binary, quantiles
from nanscope.program.ops import LOGARITHMS, PICKS, base_name, carries
from nanscope.program.program import Program
from nanscope.roles import Role, last_word, picked_word
from nanscope.snapshot.observation import Blame
from nanscope.text import unravel

FENCE = 3.0  # ranges of the middle half: what is further out is far out
FEWEST = 4  # others that say what is usual
MOST = 1 << 22  # elements of all that is read on the way to the origin, which is run again and again
NAMED = 16  # tensors that the code made without a gradient
FEW_ROWS = 8  # of so few one may be a large part of them all
ROWS = 64  # rows that are held against the rest
JUMP = 1e3  # away from what it was, or from the end of its dtype, an origin is a number like any other

_Groups: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def blame_of(location: Location, trace: Trace) -> Blame | None:
    """Return the element, or the row, that an overflow goes back to; None where nothing is out of range."""
    origin = location.origin
    of_numbers = all(math.isfinite(operand.value) for operand in origin.operands)
    if not (origin.born and of_numbers and abs(origin.value) > JUMP) or origin.op in LOGARITHMS:
        return None
    for groups in (_rows, _elements):
        for ways in _ways(origin, trace):
            found = [(way, group) for way in ways if (group := way.one(groups)) is not None and way.is_out(group)]
            if found:
                way, group = max(found, key=lambda pair: pair[0].distance(pair[1]))
                return way.told(group, row=groups is _rows)
    return None


@dataclass(frozen=True, slots=True)
class _Way:
    """From one tensor to the origin. program: what makes the origin of it and the rest. numbers: the tensor, in float64. counted: which of
    its elements say what is usual."""

    trace: Trace
    origin: Element
    program: Program
    value: int
    numbers: Tensor
    counted: Tensor

    def one(self, groups: _Groups) -> Tensor | None:
        """Of what is far out, in groups of positions, return the one that heals the origin alone when it becomes what is usual beside them
        all: they are halved until it is alone."""
        far = groups(self.numbers, self.counted)
        usual = self._beside(far)
        if not len(far) or not usual.numel():
            return None
        halves = [far]
        while True:
            far = next((half for half in halves if self._heals(half, float(usual.median()))), far[:0])
            if len(far) < 2:
                return far[0] if len(far) else None
            halves = [far[: len(far) // 2], far[len(far) // 2 :]]

    def _beside(self, group: Tensor) -> Tensor:
        others = self.counted.flatten().clone()
        others[group.flatten()] = False
        return self.numbers.flatten()[others]

    def _heals(self, group: Tensor, number: float) -> bool:
        """Is the origin a number like any other if these elements are this one?"""
        values, spot = self.trace.values, self.origin.value_id
        changed = values[self.value].detach().clone(memory_format=torch.contiguous_format)
        changed.view(-1)[group.flatten()] = number
        tensors = {leaf.id: values[leaf.id] for leaf in self.program.leaves}
        try:
            run = self.program.execute({**tensors, self.value: changed}, backward=False, ends=True)
        except ProgramError:
            return False
        if run.values[spot].shape != values[spot].shape:
            return False  # what is picked by its content is another selection now
        end = min(abs(self.origin.value), torch.finfo(values[spot].dtype).max)
        return abs(at(run.values[spot], self.origin.flat)) <= end / JUMP

    def _usual(self, group: Tensor) -> tuple[float, float, float]:
        """The median of the other elements, and how far 90 % of them reach."""
        low, median, high = quantiles(self._beside(group), 0.05, 0.5, 0.95)
        return median, low, high

    def _size(self, group: Tensor) -> float:
        own = self.numbers.flatten()[group]
        return float(own[torch.isfinite(own)].median())

    def is_out(self, group: Tensor) -> bool:
        """Is the number that will be told of a group none of those that 90 % of the others are among?"""
        _, low, high = self._usual(group)
        return not low <= self._size(group) <= high

    def distance(self, group: Tensor) -> float:
        """Return how far out a group is, in ranges of the others."""
        median, low, high = self._usual(group)
        return abs(self._size(group) - median) / max(high - low, abs(median) * 1e-6, 1e-300)

    def told(self, group: Tensor, *, row: bool) -> Blame:
        """Return what is said of a group."""
        median, low, high = self._usual(group)
        leaf, called = self.trace.program.leaf(self.value), self._as_called()
        index = unravel(int(group[0]), tuple(self.numbers.shape if row else self.trace.values[called].shape))
        name, made = self.trace.names.name(called), self.trace.program.maker(called)
        by = base_name(leaf.made_by) if leaf is not None else "" if made is None else made.name  # a write has its own element for a name
        weight = leaf is not None and leaf.origin == "parameter"
        role = Role.WEIGHTS if weight else self.trace.names.role(self.value)
        return Blame(
            name=name if name is None or weight else picked_word(name) if by in PICKS else last_word(name),
            role=str(role) if role else None,
            index=index[:-1] if row else index,
            value=self._size(group),
            median=median,
            low=low,
            high=high,
            row=row,
        )

    def _as_called(self) -> int:
        """Return the value, or, where it has no name, what it is handed on to that has one, with all of its elements in their order."""
        value = self.value
        while self.trace.names.name(value) is None:
            readers = self.trace.program.readers(value)
            out = readers[0].outs[0] if len(readers) == 1 and readers[0].outs else None
            alike = out is not None and torch.equal(self.trace.values[out].double().flatten(), self.numbers.flatten())
            if out is None or not alike or not carries(readers[0].op):
                return self.value
            value = out
        return value


def _ways(origin: Element, trace: Trace) -> Iterator[list[_Way]]:
    """Yield the ways to an origin: from all that came in, then from one named tensor after another that was made without a gradient."""
    program = trace.program.slice(origin.value_id)
    if sum(trace.values[leaf.id].numel() for leaf in program.leaves) > MOST:
        return

    masks = [tensor for value in trace.values if trace.names.named(value) is Role.MASK and (tensor := trace.values[value]).dim()]

    def way(leaf: Leaf, program: Program) -> _Way:
        tensor = trace.values[leaf.id].detach()
        counted = _counted(tensor, () if leaf.origin == "parameter" else masks)
        return _Way(trace, origin, program, leaf.id, tensor.double(), counted)

    yield [way(leaf, program) for leaf in program.leaves if _is_data(trace, leaf.id)]
    named = [value for value in program.without_gradient() if trace.names.name(value) is not None and _is_data(trace, value)]
    for value in [value for value in named if not _is_only_moved(trace, program, value, named)][:NAMED]:
        calls = tuple(call for call in program.calls if value not in call.outs)
        leaf = Leaf(value, trace.names.name(value), "data", diff=False)
        yield [way(leaf, replace(program, leaves=(*program.leaves, leaf), calls=calls).slice())]


def _is_only_moved(trace: Trace, program: Program, value: int, named: Sequence[int]) -> bool:
    """Is a value nothing but what another one is made of, element for element, on the way of a write for instance?"""
    readers = program.readers(value)
    out = readers[0].outs[0] if len(readers) == 1 and carries(readers[0].op) else None
    return out is not None and out in named and trace.values[out].numel() == trace.values[value].numel()


def _is_data(trace: Trace, value: int) -> bool:
    """Is a value a tensor of numbers, and no mask?"""
    tensor = trace.values[value]
    if not tensor.is_floating_point() or tensor.numel() <= FEWEST or trace.names.named(value) is Role.MASK:
        return False
    return not is_binary(tensor)


def _counted(tensor: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Which elements of a tensor say what is usual there: the finite ones, of these those that the loss counts where a mask is known."""
    fine = torch.isfinite(tensor)
    for mask in masks:
        if _bare(mask) == _bare(tensor):
            mask = mask.reshape(tensor.shape)
        elif tensor.shape[: mask.dim()] == mask.shape:
            mask = mask[(...,) + (None,) * (tensor.dim() - mask.dim())]
        else:
            continue
        counted = fine & mask.bool()
        if int(counted.sum()) > FEWEST:
            return counted
    return fine


def _bare(tensor: Tensor) -> list[int]:
    return [length for length in tensor.shape if length != 1]


def _elements(numbers: Tensor, counted: Tensor) -> Tensor:
    """The positions of the elements that are far out, each in a group of its own."""
    return _far(numbers.flatten(), numbers[counted]).nonzero()


def _rows(numbers: Tensor, counted: Tensor) -> Tensor:
    """The positions of the rows whose median is far out of the range of all other rows, in a group for each."""
    rows = numbers.numel() // max(numbers.shape[-1], 1)
    if numbers.dim() < 2 or numbers.shape[-1] < FEWEST or not 1 < rows <= ROWS:
        return torch.zeros(0, 1, dtype=torch.long)
    flat, valid = numbers.reshape(rows, -1), counted.reshape(rows, -1)
    medians = torch.stack([flat[row][valid[row]].median() if bool(valid[row].any()) else flat.new_tensor(math.nan) for row in range(rows)])
    # Of many rows one hardly moves the range of all: only those that are out of that are held against the rest without them.
    asked = _far(medians, flat[valid]) if rows > FEW_ROWS else torch.isfinite(medians)

    def is_far(row: int) -> bool:
        others = torch.cat([flat[:row][valid[:row]], flat[row + 1 :][valid[row + 1 :]]])
        return bool(_far(medians[row], others))

    far = [bool(asked[row]) and is_far(row) for row in range(rows)]
    return torch.arange(numbers.numel()).reshape(rows, -1)[torch.tensor(far)]


def _far(numbers: Tensor, usual: Tensor) -> Tensor:
    """Which numbers are far out of the usual ones, in size or in order of magnitude?"""
    if usual.numel() < FEWEST:
        return torch.zeros_like(numbers, dtype=torch.bool)
    sizes = usual[usual != 0].abs().log10()
    far = _outside(numbers, usual)
    if sizes.numel() >= FEWEST:
        far |= (numbers != 0) & _outside(numbers.abs().log10(), sizes)
    return far & torch.isfinite(numbers)


def _outside(numbers: Tensor, usual: Tensor) -> Tensor:
    low, high = quantiles(usual, 0.25, 0.75)
    room = FENCE * (high - low)
    return torch.lt(numbers, low - room) | torch.gt(numbers, high + room)
