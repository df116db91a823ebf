"""What an edit is held against: the gradient that the healthy elements should have, in float64, with the offending ones neutralised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from nanscope.errors import NanscopeError, ProgramError
from nanscope.program.by_rows import elements_at_once, execute_ends
from nanscope.program.calls import Call, Computes, Leaf, Ref
from nanscope.program.numbers import is_finite, largest_in
from nanscope.program.ops import ADDITIONS, INSIDE, NEEDS_MORE_THAN_ZERO
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.replay.further import ROUNDS, following
from nanscope.replay.patch import Patch, Variant
from nanscope.replay.refill import Fed, leaf_refilled, numbers, offending, refilled
from nanscope.replay.usual import usual


def results(program: Program, run: Run) -> dict[int, Tensor]:
    """What has to come out healthy: the gradients of a loss; of an update or a changed gradient, the thing itself."""
    if program.computes is not Computes.LOSS:
        return {RESULT: run.values[program.output]}
    return {leaf.id: run.grads[leaf.id] for leaf in program.leaves if leaf.diff and leaf.id in run.grads}


def repaired(patch: Patch, shift: float = 0.0, *, alike: bool = False) -> Variant | None:
    """Neutralise exactly the offending elements and nothing else: what the healthy gradient is measured against, in float64.

    shift: added to what they become, to see what depends on it. alike: see `offending`.
    """
    name, label = "reference", "offending elements neutralised"
    if patch.origin.call is None:
        content, leaf = patch.values[patch.origin.value_id], patch.origin.leaf
        if not content.is_floating_point() or (leaf is not None and leaf.is_of_model):
            return None
        return leaf_refilled(patch, numbers(content, 0.0, shift), name, label)

    def filling(fed: Fed) -> tuple[Tensor, Tensor] | None:
        ordinary = 1.0 if patch.op in NEEDS_MORE_THAN_ZERO or (fed.position == 1 and patch.op not in ADDITIONS) else 0.0
        rest = usual(patch, fed.position) if fed.content.is_floating_point() else None
        neutral = INSIDE.get(patch.op, ordinary) if rest is None else float(rest.median())
        where = fed.where
        return None if where is None else (where, numbers(fed.content, neutral, shift * (fed.position + 1)))

    return refilled(patch, filling, name, label, alike=alike)


RESULT = -1  # stands for a program's output, whichever value an edit makes it


SAME = 1e-6  # of a gradient: what differs by less does not depend on the offending elements

FAITHFUL = 0.01  # so near to what the formula gives in float64, an edit changes no element


@dataclass(frozen=True)  # without slots: what is derived is kept
class Healthy:
    """The gradient that the healthy elements should have, in float64, and which elements are healthy.

    An element is healthy if the offending ones are not computed from it, and if its gradient does not depend on what they are: with the
    recorded numbers in float64, where these are finite, it is the same as without the offending elements, else with other numbers in
    their place. So neither the rest of a bad token's row nor a weight that gets a part of its gradient from it counts as healthy.

    masks: where they are. noise: how far the same repaired program is from it in the recorded dtype; less than that is rounding.
    alone: some element is healthy so. If none is, grads are those of the recorded program in float64, and only an edit that gives the
    same has a measure. loss, sizes: the loss, and the largest gradient of each leaf, of the step without its offending elements.
    """

    grads: dict[int, Tensor]
    masks: dict[int, Tensor]
    noise: float = 0.0
    alone: bool = True
    loss: float = 0.0
    sizes: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def of(patch: Patch, run: Run | None) -> Healthy | None:
        """run: of the recorded program in float64, None if it cannot be run so."""
        exact = None if run is None else results(patch.program, run)
        if exact is not None and not all(bool(is_finite(grad)) for grad in exact.values()):
            exact = None
        touched = _touched(patch)
        spared = _Spared.of(patch)
        if spared is None:
            return None if exact is None else Healthy.as_computed(exact, _outside(touched, exact))
        other = exact if exact is not None else spared.shifted(patch)
        masks = _outside(touched, spared.grads)
        for value, grad in spared.grads.items():
            for part, mask in zip(_parts(grad), _parts(masks[value]), strict=True):
                mask &= torch.isfinite(part)
            scale = _largest(grad, masks[value])
            if other is not None:
                for part, mask, own in zip(_parts(grad), _parts(masks[value]), _parts(other[value]), strict=True):
                    mask &= torch.isclose(own, part, rtol=SAME, atol=SAME * SAME * scale)
        del other
        sizes = {value: largest_in(grad) for value, grad in spared.grads.items() if grad.numel()}
        if not any(bool(mask.any()) for mask in masks.values()):
            if exact is None:
                return None
            return replace(Healthy.as_computed(exact, _outside(touched, exact)), loss=spared.loss, sizes=sizes)
        healthy = Healthy(spared.grads, masks, loss=spared.loss, sizes=sizes)
        plain = _gradients(spared.variant, None)
        noise = None if plain is None else healthy.distortion(plain)
        return replace(healthy, noise=noise if noise is not None and math.isfinite(noise) else 0.0)

    @staticmethod
    def as_computed(exact: dict[int, Tensor], outside: dict[int, Tensor]) -> Healthy:
        """What only an edit meets that gives what the recorded program gives in float64; everywhere, if it is all offending."""
        some = any(bool(mask.any()) for mask in outside.values())
        masks = outside if some else {value: torch.ones_like(mask) for value, mask in outside.items()}
        return Healthy(exact, masks, alone=False)

    def steeper(self, grads: Mapping[int, Tensor]) -> float:
        """Return how many times larger than without the offending elements the gradient of a leaf is, at most."""
        found = [float(grads[leaf].abs().max()) / size for leaf, size in self.sizes.items() if size > 0 and leaf in grads]
        return max(found, default=0.0)

    def distortion(self, grads: Mapping[int, Tensor]) -> float | None:
        """Return the largest change of a healthy element's gradient, relative to the largest of them; None if there is no measure."""
        worst, scale = 0.0, self._scale
        for value, wanted in self.grads.items():
            got = grads.get(value)
            for part, mask, own in zip(_parts(wanted), _parts(self.masks[value]), _parts(wanted if got is None else got), strict=True):
                difference = float(torch.where(mask, (own.double() - part).abs_(), 0.0).max()) if part.numel() else 0.0
                worst = max(worst, difference if math.isfinite(difference) else math.inf)
        relative = worst / scale if scale > 0 else worst
        if not self._measures or (not self.alone and relative > FAITHFUL):
            return None
        return 0.0 if relative <= 2 * self.noise else relative

    @cached_property
    def _measures(self) -> bool:
        return any(bool(mask.any()) for mask in self.masks.values())

    @cached_property
    def _scale(self) -> float:
        """The largest gradient of a healthy element."""
        return max((_largest(grad, self.masks[value]) for value, grad in self.grads.items()), default=0.0)


def _gradients(variant: Variant, dtype: torch.dtype | None) -> dict[int, Tensor] | None:
    """What comes out of a program that must stay healthy, None if it cannot be run."""
    run = _run(variant, dtype)
    return None if run is None else results(variant.program, run)


def _run(variant: Variant, dtype: torch.dtype | None) -> Run | None:
    try:
        return execute_ends(variant.program, variant.tensors, dtype)
    except NanscopeError:
        return None


@dataclass(frozen=True, slots=True)
class _Spared:
    """The program without the offending elements, and its gradients in float64.

    alike: of what `repaired` left them out. places: where it did; a step with two faults has two. bad: elements that are, all the same.
    """

    variant: Variant
    loss: float
    grads: dict[int, Tensor]
    alike: bool
    places: int
    bad: int

    @staticmethod
    def of(patch: Patch) -> _Spared | None:
        """Of the two ways to leave them out, the one that heals more."""
        best = None
        for alike in (True, False):
            found = _Spared._of(patch, alike)
            best = found if best is None or (found is not None and found.bad < best.bad) else best
            if best is not None and not best.bad:
                break
        return best

    @staticmethod
    def _of(patch: Patch, alike: bool) -> _Spared | None:
        found = None
        for variant in _repairs(patch, 0.0, alike):
            run = _run(variant, torch.float64)
            if run is None:
                break
            grads, loss = results(variant.program, run), float(run.values[variant.program.output].detach().double().sum())
            bad = sum(int((~torch.isfinite(part)).sum()) for grad in grads.values() for part in _parts(grad))
            found = _Spared(variant, loss, grads, alike, 1 if found is None else found.places + 1, bad)
            if not bad:
                break
        return found

    def shifted(self, patch: Patch) -> dict[int, Tensor] | None:
        """The gradients with other numbers in the place of the offending elements."""
        variants = list(islice(_repairs(patch, SHIFT, self.alike), self.places))
        return _gradients(variants[-1], torch.float64) if len(variants) == self.places else None


def _repairs(patch: Patch, shift: float, alike: bool) -> Iterator[Variant]:
    """Yield the program with its offending elements neutralised, then also with those of the next origin, and so on."""
    known: set[int] = set()
    there: Patch | None = patch
    while there is not None and len(known) <= ROUNDS:
        known.add(there.origin.value_id)
        variant = repaired(there, shift, alike=alike)
        if variant is None:
            return
        yield variant
        there = following(variant, known)


SHIFT = 0.5  # any number that is not 0


def _outside(touched: Mapping[int, Tensor], grads: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the elements of every gradient that the offending ones are not computed from."""
    return {value: ~touched[value] if value in touched else torch.ones_like(grad, dtype=torch.bool) for value, grad in grads.items()}


def _largest(tensor: Tensor, mask: Tensor) -> float:
    """The largest magnitude where a mask is true, 0 if it is nowhere."""
    parts = (torch.where(one, part.abs(), 0.0).max() for part, one in zip(_parts(tensor), _parts(mask), strict=True) if part.numel())
    return max(map(float, parts), default=0.0)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor some rows at a time: compared as a whole, a large one would be held in float64 once more."""
    rows = tensor.reshape(tensor.shape or (1,))
    parts: Sequence[Tensor] = torch.split(rows, max(1, elements_at_once() // max(rows[:1].numel(), 1)))
    return parts


def _touched(patch: Patch) -> dict[int, Tensor]:
    """Return, for every leaf, the elements that the offending elements of the origin were computed from."""
    origin, program = patch.origin, patch.program
    if program.computes is not Computes.LOSS:
        return {RESULT: ~torch.isfinite(patch.values[program.output])}
    bad = offending(patch, origin.value_id)
    if origin.call is None:
        return {origin.value_id: bad}
    # The gradient of the operands' sum over the offending elements is non-zero exactly where they come from.
    found: dict[int, Tensor] = {}
    for value in dict.fromkeys(program.calls[origin.call].inputs()):
        content = patch.values[value]
        if not content.is_floating_point() or content.shape != bad.shape:
            continue
        mark, product, total = (program.new_id() + n for n in range(3))
        part = program.slice(value)
        probe = replace(
            part,
            leaves=(*part.leaves, Leaf(mark, "offending", "data", False)),
            calls=(
                *part.calls,
                Call("aten.mul.Tensor", (Ref(value), Ref(mark)), (), (product,)),
                Call("aten.sum.default", (Ref(product),), (), (total,)),
            ),
            output=total,
        )
        tensors = {leaf.id: patch.tensors[leaf.id] for leaf in part.leaves}
        try:
            run = execute_ends(probe, {**tensors, mark: bad}, torch.float64)
        except ProgramError:
            continue
        for leaf in part.leaves:
            if leaf.id in run.grads:
                mask = run.grads[leaf.id] != 0
                found[leaf.id] = found[leaf.id] | mask if leaf.id in found else mask
    return found
