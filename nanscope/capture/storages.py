"""What calls have made in a piece of memory, under whatever name: a value is found by more than the tensor that it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from nanscope.capture.entries import PLAIN, Operator, Value, is_intact
from nanscope.capture.log import Log
from nanscope.capture.modules import version_of
from nanscope.capture.opaques import Opaques
from nanscope.capture.source import site_of
from nanscope.capture.values import Values, key_of
from nanscope.program.calls import Site
from nanscope.program.local import is_plain, local, memory_of
from nanscope.program.numbers import same_bits
from nanscope.program.ops import UNWRITTEN_FACTORIES


class Storages:
    """Asked of what is written down. operators: by the identity of an overload."""

    def __init__(self, known: Values, log: Log, operators: Mapping[int, Operator], opaques: Opaques) -> None:
        self._known, self._log, self._operators, self._opaques = known, log, operators, opaques

    def within(self, tensor: Tensor, leaf: int | None = None) -> Value | None:
        """Return what was computed without gradient in the place of a tensor: what a custom function returns, or saves, its forward has
        made so. None if that was not seen. leaf: the id of the tensor, if it is a leaf: what has a later one was made of it."""
        if not is_plain(tensor):
            return None
        place, version, own = key_of(tensor, PLAIN)[:4], version_of(tensor), self._known.find(tensor)
        there = [value for value in self._known.relatives(memory_of(tensor)) if value.key[:4] == place and not value.diff]
        if own is not None and own.id not in self._known.made_by:
            there = [value for value in there if value.id < own.id]  # what was made of it since, as what autograd has saved, is later
        there = [value for value in there if leaf is None or value.id < leaf]
        made = [value for value in there if value.id in self._known.made_by and value.version in (None, version)]
        return max(made, key=lambda value: value.id, default=None)

    def like(self, tensor: Tensor) -> Value | None:
        """Return the last value that the same kind of call has made as a tensor of another run, and that is the same to the bit."""
        node, known = type(tensor.grad_fn), reversed(list(self._known.by_id.values()))
        made = ((value, value.tensor) for value in known if value.leaf is None and value.diff and value.shape == tensor.shape)
        alike = (value for value, one in made if one is not None and type(one.grad_fn) is node and same_bits(one, tensor))
        return next(alike, None)

    def made_by(self, node: Any, number: int) -> Value | None:
        """Return what a node of autograd stands for, by the number of its result, if calls have made it and it is held."""
        made = ((value, value.tensor) for value in self._known.by_id.values() if value.leaf is None and value.diff)
        held = ((value, one) for value, one in made if one is not None and one.output_nr == number)
        return next((value for value, one in held if one.grad_fn is node), None)

    def made_within(self, tensor: Tensor) -> list[Value]:
        """Return what was made in the memory of a tensor, the latest first, and of the whole of it before that of parts: whatever has been
        written to it since that has no other form. To a weight no write to a view of it is one, as far as autograd knows."""
        part = local(tensor)
        if part is None:
            return []
        place, size = key_of(part, PLAIN)[:4], part.numel() * part.element_size()
        known = (value for number in self._known.made_by if (value := self._known.by_id.get(number)) is not None)
        there = {value.id: value for value in known if place[0] <= value.key[0] < place[0] + size}
        return sorted((there[value] for value in self._computed(there)), key=lambda value: (value.key[:4] == place, value.id), reverse=True)

    def is_unwritten(self, tensor: Tensor) -> bool:
        """Was memory seen to be made for it, and nobody to write to it since? Known until the next `forget`."""
        if not is_plain(tensor) or version_of(tensor):
            return False
        made = self._opaques.made(tensor)
        if made is not None and made.op.startswith(tuple(UNWRITTEN_FACTORIES)):
            return True
        read = (value for value in self._known.relatives(memory_of(tensor)) if value.leaf is not None and value.leaf.made_by == "empty")
        return any(is_intact(value) for value in read)

    def written_at(self, tensor: Tensor, since: int = 0, last: bool = True) -> Site | None:
        """Return where what a tensor holds was computed or written to; None if that was not seen, or before so many calls were.

        last: nobody has written to it unseen after that.
        """
        if not is_plain(tensor):
            return None
        place, version = key_of(tensor, PLAIN)[:4], version_of(tensor)
        found = (value for value in self._known.relatives(memory_of(tensor)) if value.key[:4] == place)
        return self._made_at([value.id for value in found if value.version == version or not last], since)

    def written_within(self, tensor: Tensor, since: int = 0) -> Site | None:
        """Return where something was written to the memory of a tensor last, or to a part of that, whoever has written to it unseen since;
        None as above."""
        return self._made_at([value.id for value in self._known.relatives(memory_of(tensor))], since) if is_plain(tensor) else None

    def _made_at(self, values: Iterable[int], since: int) -> Site | None:
        made = max((self._known.made_by[value] for value in self._computed(values)), default=-1)
        entry = self._log.entries.get(made) if made >= since else None
        return None if entry is None or entry.code is None else site_of(entry.code, entry.lasti)

    def was_written(self, tensor: Tensor, since: int) -> bool:
        """Was something seen to be written to the memory of a tensor after so many calls, under whatever name, or to be made there?

        `p.data.add_(…)` does not count as a write to p.
        """
        there = self._known.relatives(memory_of(tensor)) if is_plain(tensor) else []
        now = {value.id for value in there}
        made = (number for value in now if (number := self._known.made_by.get(value)) is not None and number >= since)
        return any(now.isdisjoint(self._log.entries[number].reads()) for number in made)  # a view reads what lies there

    def _computed(self, values: Iterable[int]) -> list[int]:
        """Of some values, those that a call has made, and that are not only another look at what lay there; what is copied into a tensor
        looks like that, and lay somewhere else."""
        views = {operator.overload for operator in self._operators.values() if operator.view and not operator.mutable}
        made = [value for value in values if self._known.made_by.get(value) in self._log.entries]

        def is_view(value: int) -> bool:
            entry = self._log.entries[self._known.made_by[value]]
            read = (self._known.by_id.get(one) for one in entry.reads())
            return entry.op in views and any(one is not None and one.storage == self._known.by_id[value].storage for one in read)

        return [value for value in made if not is_view(value)]
