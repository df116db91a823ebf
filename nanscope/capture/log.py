"""The log of the tape: the calls in the order in which they were made, each with the values that it read and made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanscope.capture import raw
from nanscope.capture.entries import Noted, Record, Value, ids, next_version
from nanscope.capture.modules import version_of
from nanscope.capture.raw import RawCall
from nanscope.capture.sites import Callers
from nanscope.capture.values import Fleeting, Values

RING = 4096  # calls without gradient that are remembered at least (generation makes millions of them)
SHARE = 14  # one more for so many bytes of the budget, as a power of 2: what a rollout of 200 steps gathers in rows
CROWDS = 256  # calls that may go for one result
LARGE = 1 << 14  # bytes of results that make room by themselves
REMEMBERED = 1 << 20  # bytes; results up to this size outlive a backward pass, so advantages stay explained in every micro-batch

LITERAL = "lift_fresh"  # hands on, as what it has made, a tensor that was made of numbers or of numpy's memory


class Log:
    """Entries by number. read: ids of the arguments of the call that is being understood. noted: it, None where it is being made. module:
    the part of the model that one is made in."""

    def __init__(self, values: Values, callers: Callers) -> None:
        self.entries: dict[int, Record] = {}
        self.count = 0  # calls numbered so far
        self.read: list[int] = []
        self.noted: RawCall | None = None
        self.module = ""
        self.lost: Callable[[Tensor, str], None] = lambda tensor, op: None  # is told what it was that made a tensor which is held still
        self._values, self._callers = values, callers
        self._ring = max(RING, values.account.budget >> SHARE)
        self._passing: list[int] = []  # calls that a finished backward pass takes with it
        self._lasting: deque[int] = deque()  # calls without gradient on small tensors: kept until pushed out by newer ones
        self._large: deque[int] = deque()  # those of them that made something large, and perhaps some that are gone
        self._owned: dict[int, list[int]] = {}  # call → leaves that it was the first to read
        self.pushed_out: deque[int] = deque(maxlen=RING)  # values without gradient that had to make room, the last ones
        self._searched = 0, 0  # older calls than that number have no room for so many bytes, until the next backward pass
        self._needed: set[int] = set()  # values that calls with a gradient read, and what these were made of
        values.evict, values.comes_again = self._evict, self._comes_again

    def flows(self, read: Iterable[int]) -> bool:
        """Will autograd give the result of a call that reads these values a gradient?"""
        if self.grad():
            by_id = self._values.by_id
            for value_id in read:
                value = by_id.get(value_id)
                if value is not None and value.diff:
                    return True
        return False

    def grad(self) -> bool:
        """Is, or was, autograd on?"""
        return torch.is_grad_enabled() if self.noted is None else self.noted.grad

    def append(self, op: str, noted: Noted, results: Sequence[Any], diff: bool, view: bool | None) -> list[int | None]:
        """Note a call and number its results. diff: they have a gradient. view: see `Values.register`."""
        outs: list[int | None] = []
        index = self.count
        lasting = not diff
        note = self.noted
        for n, item in enumerate(results):
            if isinstance(item, Tensor):
                at = n * raw.EACH
                writes = note.made[at] if note is not None else next_version(item) if view is None else version_of(item)
                lay = None if note is None else tuple(note.made[at + raw.ADDRESS : at + raw.EACH])
                value = self._values.register(item, index, diff, view, self.read, writes, lay)
                outs.append(value.id)
                lasting = lasting and value.bytes <= REMEMBERED
            elif isinstance(item, Fleeting) and note is not None:
                outs.append(self._values.register_fleeting(item, index, note.made[n * raw.EACH]).id)
                lasting = lasting and item.bytes <= REMEMBERED
            else:
                outs.append(None)
        (code, lasti), module = (self._callers.caller(), self.module) if note is None else (note.place, note.module)
        self.number(Record(op, noted[0], noted[1], tuple(outs), self.grad(), code, lasti, module), lasting)
        if diff:
            self._need(self.read)
        if not self._values.nameless.isdisjoint(self.read):
            self._introduce(index, noted)
        return outs

    def _need(self, read: Iterable[int]) -> None:
        """Note what a call with a gradient reads, which nothing but its backward pass makes superfluous."""
        stack = list(read)
        while stack:
            value = stack.pop()
            if value in self._needed:
                continue
            self._needed.add(value)
            entry = self.entries.get(self._values.made_by.get(value, -1))
            if entry is not None:
                stack.extend(entry.reads())

    def _need_anew(self) -> None:
        """Note it of the calls that are left."""
        self._needed, self._searched = set(), (0, 0)
        for index in self._passing:
            self._need(self.entries[index].reads())

    def _introduce(self, index: int, noted: Noted) -> None:
        """Remember which call was the first to read a leaf: the leaf goes when that does."""
        for arg in noted[0]:
            for value_id in ids(arg):
                if value_id in self._values.nameless:
                    self._values.nameless.discard(value_id)
                    self._owned.setdefault(index, []).append(value_id)

    def number(self, entry: Record, lasting: bool) -> None:
        """Append an entry. lasting: it may outlive a backward pass, but not `_ring` newer ones, unless it is read just then."""
        self.entries[self.count] = entry
        if lasting:
            self._lasting.append(self.count)
            if self._room(self.count) >= LARGE:
                self._large.append(self.count)
            if len(self._lasting) > self._ring and not self._brought(self._lasting[0], self.read):
                self._push_out(self._lasting.popleft())
        else:
            self._passing.append(self.count)
        self.count += 1

    def _evict(self, held: int, size: int) -> bool:
        """Drop the oldest call without gradient to make room, but none that made or introduced that value, or one that is being read.

        Nor one that a loss has read which waits for its backward pass, nor one that is no room for so many bytes: a few advantages are none
        for a large result, and without them it could not be made again.
        """
        now, (since, least) = (held, *self.read), self._searched
        while self._large and self._large[0] not in self.entries:
            self._large.popleft()
        oldest = next((index for index in self._large if self._gives(index, size, now)), None)  # behind many small ones, in a sampling loop
        if oldest is None:
            young = (index for index in self._lasting if size < least or index >= since)
            oldest = next((index for index in young if self._gives(index, size, now)), None)
        if oldest is None:
            self._searched = self.count, size
            return False
        self._lasting.remove(oldest)
        self._push_out(oldest)
        return True

    def _gives(self, index: int, size: int, now: Collection[int]) -> bool:
        """Is it worth it to drop a call for so many bytes, and has nobody a claim on what it made? now: values that are being read."""
        return self._room(index) * CROWDS >= size and not (self._brought(index, now) or self._brought(index, self._needed))

    def _room(self, index: int) -> int:
        """How many bytes are held of what a call made and introduced."""
        entry = self.entries.get(index)
        made = (*entry.outs, *self._owned.get(index, ())) if entry is not None else ()
        values = (self._values.by_id.get(out) for out in made if out is not None)
        return sum(value.bytes for value in values if value is not None and value.tensor is not None)

    def _push_out(self, index: int) -> None:
        """Forget a call for want of room: what somebody still holds of it was computed here all the same."""
        entry = self.entries.get(index)
        for out in entry.outs if entry is not None else ():
            if out is not None:
                self.pushed_out.append(out)
            value = None if out is None else self._values.by_id.get(out)
            if entry is not None and value is not None and value.tensor is not None and self._values.is_wanted(value):
                self.lost(value.tensor, entry.op)
        self._drop(index)

    def _comes_again(self, value: Value) -> bool:
        """Can what is not held be made again, as far as is known of what it was made of?"""
        stack, seen = [value.id], set[int]()
        while stack:
            entry = self.entries.get(self._values.made_by.get(stack.pop(), -1))
            if entry is None:
                return False
            for read in entry.reads():
                other = self._values.by_id.get(read)
                if other is None:
                    return False
                if other.tensor is None and read not in seen:
                    seen.add(read)
                    stack.append(read)
        return True

    def _brought(self, index: int, values: Collection[int]) -> bool:
        """Did a call make or introduce one of these values?"""
        entry = self.entries.get(index)
        return entry is not None and any(value in values for value in (*entry.outs, *self._owned.get(index, ())))

    def reach(self) -> int:
        """How many calls there are since the oldest one with a gradient, or so."""
        return self.count - self._passing[0] if self._passing else 0

    def collect(self, named: Collection[int], read: Collection[int], young: int, reach: int) -> None:
        """Forget the calls that nobody can ask for any more: what they made is held by nobody else, and read by no call that stays.

        Where no backward pass follows (evaluation, `autograd.grad`, a step that raised) this is what lets go of a loss and, behind it, of
        the activations of the model. A call without gradient keeps one with a gradient only while that is young: else a state that is
        detached and carried on would keep every graph that it has been through. named: values that have a tag. read: those that calls
        have read which are no part of the log, and whose results somebody may ask for. young: the last so many calls. reach: older calls
        than the last so many stay.
        """
        by_id, is_wanted = self._values.by_id, self._values.is_wanted
        readers = dict.fromkeys((*named, *read), self.count)  # value → the first call that stays and reads it
        detached = set(read).difference(named)  # values that are read by calls without gradient only
        gradients: set[int] | None = None  # where those of weights lie, once somebody asks
        for index in reversed(list(self.entries)):
            if index < self.count - reach:
                break
            entry = self.entries[index]
            outs = [by_id[out] for out in entry.outs if out in by_id]
            passing = any(out.diff for out in outs)
            old = passing and index < self.count - young
            if any((out.id in readers and not (old and out.id in detached)) or is_wanted(out) for out in outs):
                saved = not passing and all(out.id not in readers and self._values.is_saved(out) for out in outs)
                if saved and gradients is None:
                    gradients = self._values.of_gradients()
                if saved and gradients is not None and gradients.isdisjoint(out.key[0] for out in outs):
                    continue  # what a graph saves of its own results must not keep that graph
                read = entry.reads()
                if passing:
                    detached.difference_update(read)
                else:
                    detached.update([value for value in read if value not in readers])
                for value in read:
                    readers[value] = index
            else:
                self._let_go(index, readers)
        self._passing = [index for index in self._passing if index in self.entries]
        self._need_anew()
        if reach >= self.count:
            self._lasting = deque(index for index in self._lasting if index in self.entries)
            self._large = deque(index for index in self._large if index in self.entries)
        self._values.drop_strays(named, over=False)

    def _let_go(self, index: int, readers: Mapping[int, int]) -> None:
        """Forget one call; leaves that it introduced belong to the next call that reads them, or to nobody while somebody holds them."""
        for leaf in self._owned.pop(index, ()):
            if readers.get(leaf, self.count) < self.count:
                self._owned.setdefault(readers[leaf], []).append(leaf)
            elif leaf in self._values.by_id:
                self._values.nameless.add(leaf)
        self._drop(index)

    def forget(self, named: Collection[int], over: Collection[int] | None, read: Collection[int] = ()) -> Collection[int]:
        """Drop what belongs to a finished backward pass, and return what is read by that which still waits for its own.

        named: values that have a tag. over: those that were differentiated, None if not known: then nothing waits. What waits has a
        gradient, was not differentiated, and is held by somebody else; a value that was is kept only for what waits, be it that this reads
        what was made of it without gradient. read: values that something else waits for.
        """
        by_id, is_wanted = self._values.by_id, self._values.is_wanted
        waiting: list[int] = []
        readers = dict.fromkeys(read, self.count)  # value → the first call that waits and reads it
        done = set(over or ())  # and what it was made of
        passing = set(self._passing)
        for made in (self._values.made_by.get(value, -1) for value in read):
            if made in self.entries and made not in passing:
                self._read_by(made, readers, passing)
        for index in reversed(self._passing):
            entry = self.entries.get(index)
            if entry is None:
                continue
            outs = [out for out in entry.outs if out is not None]
            is_done = over is None or not done.isdisjoint(outs)
            if is_done:
                done.update(entry.reads())
            held = not is_done and any((out := by_id.get(value)) is not None and out.diff and is_wanted(out) for value in outs)
            if held or not readers.keys().isdisjoint(outs):
                waiting.append(index)
                self._read_by(index, readers, passing)
            else:
                self._let_go(index, readers)
        self._passing = waiting[::-1]
        self._need_anew()
        self._values.drop_strays(named, over=True)
        return readers

    def _read_by(self, index: int, readers: dict[int, int], passing: Collection[int]) -> None:
        """Note what a call reads, and what calls without gradient read that made something of this. passing: those of all others."""
        stack = [index]
        while stack:
            reader = stack.pop()
            for value in self.entries[reader].reads():
                made = self._values.made_by.get(value)
                if value not in readers and made is not None and made in self.entries and made not in passing:
                    stack.append(made)
                readers[value] = min(reader, readers.get(value, reader))

    def clear(self) -> None:
        """Drop everything."""
        for known in (self.entries, self._lasting, self._large, self._owned, self._needed, self._passing):
            known.clear()
        self._values.drop_all()

    def _drop(self, index: int) -> None:
        """Forget one call, what it made, and the leaves that only it introduced."""
        entry = self.entries.pop(index, None)
        if entry is not None:
            for value_id in (*(out for out in entry.outs if out is not None), *self._owned.pop(index, ())):
                self._values.drop(value_id)
