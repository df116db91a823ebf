"""What of a step goes into the file: nothing over the vocabulary, no token ids unless asked for, and still the same origin."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.locate.location import locate
from nanscope.locate.names import Names
from nanscope.locate.observe import born_at, observe
from nanscope.locate.origin import Location
from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Computes, Leaf, refs
from nanscope.program.numbers import is_spoilt, same_bits, tensor_bytes
from nanscope.program.ops import PICKS, flow_of
from nanscope.program.program import EMPTY, Program
from nanscope.program.run import Run
from nanscope.replay.further import UNMADE
from nanscope.replay.patch import Patch
from nanscope.replay.stable import stable
from nanscope.replay.tries import replay
from nanscope.roles import LOG_PROBS, Role, role_of
from nanscope.snapshot.step import Snapshot
from nanscope.verdict.because import because
from nanscope.watching.look import Look


def to_save(snapshot: Snapshot, look: Look, save_tokens: bool) -> Snapshot:
    """Return what of a snapshot is saved. Where that loses the origin, what was seen of it, and the fixes tried, are written down."""
    program, tensors, grads = narrow(
        snapshot.program, snapshot.tensors, snapshot.grads, save_tokens, None if look.trace is None else look.trace.run
    )
    if program.computes is Computes.ACTIVATION and tensor_bytes(tensors) > LARGEST_CALL:
        program, tensors, grads = EMPTY, {}, {}  # weights of a real model are not for a file that is attached to an issue
    seen = snapshot.observation
    narrowed = program is not snapshot.program or program.computes is Computes.UPDATE  # one that was made once more may go bad elsewhere
    if look.location is not None and look.trace is not None and narrowed:
        seen = replace(seen, born=born_at(look.location.origin, look.trace))
    if look.location is not None and look.trace is not None and narrowed and not _holds(look.location, look.trace, program, tensors):
        if not _same_origin(look.location, program, tensors):
            seen = replace(observe(look.location, look.trace).joined(seen), outside=True)
        with contextlib.suppress(ProgramError):
            replayed = replay(snapshot)
            seen = replace(seen, tried=(*replayed.rows, *because(seen, replayed)[1]))
    return replace(
        snapshot,
        program=program,
        tensors={value: tensor.detach().clone() for value, tensor in tensors.items()},
        grads={value: grad.detach().clone() for value, grad in grads.items()},
        observation=seen,
    )


_BESIDE = (Role.ROLLOUT_LOG_PROBS, Role.OLD_LOG_PROBS)


def with_beside(snapshot: Snapshot, beside: Mapping[Role, Tensor], save_tokens: bool) -> Snapshot:
    """Return a snapshot that also holds the log-probs, and if asked for the token ids, which stood beside the loss and are not in its
    program: leaves that no call reads."""
    program, tensors = snapshot.program, dict(snapshot.tensors)
    if not program.calls or program.computes is not Computes.LOSS:
        return snapshot
    for role in (*_BESIDE, *((Role.RESPONSE_IDS,) if save_tokens else ())):
        tensor = beside.get(role)
        known = any(same_bits(held, tensor) for held in tensors.values()) if tensor is not None else True
        if tensor is not None and not known and tensor.numel() * tensor.element_size() <= SNAPSHOT_BYTES:
            leaf = Leaf(program.new_id(), str(role), "data", False, role=str(role))
            program = replace(program, leaves=(*program.leaves, leaf))
            tensors[leaf.id] = tensor.detach().clone()
    return replace(snapshot, program=program, tensors=tensors)


def _holds(location: Location, whole: Trace, program: Program, tensors: Mapping[int, Tensor]) -> bool:
    """Can a program of which parts were cut away be run as the whole one can, under changes of its origin, too?"""
    cut = {leaf.id for leaf in program.leaves if leaf.origin == "cut"}
    behind = location.origin.value_id in _behind(whole.program, cut)
    spoilt = any(leaf.diff and leaf.id in cut and is_spoilt(tensors[leaf.id]) for leaf in program.leaves)  # by what its backward may undo
    return not (behind or spoilt) and _same_origin(location, program, tensors) and not _loses_a_form(location, whole, program, tensors)


def _loses_a_form(location: Location, whole: Trace, program: Program, tensors: Mapping[int, Tensor]) -> bool:
    """Is what another form of the origin is made of cut away: of a logarithm of what token ids have gathered, the softmax?"""
    try:
        if stable(Patch(whole, location.origin)) is None:
            return False
        kept = replace(location.origin, call=program.producers.get(location.origin.value_id))
        return stable(Patch(Trace.of(program, tensors, backward=False), kept)) is None
    except UNMADE:
        return True


def _same_origin(location: Location, program: Program, tensors: Mapping[int, Tensor]) -> bool:
    """Does a program of which parts were cut away still lead to the same origin?"""
    try:
        again = locate(Trace.of(program, tensors, lean=True))
    except ProgramError:
        return False
    return again is not None and (again.origin.value_id, again.origin.flat, again.origin.op) == (
        location.origin.value_id,
        location.origin.flat,
        location.origin.op,
    )


WIDE_FACTOR = 8  # a tensor this many times larger than the tokens of the loss is one over the vocabulary

WIDE_BYTES = 1 << 20

LARGEST_CALL = 8 << 20  # bytes of the operands of a single call inside the model that are saved

SNAPSHOT_BYTES = 64 << 20  # leaves larger than this in all are not written


def narrow(
    program: Program, tensors: dict[int, Tensor], grads: dict[int, Tensor], save_tokens: bool, run: Run | None = None
) -> tuple[Program, dict[int, Tensor], dict[int, Tensor]]:
    """Return what of a program goes into a file: nothing over the vocabulary, no weights of a real model, no token ids unasked.

    Where a leaf is too large, the program is cut at the first values behind it that are not. run: of the program, if it is at hand.
    """
    if not program.calls:
        return program, tensors, grads
    run = run or program.execute(tensors)
    values = run.values
    tokens = functools.cache(lambda: _token_count(program, values))  # asks for the role of every value: only where something is large

    def wide(tensor: Tensor) -> bool:
        size = tensor.numel() * tensor.element_size()
        return size > WIDE_BYTES and ((count := tokens()) is None or tensor.numel() >= WIDE_FACTOR * count)

    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    closed = {leaf.id for leaf in program.leaves if wide(tensors[leaf.id])}
    unlisted = {out for call in program.calls if flow_of(call.op) is None for out in call.outs}  # made by what no file may hold
    if program.output in unlisted:
        return EMPTY, {}, {}
    if not save_tokens:
        closed |= {leaf.id for leaf in program.leaves if _token_ids(leaf, tensors[leaf.id])}
    if total > SNAPSHOT_BYTES:
        closed |= {leaf.id for leaf in program.leaves if leaf.origin == "parameter"}
    if not closed and not unlisted:
        return program, tensors, grads
    run = program.execute(tensors) if run.lean else run
    cut: dict[int, Leaf] = {}
    namer = Names(program)
    kept = []
    for call in program.calls:
        inputs = list(call.inputs())
        outs = [out for out in call.outs if out is not None]
        if unlisted.isdisjoint(outs) and not any(value in closed for value in inputs):
            kept.append(call)
            continue
        for out in outs:
            if wide(run.values[out]) or (not save_tokens and _more_than_a_mask(run.values[out])):
                closed.add(out)
            else:
                role = namer.role(out)
                cut[out] = Leaf(out, _called(program, call), "cut", bool(out in run.grads), call.op, str(role) if role else "")
    if program.output in cut:  # nothing would be left; keep what there is
        return (EMPTY, {}, {}) if unlisted else (program, tensors, grads)
    leaves = tuple(leaf for leaf in program.leaves if leaf.id not in closed) + tuple(cut.values())
    smaller = replace(program, leaves=leaves, calls=tuple(kept)).slice()
    needed = {leaf.id for leaf in smaller.leaves}
    contents = {value: (tensors[value] if value in tensors else run.values[value]) for value in needed}
    whole = needed - _behind(program, cut.keys() & needed)
    gradients = {value: grads[value] if value in grads else run.grads[value] for value in whole if value in grads or value in run.grads}
    return smaller, contents, gradients


def _called(program: Program, call: Call) -> str | None:
    """What the code calls the result of a call: `old[rows]` for what it picks, unless that has a name."""
    site = program.site_of(call)
    if site is None or site.name is not None:
        return None if site is None else site.name
    return site.expression if call.name in PICKS and site.expression.endswith("]") else None


def _behind(program: Program, cut: Iterable[int]) -> set[int]:
    """Return what the cut values were computed from: its gradient is more than what is left of the program can make."""
    found: set[int] = set()
    for value in cut:
        part = program.slice(value)
        found |= {leaf.id for leaf in part.leaves} | {out for call in part.calls for out in call.outs if out not in (None, value)}
    return found


_INTEGERS = (torch.int64, torch.int32)


def _token_ids(leaf: Leaf, tensor: Tensor) -> bool:
    """Integer data that is neither a mask nor a count: somebody's text, unless it is asked for."""
    return tensor.dim() > 0 and role_of(leaf.name) is not Role.MASK and _more_than_a_mask(tensor)


def _more_than_a_mask(tensor: Tensor) -> bool:
    """Integers beyond 0 and 1: what is made of token ids may be a mask, and a mask tells nothing of the text."""
    return tensor.dtype in _INTEGERS and bool(tensor.numel()) and int(tensor.max()) > 1


def _token_count(program: Program, values: Mapping[int, Tensor]) -> int | None:
    """Elements of the tensors that hold one number a token: of ratios and masks, or, if nothing is called so, of log-probs."""
    namer = Names(program)
    found: dict[Role, int] = {}
    for call in program.calls:
        for value in [*(v for arg in call.args for v in refs(arg)), *(out for out in call.outs if out is not None)]:
            role = namer.role(value) if value in values else None
            if role is not None and "gather" not in call.op and "softmax" not in call.op and 0 < values[value].dim() <= 2:
                found[role] = max(found.get(role, 0), values[value].numel())
    return max((found[role] for role in _BY_TOKEN if role in found), default=None) or max(
        (found[role] for role in LOG_PROBS if role in found), default=None
    )


_BY_TOKEN = (Role.LOG_RATIO, Role.RATIO, Role.KL, Role.MASK)
