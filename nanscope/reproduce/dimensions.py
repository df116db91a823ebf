"""Which dimensions of a program's values are the same one: its rows, its tokens, its vocabulary.

Told by how the calls put elements together, and by sizes only where nothing better is known; a wrong answer makes a candidate that does
not run, or does not fail alike, and is thrown away.

    labels[value] = ((rows,), (tokens,))           of a [B, T] tensor
    labels[value] = ((rows, tokens),)              of the same, flattened
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from nanscope.program.calls import Call
from nanscope.program.flow import dims_of, element_flow
from nanscope.program.ops import (
    ADDED_MATMULS,
    CHOICES,
    EXPANSIONS,
    PLAIN_MATMULS,
    RESHAPINGS,
    ROW_NORMS,
    SIZED,
    SQUEEZES,
    TRANSPOSITIONS,
    Flow,
)
from nanscope.program.program import Program

Label: TypeAlias = tuple[int, ...]  # the dimensions that one of a tensor is the product of; () for a size of 1
Labels: TypeAlias = tuple[Label, ...]


class Dimensions:
    """The dimensions of all values, as labels that are the same where the dimension is."""

    def __init__(self, program: Program, values: Mapping[int, Tensor]) -> None:
        self._same: list[int] = []
        self._size: list[int] = []
        self._parts: dict[int, Label] = {}  # what a dimension is the product of: a weight's, of the heads that it reads at once
        self._labels: dict[int, Labels] = {}
        self._shapes = {value: tuple(tensor.shape) for value, tensor in values.items()}
        for leaf in program.leaves:
            self._labels[leaf.id] = self._fresh(self._shapes[leaf.id])
        for call in program.calls:
            self._follow(call)

    def of(self, value: int) -> Labels:
        """Return the labels of a value's dimensions."""
        return tuple(self._expanded(label) for label in self._labels.get(value, ()))

    def _expanded(self, label: Label) -> Label:
        """A label in dimensions that are no products of others."""
        return tuple(part for atom in label for part in self._expanded(self._parts.get(self._root(atom), ())) or (self._root(atom),))

    def size(self, atom: int) -> int:
        """Return how long a dimension is."""
        return self._size[self._root(atom)]

    def _fresh(self, shape: Sequence[int]) -> Labels:
        made: list[Label] = []
        for size in shape:
            if size == 1:
                made.append(())
                continue
            made.append((len(self._same),))
            self._same.append(len(self._same))
            self._size.append(size)
        return tuple(made)

    def _root(self, atom: int) -> int:
        while self._same[atom] != atom:
            atom = self._same[atom]
        return atom

    def _join(self, one: Label, other: Label) -> None:
        one, other = self._expanded(one), self._expanded(other)
        for single, several in ((one, other), (other, one)):
            if len(single) == 1 and len(several) > 1 and single[0] not in several:
                if math.prod(self.size(atom) for atom in several) == self.size(single[0]):
                    self._parts[single[0]] = several
                return
        if len(one) == len(other):
            for a, b in zip(one, other, strict=True):
                a, b = self._root(a), self._root(b)
                if a != b and self._size[a] == self._size[b]:
                    self._same[max(a, b)] = min(a, b)

    def _follow(self, call: Call) -> None:
        read = [value for value in call.inputs() if value in self._shapes]
        for out in call.outs:
            if out is None or out not in self._shapes:
                continue
            labels = self._made(call, read, out) if read else None
            shape = self._shapes[out]
            self._labels[out] = labels if labels is not None and len(labels) == len(shape) else self._fresh(shape)

    def _made(self, call: Call, read: list[int], out: int) -> Labels | None:
        shape, first = self._shapes[out], self._labels[read[0]]
        name, flow = call.name, element_flow(call)
        numbers = [arg for arg in call.args[1:] if isinstance(arg, int)]
        if flow is Flow.POINTWISE or name in CHOICES or name in EXPANSIONS:
            return self._broadcast(read, shape)
        if name in SIZED or name in RESHAPINGS:
            return self._reshaped(read[0], shape)
        if name in TRANSPOSITIONS and len(numbers) >= 2:
            order = list(range(len(first)))
            a, b = (number % len(order) for number in numbers[:2])
            order[a], order[b] = order[b], order[a]
            return tuple(first[place] for place in order)
        if name == "t":
            return first[::-1]
        if name == "permute" and isinstance(call.args[1], tuple):
            return tuple(first[int(place) % len(first)] for place in call.args[1] if isinstance(place, int))
        if name in SQUEEZES:
            return self._reshaped(read[0], shape)
        if name == "select" and numbers:
            return tuple(label for place, label in enumerate(first) if place != numbers[0] % len(first))
        if name in PLAIN_MATMULS and len(read) == 2 and all(len(self._labels[value]) >= 2 for value in read):
            left, right = (self._labels[value] for value in read)
            self._join(left[-1], right[-2])
            return (*left[:-1], right[-1]) if len(left) == len(shape) else None
        if name in ADDED_MATMULS and len(read) == 3:
            start, left, right = (self._labels[value] for value in read)
            self._join(left[-1], right[-2])
            made = (*left[:-1], right[-1])
            for back in range(1, len(start) + 1):
                if self._shapes[read[0]][-back] == shape[-back]:
                    self._join(start[-back], made[-back])
            return made
        if name in ROW_NORMS:
            for value in read[1:]:
                for back, label in enumerate(reversed(self._labels[value]), 1):
                    if back <= len(first):
                        self._join(label, first[-back])
            return first if len(shape) == len(first) and shape == self._shapes[read[0]] else self._positional(read[:1], shape)
        if name == "gather":
            dim, index = numbers[0] % max(len(first), 1), self._labels[read[1]]
            for place, (one, other) in enumerate(zip(first, index, strict=True)):
                if place != dim:
                    self._join(one, other)
            return index
        if flow is Flow.REDUCE or (flow is Flow.ALONG and len(shape) != len(first)):
            return self._reduced(call, read[0], shape)
        return self._positional(read, shape)

    def _broadcast(self, read: Sequence[int], shape: tuple[int, ...]) -> Labels:
        found: list[Label] = []
        for back in range(len(shape), 0, -1):
            label: Label | None = None
            for value in read:
                own = self._labels[value]
                if back <= len(own) and self._shapes[value][-back] == shape[-back] and own[-back]:
                    if label is None:
                        label = own[-back]
                    else:
                        self._join(label, own[-back])
            found.append(label if label is not None else self._fresh(shape[-back : len(shape) - back + 1])[0])
        return tuple(found)

    def _reduced(self, call: Call, value: int, shape: tuple[int, ...]) -> Labels | None:
        own, old = self._labels[value], self._shapes[value]
        gone = dims_of(call, _Shaped(old)) or tuple(range(len(own)))  # type: ignore[arg-type]
        if len(shape) == len(own):
            return tuple(() if place in gone else label for place, label in enumerate(own))
        return tuple(label for place, label in enumerate(own) if place not in gone)

    def _positional(self, read: Sequence[int], shape: tuple[int, ...]) -> Labels:
        """Dimensions of equal size at the same place are taken for one, and for all operands."""
        found: list[Label] = []
        for place, size in enumerate(shape):
            label: Label | None = None
            for value in read:
                own, old = self._labels[value], self._shapes[value]
                if len(own) == len(shape) and old[place] == size and own[place]:
                    if label is None:
                        label = own[place]
                    else:
                        self._join(label, own[place])
            found.append(label if label is not None else self._fresh((size,))[0])
        for value in read[1:]:  # indices beside a table, targets beside logits
            own, old = self._labels[value], self._shapes[value]
            for place, label in enumerate(own):
                if label and place < len(self._labels[read[0]]) and self._shapes[read[0]][place] == old[place]:
                    self._join(self._labels[read[0]][place], label)
        return tuple(found)

    def _reshaped(self, value: int, shape: tuple[int, ...]) -> Labels:
        """Match runs of dimensions whose products are the same."""
        old, own = self._shapes[value], self._labels[value]
        if 0 in old or 0 in shape:
            return self._fresh(shape)
        found: list[Label] = []
        a = b = 0
        while b < len(shape):
            if shape[b] == 1:
                found.append(())
                b += 1
                continue
            start, before = b, a
            left, right = 1, shape[b]
            b += 1
            while left != right:
                if left < right and a < len(old):
                    left *= old[a]
                    a += 1
                elif b < len(shape):
                    right *= shape[b]
                    b += 1
                else:
                    return (*found, *self._fresh(shape[len(found) :]))
            atoms = tuple(atom for label in own[before:a] for atom in label)
            found.extend(self._split(atoms, shape[start:b]))
        return tuple(found)

    def _split(self, atoms: Label, shape: Sequence[int]) -> Labels:
        if len(shape) == 1:
            return (atoms,)
        found: list[Label] = []
        left = list(atoms)
        for size in shape:
            taken: list[int] = []
            while left and math.prod(self.size(atom) for atom in taken) < size:
                taken.append(left.pop(0))
            if math.prod(self.size(atom) for atom in taken) != size:
                return self._fresh(shape)
            found.append(tuple(taken))
        return tuple(found)


class _Shaped:
    """As much of a tensor as `dims_of` asks for."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def dim(self) -> int:
        return len(self._shape)
