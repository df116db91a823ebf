"""Which elements of a batch the offending ones were computed from: what their gradient should be depends on how the fault is mended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.program.by_rows import execute_ends
from nanscope.program.calls import Call, Computes, Leaf, Ref
from nanscope.program.flow import dims_of
from nanscope.program.ops import ALL_SOFTMAXES, SHARES, Flow, flow_of
from nanscope.program.program import Program
from nanscope.program.summary import broadcasts
from nanscope.replay.patch import Patch
from nanscope.replay.refill import Filling, going_into, harmful, offending

OUTPUT = -1  # stands for what a program ends in, whichever value an edit makes it


def touched(patch: Patch, neutral: Filling, alike: bool) -> dict[int, Tensor]:
    """Return, for every leaf, the elements that the offending elements of the origin, and of its siblings, were computed from."""
    origin, program = patch.origin, patch.program
    if program.computes is not Computes.LOSS:
        return {OUTPUT: ~torch.isfinite(patch.values[program.output])}
    if origin.call is None:
        return {origin.value_id: offending(patch, origin.value_id)}
    # The gradient of the operands' sum over the offending elements is non-zero exactly where they come from.
    calls, leaves, total = list(program.calls[: max(patch.siblings()) + 1]), list(program.leaves), list[int]()
    marks: dict[int, Tensor] = {}
    fresh = program.new_id()
    for out, bad in harmful(patch, neutral, alike).items():
        call = program.calls[program.producers[out]]
        for value in dict.fromkeys(call.inputs()):
            content = patch.values[value]
            where = going_into(bad, call, content) if content.is_floating_point() else None
            if where is None:
                continue
            mark, product, own, both = range(fresh, fresh + 4)
            fresh, marks[mark] = both + 1, where
            leaves.append(Leaf(mark, "offending", "data", False))
            calls.append(Call("aten.mul.Tensor", (Ref(value), Ref(mark)), (), (product,)))
            calls.append(Call("aten.sum.default", (Ref(product),), (), (own,)))
            calls += [Call("aten.add.Tensor", (Ref(total[-1]), Ref(own)), (), (both,))] if total else []
            total.append(both if total else own)
    if not total:
        return {}
    probe = _sums_of(replace(program, leaves=tuple(leaves), calls=tuple(calls)).slice(total[-1]), patch.values)
    try:
        run = execute_ends(probe, {leaf.id: {**patch.tensors, **marks}[leaf.id] for leaf in probe.leaves}, torch.float64)
    except ProgramError:
        return {}
    return {leaf.id: run.grads[leaf.id] != 0 for leaf in probe.leaves if leaf.id in run.grads}


def _sums_of(program: Program, values: Mapping[int, Tensor]) -> Program:
    """Return a program in which what is computed element by element, or of the shares of a row, is a sum: a product with 0, a function that
    is flat there, or a share that underflows comes of its operands all the same."""
    calls: list[Call] = []
    fresh = program.new_id()
    for call in program.calls:
        read, out = [value for value in dict.fromkeys(call.inputs()) if value in values], call.outs[0]
        if out is not None and call.name in SHARES and isinstance(source := call.args[0], Ref) and source.id in values:
            dims, stays = dims_of(call, values[source.id]), call.name in ALL_SOFTMAXES
            keeps = stays or (len(call.args) > 2 and bool(call.args[2]))
            whole = Call("aten.sum.dim_IntList", (source, dims, keeps), (), (fresh if stays else out,), call.site, call.grad)
            calls += [whole, Call("aten.add.Tensor", (source, Ref(fresh)), (), (out,), call.site, call.grad)] if stays else [whole]
            fresh += stays
            continue
        if not _is_by_element(call, read, values) or out is None:
            calls.append(call)
            continue
        last, *others = map(Ref, read)
        for other in others:
            calls.append(Call("aten.add.Tensor", (last, other), (), (fresh,), call.site, call.grad))
            last, fresh = Ref(fresh), fresh + 1
        calls.append(Call("aten.mul.Tensor", (last, 1.0), (), (out,), call.site, call.grad))
    return replace(program, calls=tuple(calls))


def _is_by_element(call: Call, read: Sequence[int], values: Mapping[int, Tensor]) -> bool:
    """Is a call one of a number for each element, through which a gradient goes?"""
    out = values.get(call.outs[0]) if len(call.outs) == 1 and call.outs[0] is not None else None
    if out is None or not read or not call.grad or not out.is_floating_point() or flow_of(call.op) is not Flow.POINTWISE:
        return False
    shapes = [values[value].shape for value in read]
    filled = all(any(len(shape) >= at and shape[-at] == out.shape[-at] for shape in shapes) for at in range(1, out.dim() + 1))
    return call.name != "detach" and filled and all(broadcasts(shape, out.shape) for shape in shapes)


def joined(masks: Iterable[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """Return what is marked in one of some, by id."""
    found: dict[int, Tensor] = {}
    for leaf, mask in (pair for one in masks for pair in one.items()):
        found[leaf] = found[leaf] | mask if leaf in found else mask
    return found
