"""What of the calls that wait has come to nothing: nobody holds what they have made, nor what was made of that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Set
from typing import Any

from torch import Tensor

from nanscope.capture import raw
from nanscope.capture.entries import tensors_of
from nanscope.capture.raw import EACH, Later, Raw
from nanscope.capture.spans import Spans
from nanscope.program.local import memory_of
from nanscope.torch_inside import base_of, references, storage_uses, uses

OURS = 3  # references to a result that nobody else holds: its note's, and two while they are counted
ALIASED = 2  # holders of a piece of memory: a tensor, and who counts them


def sifted(
    pending: list[Raw | Later], ends: Callable[[Tensor], bool] | None = None, buffers: bool = False
) -> tuple[list[Raw | Later], list[int]]:
    """Empty a list of calls. Returns what is left of it, the last first, and how many stood before each.

    ends: is asked of a number that has a gradient, and of which none was made, whether it stays all the same. buffers: look for those, too,
    that are gone.
    """
    left: list[Raw | Later] = []
    numbers: list[int] = []
    read: set[int] = set()  # tensors that what is left reads
    went_on: set[int] = set()  # those of which something was made that has a gradient
    references = _references(pending)  # to tensors that were written to, by what is still to be gone through
    let_go = _let_go_of(pending) if buffers else {}
    while pending:
        noted = pending.pop()  # with which go its references to its arguments, unless it is left
        if isinstance(noted, Later):
            left.append(noted)
            numbers.append(len(pending))
            read.update(map(id, noted.holds))
            continue
        operator, args, _, results, seen, _, _, _, _, _, destroyed = noted
        for item in results:
            if destroyed is not None:
                lies = let_go.get(beginning(item)) if let_go else None
                if lies is None or not lies.isdisjoint(read):
                    break  # a model holds that memory, or the trainer's code
                continue
            if not seen:
                if not item.handle.expired() or (item.identity in read and not item.handle.gone()):
                    break
                continue
            ours = OURS - 1 + references.get(id(item), 1)
            if id(item) in read or uses(item) > 1:
                break
            if sys.getrefcount(item) > ours and (id(item) in references or sys.getrefcount(item) > ours + _times_in(args, item)):
                break
            if not operator.view and storage_uses(item) > ALIASED:
                break  # by another tensor that torch made without a call, as `x.data`
            if ends is not None and item.requires_grad:
                if id(item) not in went_on and ends(item):
                    break
                went_on.update(map(id, tensors_of(args)))
        else:
            if results:
                if references:
                    _count(noted, references, -1)
                continue
        if references:
            _count(noted, references, -1)
        if operator.draws and not results[0].is_floating_point():  # what a choice was drawn from need not be made again for it
            args = ()
            noted = (operator, args, *noted[2:])
        left.append(noted)
        numbers.append(len(pending))
        read.update(map(id, tensors_of(args)))
    return left, numbers


def beginning(tensor: Tensor) -> int:
    """Where the memory begins that a tensor is a part of, be it of no element."""
    start: int = tensor.untyped_storage().data_ptr()
    return start


def is_part(tensor: Tensor) -> bool:
    """Is there more in its memory than a tensor?"""
    return tensor.nbytes < tensor.untyped_storage().nbytes()


def is_row(call: Raw | Later) -> bool:
    """Has a call written to a row of a buffer, see `Rows`?"""
    return not isinstance(call, Later) and call[raw.DESTROYED] is not None and is_part(call[raw.RESULTS][0])


def _let_go_of(pending: Sequence[Raw | Later]) -> dict[int, Set[int]]:
    """Return the buffers that were written to in rows and that nobody but these calls holds: where each begins, and the tensors in it."""
    written = (call[raw.RESULTS][0] for call in pending if not isinstance(call, Later) and is_row(call))
    buffers = {beginning(one): one for one in written}
    if not buffers:
        return {}
    inside = Spans({start: start + one.untyped_storage().nbytes() for start, one in buffers.items()})
    found: dict[int, dict[int, list[Any]]] = {start: {} for start in buffers}  # of each tensor: it, and how often calls refer to it
    for call in pending:
        if isinstance(call, Later):
            continue
        places = (*call[raw.SEEN][raw.ADDRESS :: EACH], *call[raw.MADE][raw.ADDRESS :: EACH])
        if call[raw.DESTROYED] is not None or any(inside.low <= place < inside.high and inside.start_of(place) for place in places):
            _refer(call, found)
    outside = {start: storage_uses(one) - 1 - len(found[start]) for start, one in buffers.items()}
    buffers.clear()
    return {
        start: frozenset(tensors)
        for start, tensors in found.items()
        if outside[start] <= 0 and not any(is_held(known[0], known[1] + OURS - 1) for known in tensors.values())
    }


def _refer(call: Raw, found: dict[int, dict[int, list[Any]]]) -> None:
    """Note which of the tensors in buffers a call refers to, and what these are views of."""
    for item in tensors_of((call[raw.ARGS], call[raw.RESULTS])):
        base = base_of(item)
        start = memory_of(item if base is None else base)  # what is of no element lies nowhere
        if start in found:
            for one in (item, base):
                if one is not None:
                    found[start].setdefault(id(one), [one, 0])
            found[start][id(item)][1] += 1


def is_held(tensor: Tensor, ours: int) -> bool:
    """Does anybody hold a tensor but so many of us, and what torch has made of it?"""
    return references(tensor) - (uses(tensor) > 1) > ours + 1


def _times_in(args: Sequence[object], item: object) -> int:
    """How often is it among the arguments of a call, which may hand on what it was given?"""
    return sum([arg is item for arg in args])


def _references(pending: Sequence[Raw | Later]) -> dict[int, int]:
    """Return how often calls that wait refer to each tensor that they have written to, by identity."""
    found = {id(call[raw.RESULTS][0]): 0 for call in pending if not isinstance(call, Later) and _has_written(call)}
    for call in pending if found else ():
        if not isinstance(call, Later):
            _count(call, found, 1)
    return found


def _has_written(call: Raw) -> bool:
    """Has it written to a tensor, and not to a row of a buffer?"""
    return bool(call[raw.OPERATOR].mutable and call[raw.RESULTS]) and call[raw.DESTROYED] is None


def _count(call: Raw, references: dict[int, int], times: int) -> None:
    """Add what a call refers to so often."""
    for items in (call[raw.ARGS], call[raw.RESULTS]):
        for item in items:
            if id(item) in references:
                references[id(item)] += times
            elif type(item) is list or type(item) is tuple:
                for one in tensors_of(item):
                    if id(one) in references:
                        references[id(one)] += times
