"""A bad step with ordinary numbers in the place of those that ruined it: what it would have been a moment before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.foresight.aims import back
from nanscope.locate.location import locate
from nanscope.locate.origin import Location
from nanscope.locate.trace import Trace
from nanscope.program.calls import Leaf
from nanscope.program.numbers import is_binary, quantiles
from nanscope.program.program import Program
from nanscope.roles import LOG_PROBS, Role

ROUNDS = 12  # origins that are mended, one after another
FEW, CALLS = 32, 200_000  # changes that are tried in all: at least, and calls that they may take
AROUND_ONE = (0.5, 1.5)  # ordinary numbers where no other element says what is
LIKELY = (-2.0, -0.5)  # log-probs, in nats
Tensors = dict[int, Tensor]


def ordinary(program: Program, tensors: Tensors) -> tuple[Trace | None, tuple[str, ...]]:
    """Return a healthy run of a program, and what was made ordinary for it; no run if it stays bad.

    The elements that the origin was computed from become such as the others of their tensors are, where those are no help such as its
    role has: of one leaf, then of all, then the whole of them; then of a value that the code has worked out, whose making is left out.
    Raises ProgramError if the program cannot be run.
    """
    mended: list[str] = []
    trace = Trace.of(program, tensors)
    tries = iter(range(max(FEW, CALLS // max(1, len(program.calls)))))
    for _ in range(ROUNDS):
        location = locate(trace)
        if location is None:
            return trace, tuple(mended)
        changed = _mended(trace, location, tries)
        if changed is None:
            return None, tuple(mended)
        trace, words = changed
        mended.append(words)
    return None, tuple(mended)


def _mended(trace: Trace, location: Location, tries: Iterator[int]) -> tuple[Trace, str] | None:
    """The step without this origin: of the changes that take it away one that leaves none, else the one after which it comes latest.

    tries: one is taken for every change.
    """
    here, site = location.origin.value_id, location.origin.call
    latest: tuple[int, Trace, str] | None = None
    for (program, changes), _ in zip(_changes(trace, location), tries, strict=False):
        try:
            run = Trace.of(program, {**{leaf.id: trace.values[leaf.id] for leaf in program.leaves}, **changes})
        except ProgramError:
            continue
        if site is not None and here not in run.values:
            continue
        after = locate(run)
        words = ", ".join(trace.names.name(leaf) or "an unnamed tensor" for leaf in changes)
        if after is None:
            return run, words
        if after.origin.value_id != here:
            when = trace.program.producers.get(after.origin.value_id, -1)
            latest = max(latest, (when, run, words), key=lambda one: one[0]) if latest else (when, run, words)
    return None if latest is None else latest[1:]


def _changes(trace: Trace, location: Location) -> Iterator[tuple[Program, Tensors]]:
    origin, program = location.origin, trace.program
    bad = ~torch.isfinite(trace.values[origin.value_id].flatten())
    bad[origin.flat] = True
    way = back(trace, origin.value_id, bad.nonzero().flatten())
    sources = {leaf: flat for leaf, flat in way.items() if program.leaf(leaf)}
    calm = {leaf: _calm(trace, leaf, flat) for leaf, flat in sources.items()}
    for leaf in sorted(sources, key=lambda one: _order(trace, one, sources[one])):
        yield program, {leaf: calm[leaf]}
    if len(sources) > 1:
        yield program, calm
    whole = {leaf: _calm(trace, leaf, torch.arange(trace.values[leaf].numel())) for leaf in sources}
    for leaf, content in whole.items():
        if len(sources[leaf]) < content.numel():
            yield program, {leaf: content}
    if len(sources) > 1:
        yield program, whole
    made = sorted((program.producers[value], value) for value in way if value in program.producers and value != origin.value_id)
    for few in (True, False):
        for _, value in made:
            flat = way[value] if few else torch.arange(trace.values[value].numel())
            yield _given(trace, value), {value: _calm(trace, value, flat)}


def _given(trace: Trace, value: int) -> Program:
    """The program that is given a value, and does not make it."""
    program = trace.program
    index = program.producers[value]
    call = program.calls[index]
    leaf = Leaf(value, trace.names.name(value), "data", value in trace.run.grads, call.op, trace.names.role(value) or "", call.site)
    kept = replace(call, outs=tuple(None if out == value else out for out in call.outs))
    calls = (*program.calls[:index], *([kept] if any(out is not None for out in kept.outs) else []), *program.calls[index + 1 :])
    return replace(program, leaves=(*program.leaves, leaf), calls=calls).slice()


def _order(trace: Trace, leaf: int, flat: Tensor) -> tuple[bool, bool, int]:
    """What is not finite first, what a model holds last, few before many."""
    known, content = trace.program.leaf(leaf), trace.values[leaf].flatten()[flat]
    finite = bool(torch.isfinite(content).all())
    return finite, known is not None and known.is_of_model, len(flat)


def _calm(trace: Trace, leaf: int, flat: Tensor) -> Tensor:
    """A leaf with ordinary numbers in some places."""
    content = trace.values[leaf]
    calm = content.detach().clone(memory_format=torch.contiguous_format)
    numbers = calm.view(-1)
    others = torch.ones(len(numbers), dtype=torch.bool)
    others[flat] = False
    rest = numbers[others].double()
    rest = rest[torch.isfinite(rest)]
    if not content.is_floating_point():
        usual = rest[rest >= 0]
        numbers[flat] = numbers.new_tensor(max(1.0, float(usual.median())) if len(usual) else 1.0)
        return calm
    binary = is_binary(numbers) and numbers.numel() > 1
    low, high = (1.0, 1.0) if binary else _range(rest, trace.names.role(leaf))
    numbers[flat] = torch.linspace(low, high, len(flat) + 2, dtype=torch.float64)[1:-1].to(numbers.dtype)
    return calm


def _range(rest: Tensor, role: Role | None) -> tuple[float, float]:
    """Between which numbers the middle half of the others lie; where they are too few, or all alike, such as the role has."""
    if len(rest) > 2:
        low, high = quantiles(rest[: 1 << 20], 0.25, 0.75)
        if low < high and math.isfinite(high - low):
            return low, high
    return LIKELY if role in LOG_PROBS else AROUND_ONE
