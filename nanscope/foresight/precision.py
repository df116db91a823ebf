"""Where a recorded loss loses its bits: the step call by call against float64, and what a wider dtype at one place gives back.

    found = precision(snapshot)
    found.sentence        'Rounding changes the gradient by 2.1 % of its length: most of it in ratio = torch.exp(log_ratio), bfloat16 …'
    found.calls[0]        what the call that loses most costs, alone in a float64 run, and what float32 there gives back: both executed

Notable: nothing is estimated that can be run. First-order figures (the rounding of a call times the sensitivity of loss and gradient norm
to it) only say which calls to run where there are many; they stand beside what running gave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nanscope.errors import NanscopeError, ProgramError, words_of
from nanscope.foresight.precision_model import Precision, Rounds
from nanscope.foresight.precision_run import EXACT, Change, OwnErrors, Rounded, Widened, change, loss_of, own_errors
from nanscope.foresight.precision_sums import cancelled, sums
from nanscope.foresight.precision_tokens import LogProbsOf
from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Computes
from nanscope.program.numbers import dtype_name
from nanscope.program.ops import EXTREMA, OVERLOADED_EXTREMA
from nanscope.program.perform import FAILURES
from nanscope.program.run import Run
from nanscope.snapshot.step import Snapshot

RUNS = 64  # calls that are run alone
WORK = 1 << 30  # elements that all these runs together may compute; a few calls are run whatever they take
FEW = 6
BACK, BACK_OF_LOSS = 6, 2  # calls at which a wider dtype is tried: the costliest of the gradient, and of the loss
STEP = 1e-6  # by which leaves are moved to see what the gradient's norm depends on; in float64 its square is still seen
HALVES = (torch.float16, torch.bfloat16)


def precision(snapshot: Snapshot) -> Precision:
    """Measure where a recorded step loses its bits.

    Raises NanscopeError with the slug "nothing-to-measure" where the file holds no program of a loss with a gradient, or one that is not
    finite in float64 either, and ProgramError if the program cannot be run.
    """
    program = snapshot.program
    if not program.calls or program.computes is not Computes.LOSS:
        raise NanscopeError(
            "the file holds no program of a loss: there is nothing whose precision could be measured", slug="nothing-to-measure"
        )
    trace = Trace(program, program.execute(snapshot.tensors))
    try:
        return _measured(trace, snapshot)
    except FAILURES as error:  # what a hostile file asks for in float64 only
        raise ProgramError(f"the recorded program cannot be measured: {words_of(error)}", slug="program-call-failed") from error


def _measured(trace: Trace, snapshot: Snapshot) -> Precision:
    program = trace.program
    exact = program.execute(snapshot.tensors, dtype=EXACT)
    bench = _Measured(trace, exact)
    if not bench.norm > 0 or not math.isfinite(loss_of(exact, program.output)):
        why = (
            "has no gradient"
            if bench.norm == 0
            else "is not finite in float64 either: that is no rounding, `nanscope replay` says what it is"
        )
        raise NanscopeError(f"the recorded step {why}", slug="nothing-to-measure")
    return bench.precision(snapshot.step, snapshot.rank)


@dataclass(frozen=True)  # without slots: what is derived is kept
class _Measured:
    """A step as recorded and in float64."""

    trace: Trace
    exact: Run

    @cached_property
    def norm(self) -> float:
        """Of the gradient of all leaves, NaN where it is not finite."""
        return _length(self._gradient().values())

    def _gradient(self) -> dict[int, Tensor]:
        return {leaf.id: self.exact.grads[leaf.id] for leaf in self.trace.program.leaves if leaf.diff and leaf.id in self.exact.grads}

    def precision(self, step: int, rank: int) -> Precision:
        trace, program = self.trace, self.trace.program
        recorded = change(trace, trace.run, self.exact)
        rounds = self._rounds()
        runs = self._runs()
        calls = sorted((self._alone(call) if place < runs else call for place, call in enumerate(rounds)), key=_cost)
        tokens = LogProbsOf(trace, self.exact)
        decided, of = tokens.decided(trace.run)
        added, subtracted = tuple(sums(trace, self._weights)), tuple(cancelled(trace, self._weights))
        return Precision(
            step,
            rank,
            loss_of(trace.run, program.output),
            loss_of(self.exact, program.output),
            self._dtypes(),
            self.norm,
            recorded,
            self._wide(),
            self._given_back(calls),
            max(0, len(rounds) - runs),
            tokens.held(),
            decided,
            of,
            tokens.moved(),
            added,
            subtracted,
            {index: self._named(index).called for index in (*(row.call for row in added), *(row.call for row in subtracted))},
        )

    def _runs(self) -> int:
        """How many calls can be run alone: a run computes everything three times, forward and backward."""
        elements = 3 * sum(tensor.numel() for tensor in self.trace.values.values())
        return max(FEW, min(RUNS, WORK // max(elements, 1)))

    def _dtypes(self) -> tuple[str, ...]:
        made = [self.trace.values[out].dtype for call in self.trace.program.calls for out in call.outs if out is not None]
        names = [dtype_name(dtype) for dtype in made if dtype.is_floating_point]
        return tuple(sorted(dict.fromkeys(names), key=names.count, reverse=True))

    def _rounds(self) -> list[Rounds]:
        """The calls that round, those first that cost something to first order."""
        found = []
        for places in self._together():
            calls = [self.trace.program.calls[index] for index in places]
            if all(out is None or self.trace.values[out].dtype in _NOTHING_LOST for call in calls for out in call.outs):
                continue
            errors = [own_errors(self.trace, index) for index in places]
            if any(own.some for own in errors):
                found.append(self._first_order(places, errors))
        return sorted(found, key=lambda call: (abs(call.norm) + abs(call.loss), call.local), reverse=True)

    def _together(self) -> Iterator[tuple[int, ...]]:
        """Yield the places of all calls, those together whose results a minimum or maximum chooses between."""
        program = self.trace.program
        pairs: dict[int, tuple[int, ...]] = {}
        for call in program.calls:
            if call.name not in EXTREMA | OVERLOADED_EXTREMA:
                continue
            makers = tuple(dict.fromkeys(program.producers[value] for value in call.inputs() if value in program.producers))
            if len({program.calls[index].name for index in makers}) == 1 and not any(index in pairs for index in makers):
                pairs |= dict.fromkeys(makers, makers)
        yield from dict.fromkeys(pairs.get(index, (index,)) for index in range(len(program.calls)))

    def _first_order(self, places: tuple[int, ...], errors: Sequence[OwnErrors]) -> Rounds:
        off = sum(_weighed(own.forward, self._weights) for own in errors)
        norm = sum(_weighed(own.forward, self._sensitivity[0]) + _weighed(own.backward, self._sensitivity[1]) for own in errors)
        size = _length(self.trace.values[value] for own in errors for value in own.forward)
        local = _length(error for own in errors for error in own.forward.values()) / (size or 1.0)
        named = [self._named(index) for index in places]
        name = " and ".join(dict.fromkeys(one.called for one in named)) if len(named) > 1 else named[0].name
        return replace(named[0], places=places, name=name, local=local, loss=off, norm=norm / self.norm)

    def _named(self, index: int) -> Rounds:
        call: Call = self.trace.program.calls[index]
        site = self.trace.program.site_of(call)
        out = next(out for out in call.outs if out is not None)
        name = self.trace.names.name(out)
        place = ("", "", 0) if site is None else (" ".join(site.expression.split()), site.file, site.line)
        return Rounds((index,), call.name, name, *place, dtype_name(self.trace.values[out].dtype), 0.0, 0.0, 0.0)

    @cached_property
    def _weights(self) -> Mapping[int, Tensor]:
        """∂loss / ∂value of every value, also of those that the recorded code has taken out of the graph: they move the loss, too."""
        program, values = self.trace.program, self.trace.values
        leaves = tuple(replace(leaf, diff=values[leaf.id].is_floating_point()) for leaf in program.leaves)
        calls = tuple(replace(call, grad=True, op="aten.alias.default" if call.name == "detach" else call.op) for call in program.calls)
        try:
            return replace(program, leaves=leaves, calls=calls).execute(self.trace.tensors, dtype=EXACT).grads
        except ProgramError:  # something there has no gradient
            return self.exact.grads

    @cached_property
    def _sensitivity(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """∂‖g‖ / ∂value, and ∂‖g‖ / ∂(gradient of value): by symmetry, how the gradient of each value, and the value, change along g."""
        gradient = self._gradient()
        largest = max((float(grad.abs().max()) for grad in gradient.values() if grad.numel()), default=0.0)
        ahead, behind = (self._beside(gradient, sign * STEP / largest) for sign in (1.0, -1.0))
        per = largest / (2 * STEP * self.norm)
        grads = {value: (ahead.grads[value] - behind.grads[value]) * per for value in ahead.grads if value in behind.grads}
        return grads, {value: (ahead.values[value] - behind.values[value]) * per for value in grads}

    def _beside(self, gradient: Mapping[int, Tensor], step: float) -> Run:
        tensors = self.trace.tensors
        moved = {value: tensors[value].double() + step * grad for value, grad in gradient.items()}
        return self.trace.program.execute({**tensors, **moved}, dtype=EXACT)

    def _alone(self, call: Rounds) -> Rounds:
        """Run the step in float64 with nothing but the rounding of one call."""
        rounded = Rounded({index: own_errors(self.trace, index) for index in call.places})
        run = self.trace.program.execute(self.trace.tensors, dtype=EXACT, ends=True, performer=rounded)
        return replace(call, alone=change(self.trace, run, self.exact))

    def _given_back(self, calls: Sequence[Rounds]) -> tuple[Rounds, ...]:
        """Try a wider dtype at the calls that cost most, of the gradient and of the loss."""
        of_loss = sorted(calls, key=lambda call: -abs(call.alone.loss) if call.alone is not None else 0.0)
        tried = {call.places for call in (*calls[:BACK], *of_loss[:BACK_OF_LOSS])}
        return tuple(self._wider(call) if call.places in tried and call.alone is not None else call for call in calls)

    def _wider(self, call: Rounds) -> Rounds:
        """Run the recorded step with one call in a wider dtype; where it does not fit what follows, it stays unknown."""
        held = getattr(torch, call.dtype)
        to = torch.float32 if held in HALVES else EXACT
        try:
            widened = Widened(self.trace.values, frozenset(call.places), to)
            run = self.trace.program.execute(self.trace.tensors, ends=True, performer=widened)
        except ProgramError:
            return call
        return replace(call, to=dtype_name(to), wider=change(self.trace, run, self.exact))

    def _wide(self) -> Change | None:
        if not any(tensor.dtype in HALVES for tensor in self.trace.values.values()):
            return None
        run = self.trace.program.execute(self.trace.tensors, dtype=torch.float32, ends=True)
        return change(self.trace, run, self.exact)


_NOTHING_LOST = (EXACT, torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _weighed(errors: Mapping[int, Tensor], weights: Mapping[int, Tensor]) -> float:
    """Σ error · weight, over what matters."""
    both = ((error, weights[value]) for value, error in errors.items() if value in weights)
    return sum(float((error * weight)[weight != 0].sum()) for error, weight in both)


def _length(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _cost(call: Rounds) -> tuple[bool, float, float]:
    return call.alone is None, -call.size, -abs(call.loss)
