"""`check`: a healthy step is pushed where its program has edges, and what does harm is told like an incident.

    check(load("step-000004.rank0.safetensors"))

Every hazard was executed: its trigger stands in the step, the loss or a gradient is not finite, and its fix was run on that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nanscope.errors import NanscopeError, ProgramError
from nanscope.foresight.aims import aims, is_masked
from nanscope.foresight.fixed import fixed
from nanscope.foresight.guards import guards
from nanscope.foresight.hazard import Check, Hazard, Spoils, Trigger
from nanscope.foresight.headroom import headroom_of
from nanscope.foresight.ordinary import ordinary
from nanscope.foresight.pushes import Push, Severity, pushes
from nanscope.locate.location import locate
from nanscope.locate.origin import Element, Location
from nanscope.locate.trace import Trace
from nanscope.program.by_rows import execute_ends
from nanscope.program.numbers import at, dtype_name, is_finite
from nanscope.program.run import Run
from nanscope.replay.edits import EDITS
from nanscope.replay.tries import Replay, replay
from nanscope.snapshot.observation import UNSEEN
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.text import line_in, number
from nanscope.verdict.diagnose import diagnose

MOST_RUNS = 2000  # of one check; aims that are left then are not tried
MOST_CALLS = 500_000  # of all of its runs: a loop that was recorded turn by turn has thousands in each
HALVINGS = 14  # of a shift: the smallest that does harm is known to a part in ten thousand


def check(snapshot: Snapshot, dtypes: Sequence[torch.dtype] = (), most: int = MOST_RUNS) -> Check:
    """Return the hazards of a saved step.

    dtypes: in which it is checked beside its own, what came in being cast to them; of what happens there only what is new is told.
    most: runs with a trigger, after which no further place is tried, and the check says so; fewer of a program of very many calls.
    A bad step is made ordinary first. Raises NanscopeError if it holds no program, or cannot be made healthy.
    """
    trace, healed = _healthy(snapshot)
    probe = _Probe(snapshot, trace, _Effort(min(most, max(1, MOST_CALLS // len(trace.program.calls)))))
    hazards = probe.hazards()
    for dtype in dtypes:
        hazards += [hazard for hazard in _in(dtype, probe) if not any(hazard.is_told_by(other) for other in hazards)]
    ordered = sorted(hazards, key=lambda hazard: (hazard.severity, *hazard.place, hazard.spoils.silent, hazard.trigger.masked is True))
    tried = probe.tried
    return Check(
        tuple(ordered), snapshot.step, tried.runs, healed, tried.places, tried.left, guards(trace, tried.survived), fixed(snapshot, trace)
    )


def harms(snapshot: Snapshot, most: int = MOST_RUNS) -> list[tuple[Push, Spoils]]:
    """Return every push that does harm to a saved step, and what it does.

    `check` makes its hazards of these, one of all that die in one line of one reason. Takes and raises what that does.
    """
    trace, _ = _healthy(snapshot)
    return list(_Probe(snapshot, trace, _Effort(most)).harmful())


def _healthy(snapshot: Snapshot) -> tuple[Trace, tuple[str, ...]]:
    """The step without what has ruined it, and what that was."""
    if not snapshot.program.calls:
        raise NanscopeError("the file holds no program, so there is nothing to check", slug="nothing-to-check")
    trace, healed = ordinary(snapshot.program, dict(snapshot.tensors))
    if trace is None:
        raise NanscopeError(f"the step is bad, and stays so whatever numbers are put in{_where(snapshot)}", slug="not-healthy")
    return replace(trace, program=trace.program.weighed()), healed


def _where(snapshot: Snapshot) -> str:
    """Where a step is bad, in words: what no number heals is an empty batch, a group of one, or a number that stands in the code."""
    location = locate(Trace.of(snapshot.program, dict(snapshot.tensors)))
    if location is None:
        return ""
    origin = location.origin
    what = (origin.site.expression if origin.site is not None else "") or origin.variable or origin.op
    place = f" ({line_in(origin.site.file, origin.site.line)})" if origin.site is not None else ""
    empty = ", of a tensor without elements" if any(not one.numel() for one in snapshot.tensors.values()) else ""
    return f": {what} is {number(origin.value)}{place}{empty}"


def _in(dtype: torch.dtype, probe: _Probe) -> list[Hazard]:
    """The hazards of the step in another dtype: first whether it survives that at all."""
    cast = {value: tensor.to(dtype) if tensor.is_floating_point() else tensor for value, tensor in probe.trace.tensors.items()}
    try:
        trace = Trace.of(probe.trace.program, cast)
    except ProgramError:
        return []  # what was recorded names another dtype somewhere
    lower = _Probe(probe.snapshot, trace, probe.tried)
    if locate(trace) is None:
        return lower.hazards()
    words = f"computed in {dtype_name(dtype)}, the step as it is"
    trigger = Trigger("", None, None, "dtype", math.nan, math.nan, None, words)
    spoils = lower.spoils_of(trace.run)
    return [] if spoils is None else [lower.hazard(cast, trigger, spoils, Severity.REACHABLE, dtype_name(dtype))]


@dataclass(slots=True)
class _Effort:
    """What a check has done so far. most: runs that it may take. places: of all that there are, left: those that had to be left out.
    survived: what does no harm."""

    most: int
    runs: int = 0
    places: int = 0
    left: int = 0
    survived: list[Push] = field(default_factory=list)


@dataclass(frozen=True)
class _Probe:
    """One healthy step, pushed."""

    snapshot: Snapshot
    trace: Trace
    tried: _Effort

    def hazards(self) -> list[Hazard]:
        """All that is found: of what dies in one line of one reason the most ordinary trigger, the others beside it."""
        found: dict[tuple[object, ...], tuple[Push, Spoils, Location]] = {}
        others: dict[tuple[object, ...], list[Push]] = {}
        for push, spoils in self.harmful():
            location = self._located(push)
            if location is None:
                continue
            key = _key(push, location)
            known = found.get(key)
            if known is None or (push.severity, len(push.aim.flat)) < (known[0].severity, len(known[0].aim.flat)):
                if known is not None:
                    others.setdefault(key, []).append(known[0])
                found[key] = push, spoils, location
            else:
                others.setdefault(key, []).append(push)
        return [self._pushed(*known, _no_worse(others.get(key, ()), known[0].severity)) for key, known in found.items()]

    def harmful(self) -> Iterator[tuple[Push, Spoils]]:
        """Yield what does harm: of shifts that no run is known to reach none where a nearer one has done some."""
        places = aims(self.trace)
        self.tried.places += len(places)
        for place, aim in enumerate(places):
            if self.tried.runs >= self.tried.most:
                self.tried.left += len(places) - place
                return
            shifted: set[float] = set()
            for push in pushes(aim, self.trace):
                sign = 1.0 if push.strength > 0 else -1.0
                if push.kind == "shift" and push.severity is Severity.THEORY and sign in shifted:
                    continue
                spoils = self._spoils(push)
                if spoils is None:
                    self.tried.survived.append(push)
                else:
                    if push.kind == "shift":
                        shifted.add(sign)
                    yield push, spoils

    def _tensors(self, push: Push) -> dict[int, Tensor]:
        return {**self.trace.tensors, push.aim.leaf.id: push.done(self.trace.values)}

    def _spoils(self, push: Push) -> Spoils | None:
        self.tried.runs += 1
        try:
            return self.spoils_of(execute_ends(self.trace.program, self._tensors(push)))
        except ProgramError:
            return None

    def spoils_of(self, run: Run) -> Spoils | None:
        """Return what is not finite at the ends of a run, None if all is."""
        loss = not bool(is_finite(run.values[self.trace.program.output]))
        grads = {leaf.id: run.grads[leaf.id] for leaf in self.trace.program.leaves if leaf.diff and leaf.id in run.grads}
        bad = {leaf: ~torch.isfinite(grad) for leaf, grad in grads.items() if not bool(is_finite(grad))}
        if not loss and not bad:
            return None
        masked = [self._is_masked(leaf, where) for leaf, where in bad.items()]
        return Spoils(loss, not all(masked), any(masked))

    def _is_masked(self, leaf: int, where: Tensor) -> bool:
        """Are all of these elements such that the loss does not count? The first ones are asked."""
        flats = where.flatten().nonzero().flatten()[:4].tolist()
        return all(is_masked(self.trace, leaf, flat) is True for flat in flats)

    def _located(self, push: Push) -> Location | None:
        try:
            return locate(Trace.of(self.trace.program, self._tensors(push)))
        except ProgramError:
            return None

    def _pushed(self, push: Push, spoils: Spoils, location: Location, others: tuple[str, ...]) -> Hazard:
        push = self._smallest(push, location.origin) if push.kind == "shift" else push
        dtype = dtype_name(self.trace.values[push.aim.leaf.id].dtype)
        return self.hazard(self._tensors(push), self._trigger(push), spoils, push.severity, dtype, others)

    def hazard(
        self, tensors: dict[int, Tensor], trigger: Trigger, spoils: Spoils, severity: Severity, dtype: str, others: tuple[str, ...] = ()
    ) -> Hazard:
        """Explain a step with a trigger in it as an incident is explained, and try its fix on the healthy one, too."""
        known = replace(self.snapshot, observation=UNSEEN, found=UNSEEN, notes=(), history=())
        step = replace(known, program=self.trace.program, tensors=tensors, loss=None, grads={}, reached=Reached())
        replayed = replay(step)
        loss = replayed.rows[0].loss if replayed.rows else None
        incident = diagnose(replace(step, reached=Reached(loss)), replayed=replayed)
        fix = next(iter(incident.fixes), None)
        change = None if fix is None else self._change(replayed, fix.id)
        call = None if replayed.location is None else replayed.location.origin.call
        headroom = headroom_of(self.trace, self.snapshot.history, call, trigger.masked is True) if self.snapshot.history else ""
        return Hazard(
            severity,
            incident.origin,
            incident.phase,
            incident.cause,
            trigger,
            spoils,
            incident.sentence,
            fix,
            change,
            dtype,
            others,
            headroom,
        )

    def _smallest(self, push: Push, origin: Element) -> Push:
        """The smallest shift in its direction by which the harm is born in the same element."""
        if math.isfinite(origin.value) or not origin.born:
            return push
        value, flat = origin.value_id, origin.flat
        making, low, high = self.trace.program.slice(value), 0.0, push.strength
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            run = making.execute(self._tensors(replace(push, strength=middle)), backward=False, ends=True)
            low, high = (middle, high) if math.isfinite(at(run.values[value], flat)) else (low, middle)
        return replace(push, strength=high)

    def _trigger(self, push: Push) -> Trigger:
        aim, flat = push.aim, push.aim.flat[0]
        content = self.trace.values[aim.leaf.id]
        value, recorded = at(push.done(self.trace.values), flat), at(content, flat)
        distance = abs(push.strength) if push.kind == "shift" else None
        return Trigger(aim.name, aim.role, aim.masked, push.kind, value, recorded, distance, push.words)

    def _change(self, replayed: Replay, name: str) -> float | None:
        """How much an edit changes the gradient of the healthy step, relative to its largest element; None if it cannot be said."""
        edit = EDITS.get(name)
        if edit is None or replayed.bench is None or replayed.location is None:
            return None
        try:
            variant = edit(replayed.bench.patch)
            if variant is None:
                return None
            after = execute_ends(variant.program, {**variant.tensors, **self.trace.tensors})
        except NanscopeError:
            return None
        before = self.trace.run.grads
        pairs = [
            (before[leaf.id], after.grads[leaf.id]) for leaf in self.trace.program.leaves if leaf.id in after.grads and leaf.id in before
        ]
        scale = max((float(one.abs().max()) for one, _ in pairs if one.numel()), default=0.0)
        worst = max((float((one - other).abs().max()) for one, other in pairs if one.numel()), default=0.0)
        return worst / scale if scale else worst


def _no_worse(pushes: Sequence[Push], severity: Severity) -> tuple[str, ...]:
    """Those that stand beside a trigger under its heading, in words: what training does not reach is not told as if it did."""
    return tuple(dict.fromkeys(push.words for push in pushes if push.severity <= severity))


def _key(push: Push, location: Location) -> tuple[object, ...]:
    """Where a push does its harm: alike for all that die in one line of one reason."""
    origin = location.origin
    where: object = (origin.site.file, origin.site.line) if origin.site is not None else origin.value_id
    return where, origin.op, origin.born, location.phase, push.aim.masked is True
