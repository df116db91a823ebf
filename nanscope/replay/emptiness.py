"""A mean over nothing, as a sum that is divided by at least 1. What is selected and bad stays bad, which a look at the result would hide.

v[bad].mean()     v[bad].sum() / torch.ones_like(v[bad]).sum().clamp(min=1)
"""

from __future__ import annotations

from dataclasses import replace

from nanscope.program.calls import Ref
from nanscope.program.numbers import smallest
from nanscope.program.ops import MEANS, NLL_LOSSES
from nanscope.replay.patch import Patch, Variant
from nanscope.replay.stable import Writing

SUMMED = 2  # what torch calls `reduction="sum"` by number


def guard_empty(patch: Patch) -> Variant | None:
    """Use 0 for the mean of nothing."""
    if patch.op not in MEANS or patch.op == "nanmean":
        return None
    label = "use 0 where nothing is selected: the sum, divided by how many there are, or by 1"
    calls, fresh = list(patch.program.calls), patch.program.new_id()
    for index in reversed(patch.siblings()):
        writing = Writing(patch, calls[index], fresh)
        added, counted = _of_targets(writing) if writing.call.name in NLL_LOSSES else _of_elements(writing)
        mean = replace(writing.call, op="aten.div.Tensor", args=(added, counted), kwargs=(), outs=writing.call.outs[:1])
        fresh, calls[index : index + 1] = writing.fresh, [*writing.calls, mean]
    return Variant("guard_empty", label, replace(patch.program, calls=tuple(calls)), patch.tensors)


def _of_elements(writing: Writing) -> tuple[Ref, Ref]:
    """Write the sum of all elements, or of those along dimensions, and how many these are."""
    operand, rest = writing.call.args[0], writing.call.args[1:]
    op = "sum.dim_IntList" if rest else "sum.default"
    added = writing.put(op, operand, *rest, kwargs=writing.call.kwargs)
    return added, writing.put("clamp_min.default", writing.put(op, writing.put("ones_like.default", operand), *rest), 1)


def _of_targets(writing: Writing) -> tuple[Ref, Ref]:
    """Write the sum of a loss over the targets that are not ignored, and their number; where classes have weights, the sum of these."""
    call = writing.call
    logits, targets, weights, _, ignored = call.args[:5]
    total = writing.put(call.op.removeprefix("aten."), logits, targets, weights, SUMMED, ignored, out=1)
    counted = total if isinstance(weights, Ref) else writing.put("sum.default", writing.put("ne.Scalar", targets, ignored))
    least = smallest(writing.patch.values[weights.id].dtype) if isinstance(weights, Ref) else 1
    return replace(total, id=total.id - 1), writing.put("clamp_min.default", counted, least)
