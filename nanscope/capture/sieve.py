"""What of the calls that wait has come to nothing: nobody holds what they have made, nor what was made of that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from torch import Tensor

from nanscope.capture import raw
from nanscope.capture.entries import tensors_of
from nanscope.capture.raw import Later, Raw
from nanscope.torch_inside import storage_uses, uses

OURS = 3  # references to a result that nobody else holds: its note's, and two while they are counted
ALIASED = 2  # holders of a piece of memory: a tensor, and who counts them


def sifted(pending: list[Raw | Later], ends: Callable[[Tensor], bool] | None = None) -> tuple[list[Raw | Later], list[int]]:
    """Empty a list of calls. Returns what is left of it, the last first, and how many stood before each.

    ends: is asked of a number that has a gradient, and of which none was made, whether it stays all the same.
    """
    left: list[Raw | Later] = []
    numbers: list[int] = []
    read: set[int] = set()  # tensors that what is left reads
    went_on: set[int] = set()  # those of which something was made that has a gradient
    references = _written(pending)
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
                break  # the model holds that memory
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
        if operator.draws:  # what it was drawn from need not be made again for it
            args = ()
            noted = (operator, args, *noted[2:])
        left.append(noted)
        numbers.append(len(pending))
        read.update(map(id, tensors_of(args)))
    return left, numbers


def _times_in(args: Sequence[object], item: object) -> int:
    """How often is it among the arguments of a call, which may hand on what it was given?"""
    return sum([arg is item for arg in args])


def _written(pending: Sequence[Raw | Later]) -> dict[int, int]:
    """Of tensors that calls which wait have written to: how often these calls refer to them, by identity."""
    writes = [one for one in pending if not isinstance(one, Later) and one[raw.OPERATOR].mutable and one[raw.DESTROYED] is None]
    found = {id(one[raw.RESULTS][0]): 0 for one in writes if one[raw.RESULTS]}
    for one in pending if found else ():
        if not isinstance(one, Later):
            _count(one, found, 1)
    return found


def _count(call: Raw, references: dict[int, int], more: int) -> None:
    for item in (*call[raw.ARGS], *call[raw.RESULTS]):
        if id(item) in references:
            references[id(item)] += more
        elif type(item) is list or type(item) is tuple:
            for one in tensors_of(item):
                if id(one) in references:
                    references[id(one)] += more
