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
    references: dict[int, int] = {}  # to tensors that were written to, by what is still to be gone through
    while pending:
        noted = pending.pop()  # with which go its references to its arguments, unless it is left
        if isinstance(noted, Later):
            left.append(noted)
            numbers.append(len(pending))
            read.update(map(id, noted.holds))
            continue
        operator, args, _, results, seen, _, _, _, _, _, destroyed = noted
        if operator.mutable and results and destroyed is None and id(results[0]) not in references:
            references[id(results[0])] = _times_among(noted, id(results[0])) + _references(id(results[0]), pending)
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
                    _let_go(noted, references)
                continue
        if references:
            _let_go(noted, references)
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


def _references(tensor: int, pending: Sequence[Raw | Later]) -> int:
    """How often do calls that wait refer to a tensor, by identity? Those before the one that made it cannot."""
    found = 0
    for call in reversed(pending):
        if not isinstance(call, Later):
            found += _times_among(call, tensor)
            if _has_made(call, tensor):
                break
    return found


def _times_among(call: Raw, tensor: int) -> int:
    """How often does a call refer to it?"""
    found = 0
    for item in (*call[raw.ARGS], *call[raw.RESULTS]):
        if id(item) == tensor:
            found += 1
        elif type(item) is list or type(item) is tuple:
            found += sum([id(one) == tensor for one in tensors_of(item)])
    return found


def _has_made(call: Raw, tensor: int) -> bool:
    """Was it not there before the call?"""
    operator, args, _, results, seen, *_ = call
    if operator.mutable or not any(tensor == (id(item) if seen else item.identity) for item in results):
        return False
    return not any(id(one) == tensor for one in tensors_of(args))


def _let_go(call: Raw, references: dict[int, int]) -> None:
    """A call was gone through: it refers to them no more."""
    for tensor in [*references]:
        references[tensor] -= _times_among(call, tensor)
        if _has_made(call, tensor):
            del references[tensor]
