"""Edits that leave out what came in bad, by a 0 in its place: of the elements themselves, or of what was made of them.

rewards.nan_to_num(0)        the sample, if nothing else is made of its reward
advantages.nan_to_num(0)     its group, of which mean and deviation were bad with it
"""

from __future__ import annotations

from collections.abc import Iterator

from nanscope.locate.describe import element_at
from nanscope.locate.origin import Location
from nanscope.program.calls import Ref
from nanscope.program.numbers import is_finite
from nanscope.program.ops import ADDITIONS, DIFFERENCES
from nanscope.replay.patch import Insert, Patch, Variant, after, before
from nanscope.roles import LOG_PROBS
from nanscope.text import ravel

FEW = 8  # lines, the last ones, at which it is tried


def drop_invalid_sample(patch: Patch) -> Variant | None:
    """Take the bad element out before the op."""
    if patch.origin.call is None:
        return neutralised(patch, "drop_invalid_sample", "drop the entries that are not finite")
    if patch.op not in ADDITIONS:
        return None
    of_tokens = any(operand.role in LOG_PROBS for operand in patch.origin.operands)
    what = "drop the tokens whose log-probability is −inf" if of_tokens else "0 for what is infinite"
    for position in (0, 1):
        if patch.operand(position) is None:
            continue
        finite: list[Insert] = [
            ("aten.abs.default", (Ref(-1),)),
            ("aten.ne.Scalar", (Ref(-2), float("inf"))),
            ("aten.where.ScalarOther", (Ref(-2), Ref(-1), 0.0)),
        ]
        patch = patch.edited(before(patch, position, finite))
    label = f"{what}, before the {'difference' if patch.op in DIFFERENCES else 'sum'}"
    return Variant("drop_invalid_sample", label, patch.program, patch.tensors)


def reject_input(patch: Patch) -> Variant | None:
    """Leave the bad entry of the batch out."""
    return neutralised(patch, "reject_input", "reject the entries that are not finite") if patch.origin.call is None else None


def neutralised(patch: Patch, name: str, label: str) -> Variant | None:
    """Put 0 in the place of the bad elements of what came in, or of what was made of it without a gradient."""
    value, leaf = patch.origin.value_id, patch.origin.leaf
    content = patch.values[value]
    if not content.is_floating_point() or bool(is_finite(content)) or (leaf is not None and leaf.is_of_model):
        return None  # a weight is not mended by looking away
    inserts: list[Insert] = [("aten.nan_to_num.default", (Ref(-1), 0.0, 0.0, 0.0))]
    return Variant(name, f"{label} ({patch.called(value)})", after(patch, inserts), patch.tensors, fills=value)


def further_on(patch: Patch, location: Location) -> Iterator[tuple[Patch, Variant]]:
    """Yield, for what came in bad, the drop of what was made of it, each time later: of a group whose statistics it has spoilt. A loop
    comes by the same line many times, and the last is what is made of it."""
    still = set(patch.program.without_gradient()) - {patch.origin.value_id}
    forth = [crossed for crossed in location.chain if crossed.value_id in still and not crossed.backward]
    lines = {(crossed.file, crossed.line): crossed for crossed in (forth if patch.origin.call is None else ())}
    for crossed in sorted(lines.values(), key=forth.index)[-FEW:]:
        value = crossed.value_id
        there = Patch(patch.trace, element_at(patch.trace, value, ravel(crossed.index, patch.values[value].shape)))
        variant = neutralised(there, "drop_invalid_sample", "leave out what the bad entries have spoilt")
        if variant is not None:
            yield there, variant
