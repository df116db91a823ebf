"""What is done to an aim: numbers that training, broken data or nothing but a thought puts there.

A push has a strength: of a shift how far, so that the smallest that does harm can be found by halving.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from nanscope.foresight.aims import Aim, is_drawn, is_literal, is_of_tokens
from nanscope.locate.trace import Trace
from nanscope.program.numbers import is_binary
from nanscope.program.ops import (
    CLAMPS,
    COMPARISONS,
    EQUALITIES,
    EXTREMA,
    IN_ORDER,
    LOG_SOFTMAXES,
    NLL_LOSSES,
    PROBABILITIES,
    Flow,
    base_name,
    flow_of,
)
from nanscope.roles import LOG_PROBS, Role
from nanscope.text import number

FAR = 200.0  # log-ratios, in nats, that runs which go wrong show; so far networks get with what they give, too
WIDE = 10.0  # times the largest number of a tensor of data: another batch gets there
NEAR = 4.0  # a part of that, where one line dies and the next one does not yet
HUGE = 1e30
IGNORED = -100  # the label that a loss of classes leaves out if it is told nothing else


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
    """One number, or one relation, put into an aim.

    kind: "shift" (by strength), "set" (to it), "equal" (all of the aim the same), "alone" (all 0 but one), "like" (what stands in a
    partner there). partner: the id of that leaf, and what it is called.
    """

    aim: Aim
    kind: str
    strength: float
    severity: Severity
    partner: tuple[int, str] = (-1, "")

    def done(self, values: Mapping[int, Tensor]) -> Tensor:
        """Return the leaf with the push in it. values: of the healthy run."""
        content = values[self.aim.leaf.id]
        pushed = content.detach().clone(memory_format=torch.contiguous_format)
        flat = torch.tensor(self.aim.flat)
        numbers = pushed.view(-1)
        if self.kind == "shift":
            numbers[flat] = (numbers[flat].double() + self.strength).to(numbers.dtype)
        elif self.kind == "equal":
            own = flat[torch.isfinite(numbers[flat])]  # −inf, too, may be a mask
            numbers[own] = numbers[own].double().median().to(numbers.dtype) if len(own) else numbers[own]
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
        many = len(self.aim.flat) > 1
        where = self.aim.words + (", at a masked token," if self.aim.masked else "")
        if self.kind == "shift":
            unit = " nats" if is_of_tokens(self.aim) else ""
            return f"{where} {'each ' if many else ''}{'rises' if self.strength > 0 else 'falls'} by {number(abs(self.strength))}{unit}"
        if self.kind == "equal":
            return f"{where} is all the same"
        if self.kind == "like":
            return f"{where} is what {self.partner[1]} is"
        if self.kind == "alone":
            return f"{where} is 0 but for one"
        return f"{where} is {number(self.strength)}"


def pushes(aim: Aim, trace: Trace) -> Iterator[Push]:
    """Yield what is done to an aim, the most ordinary first. Nobody puts another number in the place of one that stands in the code, and no
    generator draws an infinity; other numbers that are drawn may well stand for data."""
    literal, drawn = is_literal(aim, trace), is_drawn(aim)
    for push in _pushes(aim, trace):
        unreal = literal or (drawn and push.kind == "set" and not math.isfinite(push.strength))
        yield replace(push, severity=Severity.THEORY) if unreal else push


def _pushes(aim: Aim, trace: Trace) -> Iterator[Push]:
    content = trace.values[aim.leaf.id]
    if content.is_complex():
        return  # has no larger and no smaller
    yield from _of_numbers(aim, content) if content.is_floating_point() else _of_counts(aim, content, trace)
    tensors = content.is_floating_point() and content.numel() > 1 and not aim.leaf.is_of_model  # one number is a setting
    for leaf in trace.program.leaves if tensors else ():
        other = trace.values[leaf.id]
        alike = leaf.id != aim.leaf.id and other.shape == content.shape and other.dtype is content.dtype and not leaf.is_of_model
        if alike and bool(torch.isfinite(other.flatten()[torch.tensor(aim.flat)]).all()):
            yield Push(aim, "like", 0.0, Severity.REACHABLE, (leaf.id, trace.names.name(leaf.id) or leaf.name or "another tensor"))


def _of_counts(aim: Aim, content: Tensor, trace: Trace) -> Iterator[Push]:
    """A mask of bits, counts and labels: nothing is selected, one is, all are ignored."""
    low = int(content.min())
    least = torch.iinfo(content.dtype).min if content.dtype is not torch.bool else 0
    ignored = {low: Severity.REACHABLE} if low < 0 else dict(_ignored(trace, aim.leaf.id))
    labels = [label for label in sorted(ignored) if least <= label < 0]
    if labels:
        for label in labels:
            yield Push(aim, "set", label, ignored[label])  # labels: all are ignored
    elif bool((content <= 1).all()):
        yield Push(aim, "set", 0.0, Severity.REACHABLE)
        if len(aim.flat) > 2:
            yield Push(aim, "alone", 0.0, Severity.REACHABLE)
    elif content.dtype is not torch.int64:
        yield Push(aim, "set", 0.0, Severity.REACHABLE)


def _ignored(trace: Trace, value: int) -> Iterator[tuple[int, Severity]]:
    """Yield the labels that the code leaves out, whether the step has some of them or not, and who could bring them: those that a loss of
    classes ignores, and those that a comparison like `labels != -100` or `labels >= 0` tells from others. What is ignored by default may
    never be meant to come."""
    waiting, seen = [value], {value}
    while waiting:
        for reader in trace.program.readers(waiting.pop()):
            numbers = [arg for arg in reader.args if isinstance(arg, int) and not isinstance(arg, bool)]
            out = reader.outs[0]
            if reader.name in NLL_LOSSES:
                yield from ((label, Severity.BROKEN_DATA if label == IGNORED else Severity.REACHABLE) for label in numbers[-1:])
            elif reader.name in COMPARISONS:
                sides = (0,) if reader.name in EQUALITIES else (0, -1)
                yield from ((number + side, Severity.REACHABLE) for number in numbers for side in sides)
            elif (reader.name in IN_ORDER or flow_of(reader.op) is Flow.MOVE) and out is not None and out not in seen:
                seen.add(out)
                waiting.append(out)


def _of_numbers(aim: Aim, content: Tensor) -> Iterator[Push]:
    own = content.detach().flatten()[torch.tensor(aim.flat)].double()
    finite = content.detach().double()
    finite = finite[torch.isfinite(finite)]
    bounded = base_name(aim.leaf.made_by) in CLAMPS | EXTREMA  # the code has seen to that
    ordinary = Severity.THEORY if aim.leaf.is_of_model or bounded else Severity.REACHABLE
    if finite.numel() > 1 and is_binary(finite):  # a mask: nothing is selected, one is, all are
        yield Push(aim, "set", 0.0, ordinary)
        yield Push(aim, "set", 1.0, ordinary)
        if len(aim.flat) > 2:
            yield Push(aim, "alone", 0.0, ordinary)
        return
    if len(aim.flat) > 1:
        yield Push(aim, "equal", 0.0, ordinary)
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    for corner in (0.0, 1.0) if low >= 0 and high <= 1 else (0.0,):  # probabilities have two
        if bool((own != corner).any()):
            yield Push(aim, "set", corner, ordinary)
    lowest, highest = _range(aim, low, high, finite.numel())
    least, most = (float(own.min()), float(own.max())) if bool(torch.isfinite(own).all()) else (0.0, 0.0)
    end = min(HUGE, torch.finfo(content.dtype).max)
    largest = max(high, -low)
    unbounded = is_of_tokens(aim) or aim.role is Role.LOGITS or aim.leaf.diff  # what a network gives, or learns
    reach = max(FAR, largest) if unbounded else max(WIDE * largest, 1.0)
    for far, severity in ((reach / NEAR, ordinary), (reach, ordinary), (max(1e4, WIDE * reach), Severity.THEORY), (HUGE, Severity.THEORY)):
        for shift in (far, -far):
            inside = max(lowest, -end) <= least + shift and most + shift <= min(highest, end)
            yield Push(aim, "shift", shift, severity if inside else Severity.THEORY)
    if not aim.leaf.is_of_model:
        impossible = math.inf if lowest == 0 else -math.inf  # what a token has that cannot be: the log of 0, or its negative
        for bad in (impossible, math.nan) if is_of_tokens(aim) else (-math.inf, math.inf, math.nan):
            usual = aim.masked and bad == impossible and (is_of_tokens(aim) or aim.role is Role.LOGITS)
            yield Push(aim, "set", bad, Severity.REACHABLE if usual else Severity.BROKEN_DATA)


def _range(aim: Aim, low: float, high: float, many: int) -> tuple[float, float]:
    """Between which numbers a tensor stays whatever happens in training: a logarithm of a probability is none above 0, and what is never
    below 0 in a batch is a length, a count, a distance."""
    made = base_name(aim.leaf.made_by)
    if made in PROBABILITIES:
        return 0.0, 1.0
    if high <= 0 and (made in LOG_SOFTMAXES or aim.role in LOG_PROBS):
        return -math.inf, 0.0
    positive = low >= 0 and many > 1 and (not aim.leaf.diff or aim.role in LOG_PROBS)  # these, where a loss has them as their negatives
    return (0.0 if positive else -math.inf), math.inf
