"""What a tensor came of, as a set of places in the trainer's code: a loss is known again only where its batch came of the same as before.

Calls that wait are gone back over as they are, and those behind them where they are written down. Nothing is understood for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from nanscope.capture.entries import Value, tensors_of
from nanscope.capture.log import LITERAL, Log
from nanscope.capture.notes import Notes
from nanscope.capture.raw import identity, joins_batch
from nanscope.capture.rows import Rows
from nanscope.capture.sites import NOWHERE, Place
from nanscope.capture.values import Values
from nanscope.program.joins import joins_many
from nanscope.program.local import is_plain, memory_of
from nanscope.program.ops import base_name

Chain = frozenset[Place]  # where the calls were made that something came of
BEFORE: Chain = frozenset([NOWHERE])  # stands for a chain that is a part of an earlier one
BUFFER: Place = (None, -2)  # stands beside the last write to a buffer, and for all that it holds
LOST: Place = (None, -3)  # stands for all that calls came of which had to make room, or lie turns back: a state that is carried on
BATCH: Place = (None, -4)  # stands for all that was put together to one, which is other tensors in each step
LONG = 64  # places of calls that wait, one of the other, that are gone back over
TURNS = 4  # and so often each of them: what comes of it again and again is carried on from step to step, or from turn to turn of a loop


class Chains:
    """Of tensors that calls have made which wait, or which are written down."""

    def __init__(self, notes: Notes, known: Values, log: Log, rows: Rows) -> None:
        self._notes, self._known, self._log, self._rows = notes, known, log, rows

    def of(self, tensors: Iterable[Tensor], since: int, whole: bool) -> tuple[Chain, ...] | None:
        """Return the calls that each of some tensors came of and none before it, nothing where it comes from outside as far as is known;
        None where that cannot be told, or where some of them are not written down.

        since: calls are left out that have made a value with that number, or a higher one. whole: the stretch that these come into begins
        with what is left of the step before.
        """
        found: list[Chain] = []
        seen, waiting = set[int](), set[int]()
        for tensor in tensors:
            behind = self._waiting(tensor, waiting, whole)
            if behind is None:
                return None
            chain, outer = behind
            for one in outer:
                before = self._before(one, seen, since)
                if before is None:
                    return None
                chain |= before - BEFORE if chain else before  # what waits is told apart without it
            found.append(chain)
        return tuple(found)

    def lead_to_graphs(self, tensors: Iterable[Tensor]) -> bool:
        """Has one of some tensors a gradient, or did a call that waits read what has one to make it?"""
        seen, way, turns = set[int](), list(tensors), Counter[Place]()
        while way:
            one = way.pop()
            if one.requires_grad:
                return True
            made = self._notes.maker(one) if is_plain(one) else None
            if made is not None and identity(made) not in seen and not joins_batch(made) and turns[made.place] < TURNS:
                seen.add(identity(made))
                turns[made.place] += 1
                way += tensors_of(made.args)
        return False

    def _waiting(self, tensor: Tensor, seen: set[int], whole: bool) -> tuple[Chain, list[Tensor]] | None:
        """Return the calls that wait and that a tensor came of, and what they have read that none of them has made; None if that cannot be
        told, or it has a gradient. seen: calls that were gone through before."""
        found, outer, way, turns = set[Place](), list[Tensor](), [tensor], Counter[Place]()
        while way:
            one = way.pop()
            ends = not is_plain(one) or self._rows.last(memory_of(one)) is not None
            made = None if ends else self._notes.maker(one)
            if made is None:
                outer.append(one)
            elif joins_batch(made):
                found.add(BATCH)
            elif one.requires_grad or len(found) > LONG:
                return None
            elif identity(made) not in seen:
                for call in self._notes.makers(one, whole) if made.operator.mutable else (made,):
                    seen.add(identity(call))
                    if turns[call.place] == TURNS:
                        found.add(LOST)
                        continue
                    turns[call.place] += 1
                    found.add(call.place)
                    way += (arg for arg in tensors_of(call.args) if arg is not one)
            elif one is tensor:
                return BEFORE, []
        return frozenset(found), outer

    def _before(self, tensor: Tensor, seen: set[int], since: int) -> Chain | None:
        if not is_plain(tensor):
            return None
        written = self._rows.last(memory_of(tensor))
        if written is not None:
            return frozenset([BUFFER, written])
        known = self._known.find(tensor)
        return frozenset() if known is None else self._written(known, seen, since)

    def _written(self, value: Value, seen: set[int], since: int) -> Chain | None:
        """Return the calls that are written down and that a value came of, none if it is a leaf; None where something of it is not there
        any more. seen: values that were gone through before, whose calls are left out."""
        if value.leaf is None and value.id in seen:
            return BEFORE
        found, way, entries, made_by = set[Place](), [value.id], self._log.entries, self._known.made_by
        turns = Counter[Place]()
        while way:
            one = way.pop()
            entry = entries.get(made_by.get(one, -1))
            if entry is not None and joins_many(base_name(entry.op), entry.args) and not self._is_differentiated(one):
                found.add(BATCH)
                continue
            if one in seen:
                continue
            seen.add(one)
            known = self._known.by_id.get(one)
            written = None if known is None else self._rows.last(known.storage)
            if written is not None:
                found |= {BUFFER, written}
                continue
            if entry is not None and base_name(entry.op) == LITERAL:
                continue  # a literal, or numpy's memory, which the loop may have made a tensor before
            if known is None and one in self._log.pushed_out:
                found.add(LOST)
                continue
            if known is None or (entry is None and (known.leaf is None or known.leaf.origin == "cut")):
                return None
            if entry is not None:
                place = entry.code, entry.lasti
                if turns[place] == TURNS:
                    found.add(LOST)
                    continue
                turns[place] += 1
                found |= {place} if one < since else set()
                way += entry.reads()
        return frozenset(found)

    def _is_differentiated(self, value: int) -> bool:
        known = self._known.by_id.get(value)
        return known is None or known.diff
