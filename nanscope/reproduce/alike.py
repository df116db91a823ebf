"""Does a smaller program still fail as the recorded one did? Asked by running it, and never guessed.

A failure is what a walk finds: phase, the operator and the line where the first harmful value is made, what kind of number it is, whether
the loss counts it, and what has become of the loss and of the gradients. Reason it fails is asked seldom, since it takes a replay.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nanscope.causes import Cause
from nanscope.errors import NanscopeError
from nanscope.locate.location import locate
from nanscope.locate.origin import Element, Location
from nanscope.locate.spike import spike
from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Computes, Site
from nanscope.program.numbers import first_nonfinite
from nanscope.program.perform import FAILURES
from nanscope.program.program import Program
from nanscope.replay.edits import EDITS
from nanscope.replay.patch import Variant
from nanscope.snapshot.observation import UNSEEN, Kind, Observation, Phase
from nanscope.snapshot.step import Snapshot
from nanscope.verdict.because import because
from nanscope.verdict.diagnose import examine
from nanscope.verdict.fixes import fixes_of

HUGE = 0.5  # of the largest gradient of a spike, a smaller program has at least this part


@dataclass(frozen=True, slots=True)
class Seeded:
    """Numbers that are drawn from a seed: normal ones, times scale, plus shift."""

    scale: float
    shift: float

    def numbers(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return them."""
        drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * self.scale + self.shift
        return drawn.to(dtype)

    def source(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Return what draws them, as source."""
        sizes = ", ".join(map(str, shape))
        text = f"torch.randn({sizes}, generator=torch.Generator().manual_seed(0)) * {self.scale!r} + {self.shift!r}"
        return text if dtype is torch.float32 else f"({text}).to({dtype})"


@dataclass(frozen=True, slots=True)
class Case:
    """A program and its leaves: what is shrunk. drawn: the leaves that are drawn from a seed."""

    program: Program
    tensors: dict[int, Tensor]
    drawn: Mapping[int, Seeded] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Elements of all leaves."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def sliced(self) -> Case:
        """Return it without what its output is not made of."""
        needed = {self.program.output}
        calls: list[Call] = []
        for call in reversed(self.program.calls):
            if any(out in needed for out in call.outs):
                calls.append(call)
                needed.update(call.inputs())
        leaves = tuple(leaf for leaf in self.program.leaves if leaf.id in needed)
        program = replace(self.program, leaves=leaves, calls=tuple(reversed(calls)))  # the sites stay: a thousand programs share them
        return Case(program, {leaf.id: self.tensors[leaf.id] for leaf in leaves}, self.drawn)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a program fails.

    number: which kind the origin is. left_out: the loss does not count it; beside: but others of its tensor: a mask that lets nothing
    through is another fault. loss, gradients: are all of them finite? largest: gradient, of a spike.
    """

    phase: Phase
    op: str
    born: bool
    number: str
    left_out: bool
    beside: bool
    site: Site | None
    loss: bool
    gradients: bool
    largest: float | None = None

    def like(self, other: Failure) -> bool:
        """Does it fail as another one does?"""
        if other.largest is not None:
            return replace(self, largest=None) == replace(other, largest=None) and (self.largest or 0.0) >= HUGE * other.largest
        site = self.site if self.born else other.site  # what came in has no line of its own
        return replace(self, site=site) == other


@dataclass(frozen=True, slots=True)
class Failed:
    """A run that failed: its trace, where it went wrong, and how."""

    trace: Trace
    location: Location
    failure: Failure

    @property
    def origin(self) -> Element:
        """The first harmful value."""
        return self.location.origin


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a program fails. fix: the first edit that is proven to mend it, "" if none is; mended: its program; alone: without a second
    one."""

    cause: Cause
    fix: str
    seen: Observation
    mended: Variant | None = None
    alone: bool = False

    def like(self, other: Reason) -> bool:
        """Is it the same cause, which the same edit mends?"""
        return self.cause is other.cause and (not other.fix or (self.fix == other.fix and self.alone >= other.alone))


# Microseconds, as one core of 2024 takes them. They are counted and not measured: the same file gives the same script everywhere.
RUN, CALL, ELEMENT = 1_200, 60, 0.004
REPLAYS, REPLAY = 10, 20_000  # runs that asking why takes, and what it takes beside them
WORK = 6_000_000


@dataclass(slots=True)
class Oracle:
    """What candidates are put to. It counts the work that they take, so that the same file gives the same script on every machine."""

    snapshot: Snapshot
    wanted: Failure | None = None
    work: int = 0
    limit: float = 0.0
    runs: int = 0
    refused: set[str] = field(default_factory=set)

    @property
    def spent(self) -> bool:
        """Is the work that may be done by now, done?"""
        return self.work >= self.limit

    def run(self, case: Case) -> Failed | None:
        """Run a program, and say how it fails; None if it does not, or cannot be run."""
        self.runs += 1
        self.work += _cost(case)
        loss = case.program.computes is Computes.LOSS
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trace = Trace.of(case.program, case.tensors, backward=loss)
                output = trace.values[case.program.output]
                if loss and output.numel() != 1:
                    return None
                state = first_nonfinite(output) is None, all(first_nonfinite(grad) is None for grad in trace.run.grads.values())
                if self.wanted is not None and state != (self.wanted.loss, self.wanted.gradients):
                    return None
                location = self._located(trace)
        except (NanscopeError, *FAILURES):
            return None
        if location is None:
            return None
        origin = location.origin
        largest = None
        if all(state):
            largest = max((float(grad.abs().max()) for grad in trace.run.grads.values() if grad.numel()), default=0.0)
        failure = Failure(
            phase=location.phase,
            op=origin.op,
            born=origin.born,
            number=_kind(origin.value),
            left_out=origin.masked is True,
            beside=_counts_beside(trace, origin),
            site=origin.site if origin.born else None,
            loss=state[0],
            gradients=state[1],
            largest=largest,
        )
        return Failed(trace, location, failure)

    def _located(self, trace: Trace) -> Location | None:
        return locate(trace) or (spike(trace) if self.snapshot.observation.kind is Kind.SPIKE else None)

    def alike(self, case: Case) -> Failed | None:
        """Run a candidate, and return how it fails if that is as it should."""
        failed = self.run(case)
        return failed if failed is not None and (self.wanted is None or failed.failure.like(self.wanted)) else None

    def why(self, case: Case) -> Reason:
        """Return why a program fails, and the edit that mends it."""
        self.work += REPLAY + REPLAYS * _cost(case)
        smaller = replace(
            self.snapshot,
            program=case.program,
            tensors=case.tensors,
            loss=None,
            grads={},
            found=UNSEEN,
            objective={},
            settings={},
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen, replayed, _ = examine(smaller)
            cause, _ = because(seen, replayed)
            fixes, _ = fixes_of(seen, cause, replayed.rows)
            fix = next((fix.id for fix in fixes if fix.executed and fix.works and fix.id in replayed.variants), "")
            alone = fix in EDITS and replayed.bench is not None and replayed.bench.edit(fix) is not None
        return Reason(cause, fix, seen, replayed.variants.get(fix), alone)


def _cost(case: Case) -> int:
    return int(RUN + len(case.program.calls) * (CALL + ELEMENT * case.tokens))


def _counts_beside(trace: Trace, origin: Element) -> bool:
    """Of a value that the loss leaves out: does it count another element of the same tensor?"""
    if origin.masked is not True:
        return False
    many = trace.values[origin.value_id].numel()
    return any(trace.drops.of(origin.value_id, flat)[0] is False for flat in range(min(many, LOOKED_AT)) if flat != origin.flat)


LOOKED_AT = 64  # elements of a tensor, until one is found that counts


def _kind(value: float) -> str:
    return "nan" if math.isnan(value) else str(value) if math.isinf(value) else "finite"
