"""What is done to a place: numbers that training, broken data or nothing but a thought puts there.

A push has a strength: of a shift how far, so that the smallest that does harm can be found by halving.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from nanscope.foresight.places import Place, is_of_tokens
from nanscope.locate.trace import Trace
from nanscope.roles import Role
from nanscope.text import number

FAR = 200.0  # nats: log-ratios that runs which go wrong show
WIDE = 10.0  # times the largest number of a tensor: training gets there
HUGE = 1e30


class Severity(IntEnum):
    """Who could do that."""

    REACHABLE = 0  # training, with nothing broken
    BROKEN_DATA = 1  # only a batch that is broken
    THEORY = 2  # no run that is known

    @property
    def words(self) -> str:
        """In a few words."""
        return ("reachable in training", "only by broken data", "only in theory")[self]


@dataclass(frozen=True, slots=True)
class Push:
    """One number, or one relation, put into a place.

    kind: "shift" (by strength), "set" (to it), "equal" (all of the place the same), "alone" (all 0 but one), "like" (what stands in a
    partner there). partner: the id of that leaf, and what it is called.
    """

    place: Place
    kind: str
    strength: float
    severity: Severity
    partner: tuple[int, str] = (-1, "")

    def done(self, values: Mapping[int, Tensor]) -> Tensor:
        """Return the leaf with the push in it. values: of the healthy run."""
        content = values[self.place.leaf.id]
        pushed = content.detach().clone(memory_format=torch.contiguous_format)
        flat = torch.tensor(self.place.flat)
        numbers = pushed.view(-1)
        if self.kind == "shift":
            numbers[flat] = (numbers[flat].double() + self.strength).to(numbers.dtype)
        elif self.kind == "equal":
            numbers[flat] = numbers[flat].double().median().to(numbers.dtype)
        elif self.kind == "like":
            numbers[flat] = values[self.partner[0]].detach().flatten()[flat].to(numbers.dtype)
        elif self.kind == "alone":
            kept = numbers[flat[:1]].clone()
            numbers[flat] = 0
            numbers[flat[:1]] = kept if bool(kept != 0) else torch.ones_like(kept)
        else:
            numbers[flat] = torch.tensor(self.strength).to(numbers.dtype)
        return pushed

    @property
    def words(self) -> str:
        """What is done, in words."""
        many = len(self.place.flat) > 1
        where = self.place.words + (", at a masked token," if self.place.masked else "")
        if self.kind == "shift":
            unit = " nats" if is_of_tokens(self.place) else ""
            return f"{where} {'each ' if many else ''}{'rises' if self.strength > 0 else 'falls'} by {number(abs(self.strength))}{unit}"
        if self.kind == "equal":
            return f"{where} is all the same"
        if self.kind == "like":
            return f"{where} is what {self.partner[1]} is"
        if self.kind == "alone":
            return f"{where} is 0 but for one"
        return f"{where} is {number(self.strength)}"


def pushes(place: Place, trace: Trace) -> Iterator[Push]:
    """Yield what is done to a place, the most ordinary first."""
    content = trace.values[place.leaf.id]
    yield from (_of_numbers if content.is_floating_point() else _of_counts)(place, content)
    for leaf in trace.program.leaves if content.is_floating_point() and not place.leaf.is_of_model else ():
        other = trace.values[leaf.id]
        if leaf.id != place.leaf.id and other.shape == content.shape and other.dtype is content.dtype and not leaf.is_of_model:
            yield Push(place, "like", 0.0, Severity.REACHABLE, (leaf.id, trace.names.name(leaf.id) or leaf.name or "another tensor"))


def _of_counts(place: Place, content: Tensor) -> Iterator[Push]:
    """A mask of bits, counts and labels: nothing is selected, one is, all are ignored."""
    low = int(content.min())
    if low < 0:
        yield Push(place, "set", low, Severity.REACHABLE)  # labels: all are ignored
    elif bool((content <= 1).all()):
        yield Push(place, "set", 0.0, Severity.REACHABLE)
        if len(place.flat) > 2:
            yield Push(place, "alone", 0.0, Severity.REACHABLE)
    elif content.dtype is not torch.int64:
        yield Push(place, "set", 0.0, Severity.REACHABLE)


def _of_numbers(place: Place, content: Tensor) -> Iterator[Push]:
    own = content.detach().flatten()[torch.tensor(place.flat)].double()
    finite = content.detach().double()
    finite = finite[torch.isfinite(finite)]
    ordinary = Severity.THEORY if place.leaf.is_of_model else Severity.REACHABLE
    if finite.numel() > 1 and bool(((finite == 0) | (finite == 1)).all()):  # a mask: nothing is selected, one is, all are
        yield Push(place, "set", 0.0, ordinary)
        yield Push(place, "set", 1.0, ordinary)
        if len(place.flat) > 2:
            yield Push(place, "alone", 0.0, ordinary)
        return
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    for end in (0.0, 1.0) if low >= 0 and high <= 1 else (0.0,):  # probabilities have two ends
        if bool((own != end).any()):
            yield Push(place, "set", end, ordinary)
    if len(place.flat) > 1:
        yield Push(place, "equal", 0.0, ordinary)
    reach = FAR if is_of_tokens(place) or place.role is Role.LOGITS else max(WIDE * max(high, -low), 1.0)
    for far, severity in ((reach, ordinary), (max(1e4, WIDE * reach), Severity.THEORY), (HUGE, Severity.THEORY)):
        for sign in (1.0, -1.0):
            yield Push(place, "shift", sign * far, severity)
    if not place.leaf.is_of_model:
        for bad in (-math.inf, math.nan) if is_of_tokens(place) else (-math.inf, math.inf, math.nan):
            usual = place.masked and bad == -math.inf
            yield Push(place, "set", bad, Severity.REACHABLE if usual else Severity.BROKEN_DATA)
