"""Where a step is pushed: elements of its leaves, of which one, a row, a group or all decide together what an edge is given.

An edge is a call that some finite operand has no finite result, or no finite derivative for: exp, log, a division, a root, a softmax.
What it is given there is followed back to the leaves, element by element; so an aim is never a guess about shapes. Of a tensor of
tokens one that the loss counts is taken, and one that it does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Leaf, Ref, refs
from nanscope.program.flow import origins
from nanscope.program.numbers import is_binary
from nanscope.program.ops import EDGES, IN_ORDER, MASKINGS, NLL_LOSSES, PICKS, SELECTED_BY
from nanscope.roles import LOG_PROBS, Role, role_of
from nanscope.text import show_index, unravel

_NAME = re.compile(r"[A-Za-z_][\w.]*")

MOST = 1 << 16  # elements of one aim: what is followed further is the whole tensor
SHORT = 60  # characters of an expression that stands for a name
MASKS = 3  # of one shape that are told apart
ALIKE = 2  # aims in one leaf, of one size, and counted alike: another one would only say the same
_DRAWN = re.compile(r"\b(rand|randn|randint)(_like)?\(|\b(normal|uniform|bernoulli|exponential|log_normal)_?\(")
LITERAL = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?$")
EDGES_ASKED = 96  # of a program, those nearest to the loss


@dataclass(frozen=True, slots=True)
class Aim:
    """Some elements of a leaf. flat: their positions, ascending. masked: does the loss leave them out, None where nothing selects."""

    leaf: Leaf
    name: str
    role: Role | None
    shape: tuple[int, ...]
    flat: tuple[int, ...]
    masked: bool | None

    @property
    def whole(self) -> bool:
        """Is it all of the leaf?"""
        return len(self.flat) == math.prod(self.shape)

    @property
    def words(self) -> str:
        """Where it is, in words."""
        if not self.shape:
            return self.name
        if self.whole and len(self.flat) > 1:
            return f"all of {self.name}"
        if len(self.flat) == 1:
            return f"{self.name}{show_index(unravel(self.flat[0], self.shape))}"
        places = torch.unravel_index(torch.tensor(self.flat), self.shape)
        ranges = [(int(own.min()), int(own.max()) + 1) for own in places]
        filled = math.prod(end - begin for begin, end in ranges) == len(self.flat)
        inside = ", ".join(_range(*ends, size, filled) for ends, size in zip(ranges, self.shape, strict=True))
        return f"{self.name}[{inside}]"


def _range(begin: int, end: int, size: int, filled: bool) -> str:
    """Positions along one dimension as an index has them. filled: are all between the ends meant?"""
    if end == begin + 1:
        return str(begin)
    return f"{begin or ''}:{end if end < size else ''}" if filled else ":"


def aims(trace: Trace) -> list[Aim]:
    """Return where the step of a healthy run is pushed, single elements first."""
    found: dict[tuple[int, tuple[int, ...]], Aim] = {}
    for value, flats in _asked(trace):
        for leaf, own in back(trace, value, flats).items():
            known = trace.program.leaf(leaf)
            if known is None or not own.numel():
                continue  # made by a call
            for group in (own, *_single(own)):
                key = leaf, tuple(group.tolist())
                if key not in found:
                    found[key] = _aim(trace, known, key[1])
    alike: dict[tuple[int, str, tuple[int, ...], int, bool | None], list[Aim]] = {}
    for aim in found.values():
        readers = trace.program.readers(aim.leaf.id)
        one = readers[0].site if readers and readers[0].site >= 0 else -2 - aim.leaf.id  # a loop has a leaf for each of its turns
        alike.setdefault((one, aim.name, aim.shape, len(aim.flat), aim.masked), []).append(aim)
    few = (aim for same in alike.values() for aim in same[:ALIKE])
    return sorted(few, key=lambda aim: (len(aim.flat), aim.leaf.id))


def _aim(trace: Trace, leaf: Leaf, flat: tuple[int, ...]) -> Aim:
    masked = is_masked(trace, leaf.id, flat[0]) if len(flat) == 1 else None
    role = Role.MASK if trace.values[leaf.id].dtype is torch.bool else trace.names.role(leaf.id)
    name, shown = trace.names.name(leaf.id) or leaf.name, leaf.id
    if not name or leaf.origin == "cut":  # whose name is the expression that made it
        read = _as_read(trace, leaf.id)
        if read is not None and (not name or _NAME.fullmatch(read[0])):
            name, shown = read
            said = role_of(name)
            role = said if said in LOG_PROBS else role or trace.names.role(shown) or said
    name = name or (str(role) if role else "an unnamed tensor")
    return Aim(leaf, name, role, tuple(trace.values[shown].shape), flat, masked)


def _as_read(trace: Trace, value: int) -> tuple[str, int] | None:
    """What a value is called where it is first read, or the short expression that stands there, and as which value: `old_logps` in
    `logps - old_logps`, behind what only lays it out anew."""
    for reader in trace.program.readers(value):
        out = reader.outs[0]
        if reader.name in IN_ORDER and out is not None and trace.values[out].numel() == trace.values[value].numel():
            found = _as_read(trace, out)
        else:
            site = trace.program.site_of(reader)
            position = next((place for place, arg in enumerate(reader.args) if isinstance(arg, Ref) and arg.id == value), -1)
            text = site.args[position].strip() if site is not None and 0 <= position < len(site.args) else ""
            whole = text.endswith((")", "]")) or _NAME.fullmatch(text)
            found = (text if whole else f"({text})", value) if text and len(text) <= SHORT and "\n" not in text else None
        if found is not None:
            return found
    return None


def _single(flat: Tensor) -> Iterator[Tensor]:
    """Of several elements one alone."""
    if len(flat) > 1:
        yield flat[:1]


def _asked(trace: Trace) -> Iterator[tuple[int, Tensor]]:
    """Yield the elements that edges are given, of every edge one that counts and one that does not; and the same of every leaf."""
    edges = [call for call in trace.program.calls if call.name in EDGES]
    for call in reversed(edges[-EDGES_ASKED:]):
        for position in EDGES[call.name]:
            value = operand(call, position)
            if value is not None and trace.values[value].numel():
                for flat in _elements(trace, value):
                    yield value, torch.tensor([flat])
        if call.name in NLL_LOSSES and (labels := operand(call, SELECTED_BY[call.name])) is not None:
            yield labels, torch.arange(trace.values[labels].numel())  # over what they leave is the mean taken
    for leaf in trace.program.leaves:  # what no edge reads may be spoilt all the same: by −inf, or NaN
        content = trace.values[leaf.id]
        if content.is_floating_point() and content.numel():
            for flat in _elements(trace, leaf.id):
                yield leaf.id, torch.tensor([flat])


def operand(call: Call, position: int) -> int | None:
    """Return the value that a call reads as one argument, None if that is a number, several, or not there."""
    arg = call.args[position] if position < len(call.args) else None
    return arg.id if isinstance(arg, Ref) else None


def _elements(trace: Trace, value: int) -> list[int]:
    """An element that the loss counts, and one that it does not."""
    content = trace.values[value]
    found: dict[bool | None, int] = {}
    for flat in _candidates(trace, content):
        found.setdefault(is_masked(trace, value, flat), flat)
    return list(found.values())


def is_masked(trace: Trace, value: int, flat: int) -> bool | None:
    """Does a mask leave an element out of the loss? What a minimum or a clamp drops is counted all the same, with other numbers."""
    out, drops, _ = trace.drops.of(value, flat)
    return out and any(drop.how in ("mask", "select") for drop in drops)


def _candidates(trace: Trace, content: Tensor) -> list[int]:
    """The largest, the smallest, and for every mask of its shape the first that it lets through and the first that it does not."""
    numbers = content.detach().flatten()
    flats = [int(numbers.argmax()), int(numbers.argmin())] if numbers.dtype != torch.bool else [0]
    for mask in _masks(trace, tuple(content.shape)):
        for kept in (mask, ~mask):
            if bool(kept.any()):
                flats.append(int(kept.int().argmax()))
    return list(dict.fromkeys(flats))


def _masks(trace: Trace, shape: tuple[int, ...]) -> list[Tensor]:
    """What selects by 0 and 1 among elements of a shape, flattened, each once."""
    found: list[Tensor] = []
    for value in dict.fromkeys(value for call in trace.program.calls if call.name in MASKINGS | PICKS for value in call.inputs()):
        content = trace.values[value]
        if content.is_complex() or content.numel() < 2 or len(content.shape) > len(shape):
            continue
        if content.dtype is not torch.bool and not is_binary(content):
            continue
        try:
            wide = content.expand(shape).flatten() != 0
        except RuntimeError:
            continue
        if not any(torch.equal(wide, known) for known in found):
            found.append(wide)
    return found[:MASKS]


def back(trace: Trace, value: int, flats: Tensor) -> dict[int, Tensor]:
    """Return the elements that some elements were computed from, or decided by: id of a value → positions, ascending."""
    found = {value: flats}
    producers, waiting = trace.program.producers, {value}
    while waiting:
        current = max(waiting, key=lambda one: producers.get(one, -1))
        waiting.remove(current)
        call = trace.program.maker(current)
        if call is None:
            continue
        try:
            before = origins(call, trace.values, current, found[current], MOST)
        except (ProgramError, RuntimeError):
            continue
        selector = SELECTED_BY.get(call.name, len(call.args))
        for source in refs(call.args[selector]) if selector < len(call.args) else ():
            before.setdefault(source, torch.arange(trace.values[source].numel()))
        for source, own in before.items():
            found[source] = torch.unique(torch.cat([found[source], own])) if source in found else own
            waiting.add(source)
    return found


def is_of_tokens(aim: Aim) -> bool:
    """Is it a log-probability, or what is made of some?"""
    return aim.role in LOG_PROBS or aim.role is Role.LOG_RATIO


def is_drawn(aim: Aim) -> bool:
    """Is it what a generator of random numbers gives?"""
    return _DRAWN.search(aim.leaf.name or "") is not None


def is_literal(aim: Aim, trace: Trace) -> bool:
    """Is it a number that stands in the code, by itself or as in `zero = torch.tensor(0.0)`?"""
    if aim.shape or aim.leaf.diff:
        return False
    readers = trace.program.readers(aim.leaf.id)
    sites = [trace.program.site_of(call) for call in readers if call.name == "lift_fresh"]
    written = 0 < len(sites) == len(readers) and all(site is not None and LITERAL.match("".join(site.args[:1])) for site in sites)
    return written or aim.leaf.name is None
