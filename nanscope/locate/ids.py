"""Which values of a program are ids of tokens: an index that takes one of each row out of a vocabulary, and what the batch calls so.

log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)     ids
F.cross_entropy(logits, labels)                         labels
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Leaf, Ref
from nanscope.program.ops import NLL_LOSSES, ORDERS, base_name
from nanscope.program.program import Program
from nanscope.roles import Role, role_of

INTEGERS = (torch.int64, torch.int32)


def ids_behind(trace: Trace, value: int, shape: torch.Size) -> int | None:
    """Return the value that holds the ids of the tokens of which another one tells something, one each; None if there is none.

    value: what is told. shape: of the ids, but for a last dimension of 1.
    """
    whole = trace.program
    found = _picks(whole, reversed(whole.slice(value).calls))
    called = ((leaf.id, None) for leaf in whole.leaves if _is_called_ids(leaf))  # kept beside the loss, which need not read them
    for ids, along in (*found, *called):
        held = trace.values.get(ids)
        if held is None or held.dtype not in INTEGERS or held.shape not in (shape, torch.Size((*shape, 1))):
            continue
        if along is None or held.shape[along] == 1:  # else several of a line, in another order
            return ids
    return None


def ids_among(program: Program) -> set[int]:
    """Return the leaves of a program that hold ids of tokens."""
    leaves = {leaf.id for leaf in program.leaves}
    return {leaf.id for leaf in program.leaves if _is_called_ids(leaf)} | {
        source for ids, _ in _picks(program, program.calls) if (source := program.source_of(ids)) in leaves
    }


def _is_called_ids(leaf: Leaf) -> bool:
    return (leaf.role or role_of(leaf.name)) == Role.RESPONSE_IDS


def _picks(program: Program, calls: Iterable[Call]) -> Iterator[tuple[int, int | None]]:
    """Yield what calls pick elements of each row by, and not in the order that a sort has found; and along which dimension, None where it
    is one a row."""
    for call in calls:
        at = 2 if call.name == "gather" else 1 if call.name in NLL_LOSSES else None
        index, along = (call.args[at], call.args[1]) if at is not None and len(call.args) > at else (None, None)
        if isinstance(index, Ref) and not _is_order(program, program.source_of(index.id)):
            yield index.id, along if isinstance(along, int) else None


def _is_order(program: Program, value: int) -> bool:
    """Does a value say in which order others stand: the positions that a sort has found?"""
    call, leaf = program.maker(value), program.leaf(value)
    if call is not None:
        return call.name in ORDERS and (len(call.outs) == 1 or value != call.outs[0])
    return leaf is not None and base_name(leaf.made_by) in ORDERS
