"""What an edit is held against: the gradient that the healthy elements should have, in float64, with the offending ones neutralised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanscope.errors import NanscopeError, ProgramError
from nanscope.program.by_rows import AT_ONCE, execute_ends
from nanscope.program.calls import Call, Computes, Leaf, Ref
from nanscope.program.ops import NEEDS_MORE_THAN_ZERO
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.replay.edits import neutralised
from nanscope.replay.patch import Patch, Variant, broadcasts


def results(program: Program, run: Run) -> dict[int, Tensor]:
    """What has to come out healthy: the gradients of a loss; of an update or a changed gradient, the thing itself."""
    if program.computes is not Computes.LOSS:
        return {RESULT: run.values[program.output]}
    return {leaf.id: run.grads[leaf.id] for leaf in program.leaves if leaf.diff and leaf.id in run.grads}


def repaired(patch: Patch) -> Variant | None:
    """Neutralise exactly the offending elements and nothing else: what the healthy gradient is measured against, in float64."""
    if patch.origin.call is None:
        return neutralised(patch, "reference", "offending elements neutralised")
    program, tensors = patch.program, patch.tensors
    touched = False
    for out in [patch.program.calls[index].outs[0] for index in patch.siblings()]:
        if out is None:
            continue
        bad = ~torch.isfinite(patch.values[out])
        if out == patch.origin.value_id and not bool(bad.any()):
            bad[patch.origin.index] = True
        if not bool(bad.any()):
            continue
        for position in (0, 1):
            index = program.producers.get(out)
            arg = program.calls[index].args[position] if index is not None and position < len(program.calls[index].args) else None
            if index is None or not isinstance(arg, Ref) or arg.id not in patch.values:
                continue
            content = patch.values[arg.id]
            if not content.is_floating_point() or not broadcasts(bad.shape, content.shape):
                continue
            mark, fresh = program.new_id(), program.new_id() + 1
            neutral = 1.0 if position == 1 or patch.op in NEEDS_MORE_THAN_ZERO else 0.0
            call = program.calls[index]
            mended = Call("aten.masked_fill.Scalar", (arg, Ref(mark), neutral), (), (fresh,), call.site, call.grad)
            args = tuple(Ref(fresh) if place == position else other for place, other in enumerate(call.args))
            calls = (*program.calls[:index], mended, replace(call, args=args), *program.calls[index + 1 :])
            program = replace(program, leaves=(*program.leaves, Leaf(mark, "offending", "data", False)), calls=calls)
            tensors[mark] = bad.expand(content.shape).clone()
            touched = True
    return Variant("reference", "offending elements neutralised", program, tensors) if touched else None


RESULT = -1  # stands for a program's output, whichever value an edit makes it


@dataclass(frozen=True, slots=True)
class Healthy:
    """The gradient that the healthy elements should have, in float64, and which elements are healthy.

    noise: how far the same repaired program is from it in the recorded dtype; less than that is rounding.
    """

    grads: dict[int, Tensor]
    masks: dict[int, Tensor]
    noise: float = 0.0

    @staticmethod
    def of(patch: Patch) -> Healthy | None:
        try:
            variant = repaired(patch)
            if variant is None:
                return None
            run = execute_ends(variant.program, variant.tensors, torch.float64)
            plain = execute_ends(variant.program, variant.tensors)
        except NanscopeError:
            return None
        grads = results(variant.program, run)
        if any(not bool(torch.isfinite(grad).all()) for grad in grads.values()):
            return None
        touched = _touched(patch)
        if patch.program.computes is not Computes.LOSS:
            touched = {RESULT: ~torch.isfinite(patch.values[patch.program.output])}
        masks = {value: ~touched[value] if value in touched else torch.ones_like(grad, dtype=torch.bool) for value, grad in grads.items()}
        healthy = Healthy(grads, masks)
        noise = healthy.distortion(results(variant.program, plain))
        return replace(healthy, noise=noise if math.isfinite(noise) else 0.0)

    def distortion(self, grads: Mapping[int, Tensor]) -> float:
        scale = worst = 0.0
        for value, wanted in self.grads.items():
            got = grads.get(value)
            for part, mask, own in zip(_parts(wanted), _parts(self.masks[value]), _parts(wanted if got is None else got), strict=True):
                if bool(mask.any()):
                    scale = max(scale, float(part[mask].abs().max()))
                    difference = float((own[mask].double() - part[mask]).abs().max())
                    worst = max(worst, difference if math.isfinite(difference) else math.inf)
        relative = worst / scale if scale > 0 else worst
        return 0.0 if relative <= 2 * self.noise else relative


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor some rows at a time: compared as a whole, a large one would be held in float64 once more."""
    rows = tensor.reshape(tensor.shape or (1,))
    parts: Sequence[Tensor] = torch.split(rows, max(1, AT_ONCE // max(rows[:1].numel(), 1)))
    return parts


def _touched(patch: Patch) -> dict[int, Tensor]:
    """Return, for every leaf, the elements that the offending elements of the origin were computed from."""
    origin, program = patch.origin, patch.program
    bad = ~torch.isfinite(patch.values[origin.value_id])
    if not bool(bad.any()):
        bad[origin.index] = True
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
