"""From the log to a program: the slice that makes one value, its leaves, and what they are called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import CodeType

from torch import Tensor

from nanscope.capture.entries import Record, Value, ids, is_intact
from nanscope.capture.log import Log
from nanscope.capture.source import site_of
from nanscope.capture.values import Values
from nanscope.program.calls import NAMELESS, Arg, Call, Leaf, Site, moved_words
from nanscope.program.ops import base_name
from nanscope.program.perform import makes_floats
from nanscope.program.program import EMPTY, Program
from nanscope.roles import last_word

_NUMBER = re.compile(r"-?[0-9.]+(e-?[0-9]+)?")


@dataclass(slots=True)
class _Sites:
    """The source positions of a program, each once."""

    sites: list[Site] = field(default_factory=list)
    _known: dict[tuple[int, int], int] = field(default_factory=dict)  # by code, which the log holds, and instruction

    def at(self, code: CodeType | None, lasti: int) -> int:
        """Return the number of a position, -1 if it is none."""
        if code is None:
            return -1
        key = id(code), lasti
        known = self._known.get(key)
        if known is None:
            site = site_of(code, lasti)
            known = next((number for number, one in enumerate(self.sites) if one is site), len(self.sites))
            if known == len(self.sites):
                self.sites.append(site)
            self._known[key] = known
        return known

    def of(self, entry: Record, tag: str | None) -> int:
        """Return the number of an entry's position, -1 if it has none. tag: a name that the user gave to its result."""
        number = self.at(entry.code, entry.lasti)
        if tag is None:
            return number
        self.sites.append(replace(self.sites[number] if number >= 0 else Site("", 0, ""), name=tag))  # its own, which carries the name
        return len(self.sites) - 1


class Slicing:
    """Slices a log."""

    def __init__(self, log: Log, values: Values) -> None:
        self._log, self._values = log, values
        self._cache: tuple[int, dict[int, bool]] = (-1, {})

    def _settled(self, entry: Record) -> tuple[tuple[str, Arg], ...]:
        """The keyword arguments of a call, with the dtype that torch's default has given: who replays it may have another default."""
        made = self._values.by_id.get(entry.outs[0]) if entry.outs and entry.outs[0] is not None else None
        named = any(name == "dtype" and arg is not None for name, arg in entry.kwargs)
        if made is None or named or not makes_floats(base_name(entry.op), entry.args):
            return entry.kwargs
        return tuple(sorted((*((name, arg) for name, arg in entry.kwargs if name != "dtype"), ("dtype", made.dtype))))

    def program(self, output: Value, tags: dict[str, int]) -> tuple[Program, dict[int, Tensor]]:
        """Return the slice that makes `output`, cut where tensors are missing, and the tensors of its leaves. tags: name → value.

        Raises LookupError if the output itself was not kept and cannot be recomputed.
        """
        return self._sliced([output.id], tags)

    def together(self, outputs: Sequence[Value], tags: dict[str, int]) -> tuple[Program, dict[int, Tensor]]:
        """Return the same of several, but for those that were not kept and cannot be recomputed; its output is the last of them."""
        wanted = [one.id for one in outputs if self._is_made(one.id) or is_intact(one)]
        return self._sliced(wanted, tags) if wanted else (EMPTY, {})

    def _is_made(self, value: int) -> bool:
        index = self._values.made_by.get(value)
        return index is not None and self._reachable(index)

    def _sliced(self, wanted: list[int], tags: dict[str, int]) -> tuple[Program, dict[int, Tensor]]:
        names = {value_id: name for name, value_id in tags.items()}
        order, sites = self._needed(wanted), _Sites()
        calls: list[Call] = []
        for index in order:
            entry = self._log.entries[index]
            site = sites.of(entry, next((names[out] for out in entry.outs if out in names), None) if names else None)
            calls.append(Call(entry.op, entry.args, self._settled(entry), entry.outs, site, entry.grad, entry.module))
        made = {out for call in calls for out in call.outs if out is not None}
        readers: dict[int, list[Call]] = {value_id: [] for value_id in wanted}
        for index, call in zip(order, calls, strict=True):
            for value_id in set(self._log.entries[index].reads()):
                readers.setdefault(value_id, []).append(call)
        leaves: list[Leaf] = []
        tensors: dict[int, Tensor] = {}
        for value_id in sorted(readers.keys() - made):
            value = self._values.by_id[value_id]
            if value.tensor is None or not is_intact(value):
                raise LookupError(f"value {value_id} {list(value.shape)} was not kept, or written to unseen")
            leaf = value.leaf or Leaf(value_id, None, "cut", value.diff, "")
            name = names.get(value_id) or leaf.name
            if name is None or name == NAMELESS:
                given = self._name_of(value, readers[value_id], sites.sites)
                if name is None:
                    name = given
                elif given and given.replace(".", "").isidentifier():
                    name = last_word(given)  # a weight of no model is called what the code calls it
            leaves.append(replace(leaf, name=name, site=sites.at(*value.place)))
            tensors[value_id] = value.tensor
        return Program(tuple(leaves), tuple(calls), wanted[-1], tuple(sites.sites)), tensors

    def forget(self) -> None:
        """Tensors were let go of: what could be made again may be lost."""
        self._cache = (-1, {})

    def _needed(self, outputs: Sequence[int]) -> list[int]:
        """The calls that make some values, in order, as far as they can be made again."""
        needed: set[int] = set()
        chosen: set[int] = set()
        stack = list(outputs)
        while stack:
            value_id = stack.pop()
            if value_id in needed:
                continue
            needed.add(value_id)
            index = self._values.made_by.get(value_id)
            if index is not None and index not in chosen and self._reachable(index):
                chosen.add(index)
                stack.extend(self._log.entries[index].reads())
        return sorted(chosen)

    def _reachable(self, index: int) -> bool:
        """A call can be replayed if all that it reads was kept or can itself be made again."""
        state = self._replayable()
        if index in state:
            return state[index]
        stack = [index]
        while stack:
            current = stack[-1]
            if current in state:
                stack.pop()
                continue
            entry = self._log.entries[current]
            waiting, ok = [], True
            for value_id in entry.reads():
                made = self._values.made_by.get(value_id)
                value = self._values.by_id.get(value_id)
                if value is None:
                    ok = False
                elif made is None:
                    ok = ok and is_intact(value)
                elif made in state:
                    ok = ok and (state[made] or is_intact(value))
                elif value.diff or not is_intact(value):
                    waiting.append(made)
            if waiting and ok:
                stack.extend(waiting)
                continue
            state[current] = ok
            stack.pop()
        return state[index]

    def _replayable(self) -> dict[int, bool]:
        """Which calls can be replayed, as far as was asked; valid for as long as the log has this length."""
        if self._cache[0] != self._log.count:
            self._cache = (self._log.count, {})
        return self._cache[1]

    def _name_of(self, value: Value, readers: Sequence[Call], sites: list[Site]) -> str | None:
        """A value is called what its first reader calls it, or what it was bound to where it was made."""
        made = self._values.made_by.get(value.id)
        if made is not None:
            entry = self._log.entries[made]
            site = site_of(entry.code, entry.lasti) if entry.code is not None else None
            if site is not None and site.name:
                return site.name
        for call in readers:
            for position, arg in enumerate(call.args):
                if value.id in ids(arg) and call.site >= 0:
                    if call.op.startswith("aten.lift_fresh"):  # a literal: `torch.tensor(…)` is called what it is bound to
                        return sites[call.site].name
                    words = moved_words(call.name, sites[call.site])
                    if position < len(words):
                        # `0.01 * x` arrives as (x, 0.01): the word at the tensor's place is the number
                        other = len(words) == 2 and _NUMBER.fullmatch(words[position])
                        return words[1 - position if other else position]
        return None
