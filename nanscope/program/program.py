"""A program: leaves, calls in order, and the value that they end in.

    program = Program(leaves, calls, output=7, sites=sites)
    run = program.execute({0: log_probs, 1: mask}, trace=True)      values, gradients, and what every backward returned

Slicing is a walk from the output back to the leaves, an edit is an insertion, a run is a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.program.calls import Arg, Call, Computes, Leaf, Site, refs
from nanscope.program.cost import LARGE_FILES, hangs_on_content, may_be_large
from nanscope.program.ops import COPIES, Flow, carries, flow_of
from nanscope.program.perform import Performer, perform
from nanscope.program.run import Run, run_calls
from nanscope.program.written import decode, encode

MOST = 1 << 15  # calls of a program out of a file: each takes a millisecond, and twice as many may overflow the stack of torch's backward

LINES, WIDEST = 64, 400  # of the source around a call: a file may hold any number, and each is read many times


@dataclass(frozen=True)  # without slots, so that who makes and who reads a value is worked out once
class Program:
    """Leaves, calls in order, the id of the value they end in, and what that value is.

    foreign: it was read from a file, and not recorded by this process: what it may take is bounded (see `cost`).
    """

    leaves: tuple[Leaf, ...]
    calls: tuple[Call, ...]
    output: int
    sites: tuple[Site, ...] = ()
    computes: Computes = Computes.LOSS
    foreign: bool = field(default=False, compare=False)

    @cached_property
    def producers(self) -> Mapping[int, int]:
        """Value id → index of the call that makes it; a leaf is not there."""
        return {out: index for index, call in enumerate(self.calls) for out in call.outs if out is not None}

    @cached_property
    def consumers(self) -> Mapping[int, Sequence[int]]:
        """Value id → indices of the calls that read it, in order; what nobody reads is not there."""
        found: dict[int, list[int]] = {}
        for index, call in enumerate(self.calls):
            for value in dict.fromkeys(call.inputs()):
                found.setdefault(value, []).append(index)
        return found

    @cached_property
    def _leaves(self) -> Mapping[int, Leaf]:
        return {leaf.id: leaf for leaf in reversed(self.leaves)}

    def maker(self, value: int) -> Call | None:
        """Return the call that makes a value, None for a leaf."""
        index = self.producers.get(value)
        return None if index is None else self.calls[index]

    def maker_behind(self, value: int, through: Container[str] = ()) -> Call | None:
        """Return the call that makes a value, behind those that only carry its elements elsewhere, and those of these names; None for a
        leaf."""
        call = self.maker(value)
        while call is not None and (carries(call.op) or call.name in through):
            call = self.maker(self.carried_by(call))
        return call

    def carried_by(self, call: Call) -> int:
        """Return the first value that a call reads, -1 if it reads none; where it chooses between two, one of them, and of these not what
        the code has filled with a number."""
        if call.name != "where":
            return next(call.inputs(), -1)
        values = [value for arg in call.args[1:3] for value in refs(arg)]
        chosen = (value for value in values if not self._is_filled(value))
        return next(chosen, values[0] if values else -1)

    def _is_filled(self, value: int) -> bool:
        made = self.maker(value)
        while made is not None and made.name in COPIES:
            made = self.maker(next(made.inputs(), -1))
        return made is not None and flow_of(made.op) is Flow.CREATE

    def source_of(self, value: int) -> int:
        """Return the value that another one's elements come from, wherever they were carried; itself if they were made."""
        call = self.maker(value)
        while call is not None and carries(call.op):
            value = self.carried_by(call)
            call = self.maker(value)
        return value

    def only_copy(self, value: int) -> int | None:
        """Return the copy that is made of a value, in another dtype at most, if nobody reads anything else of it."""
        readers = self.readers(value)
        return readers[0].outs[0] if len(readers) == 1 and readers[0].name in COPIES else None

    def readers(self, value: int) -> list[Call]:
        """Return the calls that read a value, in order."""
        return [self.calls[index] for index in self.consumers.get(value, ())]

    def without_gradient(self) -> list[int]:
        """Return what is made of data alone on the way to the output, in order."""
        carried, found = {leaf.id for leaf in self.leaves if leaf.diff}, list[int]()
        for call in self.calls:
            outs = [out for out in call.outs if out is not None]
            if call.grad and not carried.isdisjoint(call.inputs()):
                carried.update(outs)
            elif len(call.outs) == 1:
                found += [out for out in outs if out != self.output]
        return found

    def leaf(self, value: int) -> Leaf | None:
        """Return the leaf with that id, None if a call makes it."""
        return self._leaves.get(value)

    def site_of(self, call: Call) -> Site | None:
        """Return the source position of a call."""
        return self.sites[call.site] if 0 <= call.site < len(self.sites) else None

    def made_at(self, leaf: Leaf | None) -> Site | None:
        """Return where the memory of a leaf was made that nobody has written to, None if that is not known."""
        return self.sites[leaf.site] if leaf is not None and 0 <= leaf.site < len(self.sites) else None

    def new_id(self) -> int:
        """Return an id that no value has yet."""
        used = [leaf.id for leaf in self.leaves] + [out for call in self.calls for out in call.outs if out is not None]
        return max(used, default=-1) + 1

    def weighed(self) -> Program:
        """Return the program for further runs on tensors of the same shapes, after one that took no more than it may: where no call can
        take more with other numbers, none is weighed again, which is half of the time that a small one takes."""
        return self if any(hangs_on_content(call.name) for call in self.calls) else replace(self, foreign=False)

    def slice(self, output: int | None = None) -> Program:
        """Return the smallest program that still makes `output` (by default its own output)."""
        target = self.output if output is None else output
        needed, kept = {target}, []
        for call in reversed(self.calls):
            if any(out in needed for out in call.outs):
                kept.append(call)
                needed.update(call.inputs())
        leaves = tuple(leaf for leaf in self.leaves if leaf.id in needed)
        calls = tuple(reversed(kept))
        places = {call.site for call in calls} | {leaf.site for leaf in leaves}
        used = sorted(place for place in places if 0 <= place < len(self.sites))
        renumbered = {old: new for new, old in enumerate(used)}
        return Program(
            tuple(leaf if leaf.site < 0 else replace(leaf, site=renumbered.get(leaf.site, -1)) for leaf in leaves),
            tuple(call if (site := renumbered.get(call.site, -1)) == call.site else replace(call, site=site) for call in calls),
            target,
            tuple(self.sites[index] for index in used),
            self.computes,
            self.foreign,
        )

    def execute(
        self,
        leaves: Mapping[int, Tensor],
        *,
        dtype: torch.dtype | None = None,
        backward: bool = True,
        trace: bool = False,
        ends: bool = False,
        lean: bool = False,
        kept: Collection[int] | None = None,
        hooks: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
        performer: Performer = perform,
    ) -> Run:
        """Run the program forward and, where the output carries a gradient, backward.

        leaves:   leaf id → tensor. They are not modified.
        dtype:    compute in this floating dtype instead of the recorded ones.
        trace:    also keep, for every call, the gradients that went into and out of its autograd node.
        ends:     keep only the leaves, the output and the leaves' gradients: a large batch is then held once, not once for every call.
        lean:     if the output is not finite, keep the gradients of the leaves only: what went wrong is found without the others.
        kept:     of what calls make, the values and gradients that somebody will ask for, by id; None for all.
        hooks:    value id → what makes its gradient another one, before it is kept or goes on.
        performer: executes a call, as `perform` does: some of them in another way.
        Raises ProgramError if an operator is unknown, a leaf is missing, or a call fails.
        """
        return run_calls(
            self.leaves,
            self.calls,
            self.output,
            leaves,
            dtype=dtype,
            backward=backward,
            trace=trace,
            ends=ends,
            foreign=self.foreign,
            lean=lean,
            kept=kept,
            hooks=hooks,
            performer=performer,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the program as JSON data."""
        return {
            "leaves": [
                [leaf.id, leaf.name, leaf.origin, leaf.diff, leaf.made_by, leaf.role, *([leaf.site] if leaf.site >= 0 else [])]
                for leaf in self.leaves
            ],
            "calls": [
                [
                    call.op,
                    encode(call.args),
                    {name: encode(arg) for name, arg in call.kwargs},
                    list(call.outs),
                    call.site,
                    call.grad,
                    call.module,
                ]
                for call in self.calls
            ],
            "output": self.output,
            "computes": str(self.computes),
            "sites": [
                [s.file, s.line, s.function, s.column, s.end_line, s.end_column, s.name, s.within, s.expression, list(s.args), s.source]
                + [list(s.other)] * bool(s.other)
                for s in self.sites
            ],
        }

    @staticmethod
    def from_json(data: Any) -> Program:
        """Return the program that `to_json` wrote.

        Raises ProgramError if the data is not one, or has more calls than a recorded step has; operators are looked up only when the
        program runs.
        """
        try:
            if len(data["calls"]) > MOST and not may_be_large():
                raise ProgramError(
                    f"the recorded program has {len(data['calls']):,} calls, and what a file may ask for is {MOST:,}; if you know where it "
                    f"comes from, set {LARGE_FILES}=1",
                    slug="program-too-large",
                )
            leaves = tuple(Leaf(int(i), _text(n), str(o), bool(d), str(m), str(r), *map(int, s)) for i, n, o, d, m, r, *s in data["leaves"])
            calls = tuple(
                Call(
                    str(op),
                    cast("tuple[Arg, ...]", decode(args)),
                    tuple(sorted((str(name), decode(arg)) for name, arg in kwargs.items())),
                    _outs(outs),
                    int(site),
                    bool(grad),
                    str(module),
                )
                for op, args, kwargs, outs, site, grad, module in data["calls"]
            )
            sites = tuple(
                Site(
                    str(file), int(line), str(function), int(column), int(end_line), int(end_column), _text(name), _text(within),
                    str(expression), tuple(str(arg) for arg in args), _lines(source), _numbers(*other),
                )
                for file, line, function, column, end_line, end_column, name, within, expression, args, source, *other in data["sites"]
            )  # fmt: skip
            _check_order(leaves, calls)
            if not all(-1 <= site < len(sites) for site in (*(leaf.site for leaf in leaves), *(call.site for call in calls))):
                raise ValueError("a call stands at a place that is not there")
            return Program(leaves, calls, int(data["output"]), sites, Computes(data.get("computes", "loss")), foreign=True)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise ProgramError(f"the recorded program is not readable: {error}", slug="program-unreadable") from error


def _outs(outs: Any) -> tuple[int | None, ...]:
    if not outs:
        raise ValueError("a call makes nothing")
    return tuple(None if out is None else int(out) for out in outs)


def _numbers(other: Any = ()) -> tuple[int, ...]:
    return tuple(int(number) for number in other[:LINES])


def _lines(source: Any) -> tuple[tuple[int, str], ...]:
    return tuple((int(number), str(text)[:WIDEST]) for number, text in source[:LINES])


def _check_order(leaves: Iterable[Leaf], calls: Iterable[Call]) -> None:
    """Raise ValueError unless every value is made once, and before it is read: whoever follows a program back comes to an end."""
    made = set[int]()
    for reads, makes in (((), [leaf.id for leaf in leaves]), *((tuple(call.inputs()), call.outs) for call in calls)):
        early = next((value for value in reads if value not in made), None)
        if early is not None:
            raise ValueError(f"it reads value {early} before it is made")
        for value in makes:
            if value in made:
                raise ValueError(f"it makes value {value} twice")
            if value is not None:
                made.add(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def join(programs: Iterable[Program]) -> Program:
    """Return one program that does what the given ones do, in order; ids must already agree, sites are merged.

    What several of them make is made once: a gradient goes back through one call, not through its double.
    """
    leaves: dict[int, Leaf] = {}
    calls: list[Call] = []
    sites: list[Site] = []
    made: set[int] = set()
    output, foreign = -1, False
    for program in programs:
        foreign |= program.foreign
        offset = len(sites)
        sites.extend(program.sites)
        for call in program.calls:
            if not made.isdisjoint(call.outs):
                continue
            calls.append(replace(call, site=call.site + offset if call.site >= 0 else -1))
            made.update(out for out in call.outs if out is not None)
        leaves.update({leaf.id: replace(leaf, site=leaf.site + offset) if leaf.site >= 0 else leaf for leaf in program.leaves})
        output = program.output
    return Program(tuple(leaf for leaf in leaves.values() if leaf.id not in made), tuple(calls), output, tuple(sites), foreign=foreign)


EMPTY = Program((), (), -1)  # nothing was recorded
