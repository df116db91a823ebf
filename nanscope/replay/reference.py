"""What an edit is held against: the gradient that the healthy elements should have, in float64, with the offending ones neutralised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.program.by_rows import elements_at_once, execute_ends
from nanscope.program.calls import Computes, Ref
from nanscope.program.numbers import is_finite, largest_in
from nanscope.program.ops import ADDITIONS, DIVISIONS, INSIDE, LOGARITHMS, NEEDS_MORE_THAN_ZERO
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.replay.further import ROUNDS, following
from nanscope.replay.patch import Patch, Variant
from nanscope.replay.refill import OPERANDS, RESULT, Fed, Filling, Numbers, leaf_refilled, numbers, refilled
from nanscope.replay.touched import OUTPUT, joined, touched
from nanscope.replay.usual import usual


def results(program: Program, run: Run) -> dict[int, Tensor]:
    """What has to come out healthy: the gradients of a loss; of an update or a changed gradient, the thing itself."""
    if program.computes is not Computes.LOSS:
        return {OUTPUT: run.values[program.output]}
    return {leaf.id: run.grads[leaf.id] for leaf in program.leaves if leaf.diff and leaf.id in run.grads}


def repaired(patch: Patch, shift: float = 0.0, *, alike: bool = False) -> Variant | None:
    """Neutralise exactly the offending elements and nothing else: what the healthy gradient is measured against, in float64.

    shift: about what the result is there instead, to see what depends on it. alike: see `offending`.
    """
    name, label = "reference", "offending elements neutralised"
    if patch.origin.call is None:
        content, leaf = patch.values[patch.origin.value_id], patch.origin.leaf
        if not content.is_floating_point() or (leaf is not None and leaf.is_of_model):
            return None
        return leaf_refilled(patch, numbers(content, 0.0, shift), name, label)

    # whatever the result would be: of what makes a row sum to 1, other operands need not show all that depends on it
    positions = (*OPERANDS, RESULT) if shift else OPERANDS
    return refilled(patch, _neutral(patch, shift), name, label, alike=alike, positions=positions)


def _neutral(patch: Patch, shift: float = 0.0) -> Filling:
    """What the operands of a call become, ordinary numbers; and the result, if that is asked for, those about a shift."""

    def filling(fed: Fed) -> Numbers | None:
        if fed.position == RESULT:
            return fed.bad, numbers(fed.content, 0.0, shift)
        ordinary = 1.0 if patch.op in NEEDS_MORE_THAN_ZERO or (fed.position == 1 and patch.op not in ADDITIONS) else 0.0
        rest = usual(patch, fed.position) if fed.content.is_floating_point() else None
        neutral = INSIDE.get(patch.op, ordinary) if rest is None else float(rest.median())
        where = fed.where
        return None if where is None else (where, numbers(fed.content, neutral))

    return filling


SAME = 1e-6  # of a gradient: what differs by less does not depend on the offending elements

FAITHFUL = 0.01  # so near to what the formula gives in float64, an edit changes no element


@dataclass(frozen=True)  # without slots: what is derived is kept
class Healthy:
    """The gradient that the healthy elements should have, in float64, and which elements are healthy.

    An element is healthy if the offending ones are not computed from it, and if its gradient does not depend on what they are: with the
    recorded numbers in float64, where these are finite, it is the same as without the offending elements, else with other numbers in
    their place. So neither the rest of a bad token's row nor a weight that gets a part of its gradient from it counts as healthy.

    masks: where they are. noise: how far the same repaired program is from it in the recorded dtype; less than that is rounding.
    alone: some element is healthy so, and has a gradient. If none is, grads are those of the recorded program in float64, or of what does
    not depend on what the offending elements are, and only an edit that gives the same has a measure. loss, sizes: the loss, and the
    largest gradient of each leaf, of the step without its offending elements.
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
        spared = _Spared.of(patch)
        faults, alike = ([patch], True) if spared is None else (spared.faults, spared.alike)
        came = joined(touched(one, _neutral(one), alike) for one in faults)
        if spared is None:
            return None if exact is None else Healthy.as_computed(exact, _outside(came, exact))
        same = {value: torch.isfinite(grad) for value, grad in spared.grads.items()}
        _keep_the_same(same, spared.grads, exact if exact is not None else spared.shifted(patch, SHIFT))
        if exact is None and _outweighs(patch):
            _keep_the_same(same, spared.grads, spared.shifted(patch, LARGE), finite=True)
        sizes = {value: largest_in(grad) for value, grad in spared.grads.items() if grad.numel()}
        outside = _outside(came, same)
        masks = {value: mask & outside[value] for value, mask in same.items()}
        alone = _tell(spared.grads, masks)
        if not alone and exact is not None:
            return replace(Healthy.as_computed(exact, _outside(came, exact)), loss=spared.loss, sizes=sizes)
        if not alone and not _tell(spared.grads, same):
            return None
        healthy = Healthy(spared.grads, masks if alone else same, alone=alone, loss=spared.loss, sizes=sizes)
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

    def beyond(self, largest: float | None) -> float:
        """Return how many times larger than without the offending elements the largest gradient of all is."""
        size = max(self.sizes.values(), default=0.0)
        return largest / size if largest is not None and size > 0 else 0.0

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

    alike: of what `repaired` left them out. faults: where it did; a step may have two. bad: elements that are, all the same.
    """

    variant: Variant
    loss: float
    grads: dict[int, Tensor]
    alike: bool
    faults: Sequence[Patch]
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
        found, faults = None, list[Patch]()
        for there, variant in _repairs(patch, 0.0, alike):
            faults.append(there)
            run = _run(variant, torch.float64)
            if run is None:
                break
            grads, loss = results(variant.program, run), float(run.values[variant.program.output].detach().double().sum())
            bad = sum(int((~torch.isfinite(part)).sum()) for grad in grads.values() for part in _parts(grad))
            found = _Spared(variant, loss, grads, alike, tuple(faults), bad)
            if not bad:
                break
        return found

    def shifted(self, patch: Patch, shift: float) -> dict[int, Tensor] | None:
        """The gradients with other numbers in the place of the offending elements."""
        variants = [variant for _, variant in islice(_repairs(patch, shift, self.alike), len(self.faults))]
        return _gradients(variants[-1], torch.float64) if len(variants) == len(self.faults) else None


def _repairs(patch: Patch, shift: float, alike: bool) -> Iterator[tuple[Patch, Variant]]:
    """Yield an origin, and the program with its offending elements neutralised, then also with those of the next one, and so on."""
    known: set[int] = set()
    there: Patch | None = patch
    while there is not None and len(known) <= ROUNDS:
        known.add(there.origin.value_id)
        variant = repaired(there, shift, alike=alike)
        if variant is None:
            return
        yield there, variant
        there = following(variant, known)


SHIFT = 0.5  # any number that is not 0
LARGE = 1e30  # one beside which the others of its row come to nothing


def _keep_the_same(
    same: Mapping[int, Tensor], grads: Mapping[int, Tensor], other: Mapping[int, Tensor] | None, finite: bool = False
) -> None:
    """Take out of some masks where gradients are others. finite: only where they are that."""
    for value, wanted in (other or {}).items():
        scale = _largest(grads[value], same[value])
        for part, mask, own in zip(_parts(grads[value]), _parts(same[value]), _parts(wanted), strict=True):
            alike = torch.isclose(own, part, rtol=SAME, atol=SAME * SAME * scale)
            mask &= alike | ~torch.isfinite(own) if finite else alike


def _outweighs(patch: Patch) -> bool:
    """May what the origin makes leave nothing of the others of its row: is a logarithm taken of what comes of it, or something divided by
    that?"""
    reached = {patch.origin.value_id}
    for call in patch.program.calls[(patch.origin.call or 0) + 1 :]:
        if reached.isdisjoint(call.inputs()):
            continue
        position = 0 if call.name in LOGARITHMS else DIVISIONS.get(call.name)
        argument = None if position is None or position >= len(call.args) else call.args[position]
        if isinstance(argument, Ref) and argument.id in reached:
            return True
        reached.update(out for out in call.outs if out is not None)
    return False


def _tell(grads: Mapping[int, Tensor], masks: Mapping[int, Tensor]) -> bool:
    """Is there a gradient among the marked elements?"""
    return any(_largest(grad, masks[value]) > 0 for value, grad in grads.items())


def _outside(came: Mapping[int, Tensor], grads: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the elements of every gradient that the offending ones are not computed from."""
    return {value: ~came[value] if value in came else torch.ones_like(grad, dtype=torch.bool) for value, grad in grads.items()}


def _largest(tensor: Tensor, mask: Tensor) -> float:
    """The largest magnitude where a mask is true, 0 if it is nowhere."""
    parts = (torch.where(one, part.abs(), 0.0).max() for part, one in zip(_parts(tensor), _parts(mask), strict=True) if part.numel())
    return max(map(float, parts), default=0.0)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor some rows at a time: compared as a whole, a large one would be held in float64 once more."""
    rows = tensor.reshape(tensor.shape or (1,))
    parts: Sequence[Tensor] = torch.split(rows, max(1, elements_at_once() // max(rows[:1].numel(), 1)))
    return parts
