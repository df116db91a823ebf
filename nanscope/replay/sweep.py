"""How tight may a clamp of an exponent be? The recorded step under one bound after another, clamped before exp and after it.

    found = sweep_clamp(snapshot)
    found.chosen        the smallest bound that keeps everything finite and leaves the healthy tokens alone, in nat
    found.points[0]     bound, and what came out: clamp(x) before exp, clamp(exp x) after it

Two engines: the recorded program with an edit at the origin, and, where the file tells the batch by role, an objective of the kind. In
both, distortion is the change of a healthy token's gradient against the same loss in float64 with the mask (or the offending element)
out of the way first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.frameworks.clamps import AFTER, clamped
from nanscope.frameworks.losses import framework_settings
from nanscope.locate.origin import Element
from nanscope.locate.trace import Trace
from nanscope.objective.evaluate import objective
from nanscope.objective.settings import LossInputs, LossSettings
from nanscope.plain import show
from nanscope.program.calls import Ref
from nanscope.program.numbers import exponent_limit
from nanscope.program.ops import EXPONENTIALS
from nanscope.replay.batch import RecordedBatch, batch_of
from nanscope.replay.edits import clamp_exponent
from nanscope.replay.further import Edit, everywhere
from nanscope.replay.own_loss import Objective
from nanscope.replay.patch import Patch, Variant, after
from nanscope.replay.reference import repaired
from nanscope.replay.tries import Bench
from nanscope.replay.under import distortion, evaluate, own_gradient
from nanscope.roles import Role
from nanscope.snapshot.observation import Row
from nanscope.snapshot.step import Snapshot
from nanscope.text import is_exact

USUAL = (5.0, 10.0, 20.0)  # nat: what frameworks clamp to

COUNT = 9  # further bounds, evenly spaced in the logarithm

UNNAMED = "the exponent"  # what is clamped, where the training code has no name for it


@dataclass(frozen=True, slots=True)
class Trial:
    """One way of running the step. distortion: of healthy tokens, relative; None where it cannot be measured."""

    loss: float | None
    bad: int
    distortion: float | None
    works: bool

    @property
    def unchanged(self) -> bool:
        """Is everything finite, and every healthy token's gradient what it should be, but for rounding?"""
        return self.works and is_exact(self.distortion)


@dataclass(frozen=True, slots=True)
class Point:
    """What one bound, in nat, did: in the recorded program and, where there is one, in the objective."""

    bound: float
    before: Trial
    after: Trial
    objective_before: Trial | None = None
    objective_after: Trial | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """The sweep. operand: what is clamped. place: file:line. value: the exponent that overflowed. largest: |exponent| of the largest
    healthy token. limit: where exp ends in this dtype. chosen: the smallest bound that is finite and distorts nothing, None if none
    does. key: the objective, or why there is none. All exponents in nat."""

    operand: str
    place: str
    op: str
    value: float
    largest: float
    limit: float
    dtype: str
    points: tuple[Point, ...]
    key: str | None
    no_objective: str

    @property
    def chosen(self) -> float | None:
        return next((point.bound for point in self.points if point.before.unchanged), None)

    def to_json(self) -> dict[str, Any]:
        """Return the sweep as JSON data."""
        found: dict[str, Any] = show({**asdict(self), "chosen": self.chosen, "sentence": self.sentence})
        return found

    @property
    def sentence(self) -> str:
        """What to take from the table."""
        after = f"Clamping after {self.op} instead leaves a non-finite gradient at every bound."
        wrong = "" if any(point.after.works for point in self.points) else after
        good = [point.bound for point in self.points if point.before.unchanged]
        if not good:
            return f"No bound both keeps everything finite and leaves the healthy tokens alone. {wrong}".strip()
        span = f"±{good[0]:.4g}" if len(good) == 1 else f"±{good[0]:.4g} to ±{good[-1]:.4g}"
        room = " Other steps need room above that: frameworks that clamp use ±10 or ±20." if good[0] < min(USUAL) * 2 else ""
        return (
            f"±{good[0]:.4g} is the smallest clamp of {self.operand} before {self.op} that keeps everything finite and leaves the healthy "
            f"tokens alone ({span} do); the largest healthy one is {self.largest:.4g} nat.{room} {wrong}".strip()
        )


def sweep_clamp(snapshot: Snapshot, key: str | None = None) -> Sweep:
    """Run a recorded step under clamps of the exponent at its origin, on a grid of bounds.

    key: the objective of `framework_loss` for the second pair of columns; None takes trl.grpo, with a KL if that is what overflowed.
    Raises NanscopeError if the step's origin is not an exp.
    """
    bench = Bench.of(snapshot) if snapshot.program.calls else None
    origin = bench.location.origin if bench is not None and bench.location is not None else None
    if bench is None or origin is None or origin.call is None or origin.op not in EXPONENTIALS:
        what = "the replayed step is finite" if origin is None else f"this step's origin is {origin.op}"
        raise NanscopeError(f"{what}: a clamp can be swept where an exp overflows", slug="nothing-to-sweep")
    operand = origin.operands[0] if origin.operands else None
    limit = exponent_limit(getattr(torch, origin.dtype))
    largest = _largest_healthy(bench.patch)
    bounds = _grid(largest, limit)
    rows = _swept(bench, bounds)
    label, asked, missing = _objective(bench.trace, origin, key)
    points = []
    for bound, (early, late) in zip(bounds, rows, strict=True):
        pair = asked(bound) if asked is not None else (None, None)
        points.append(Point(bound, _trial(early), _trial(late), *pair))
    return Sweep(
        operand=(operand.name if operand else None) or UNNAMED,
        place=f"{origin.site.file.rsplit('/', 1)[-1]}:{origin.site.line}" if origin.site else "",
        op=origin.op,
        value=operand.value if operand else math.nan,
        largest=largest,
        limit=limit,
        dtype=origin.dtype,
        points=tuple(points),
        key=label,
        no_objective=missing,
    )


def _grid(largest: float, limit: float) -> list[float]:
    """Bounds from below the largest healthy exponent to the end of exp, with the usual ones and the largest itself, rounded up."""
    low = max(min(largest / 4, limit / 100), 0.01)
    spaced = [low * (limit / low) ** (step / (COUNT - 1)) for step in range(COUNT)]
    exact = [_up(largest)] if 0 < largest < limit else []
    return sorted({*(_down(bound) for bound in spaced), *exact, *(usual for usual in USUAL if low < usual < limit)})


def _up(number: float) -> float:
    """Three digits, not smaller."""
    digit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return float(f"{math.ceil(number / digit) * digit:.6g}")


def _down(number: float) -> float:
    digit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return float(f"{math.floor(number / digit) * digit:.6g}")


def _largest_healthy(patch: Patch) -> float:
    """The largest |exponent| that the gradient depends on, once the offending elements are out of the way."""
    variant = repaired(patch)
    run = variant.program.execute(variant.tensors) if variant is not None else None
    best = 0.0
    for index in patch.siblings():
        value = next(iter(patch.program.calls[index].inputs()), None)
        if value is None:
            continue
        content = patch.values[value]
        grad = run.grads.get(value) if run is not None else None
        counts = torch.isfinite(content) & torch.isfinite(content.exp())
        if grad is not None and bool((counts & (grad != 0)).any()):
            counts = counts & (grad != 0)
        if bool(counts.any()):
            best = max(best, float(content[counts].abs().max()))
    return best


def _swept(bench: Bench, bounds: list[float]) -> list[tuple[Row, Row]]:
    """The recorded program under every bound: before, after."""
    edits: list[tuple[str, Edit]] = []
    for bound in bounds:
        edits += [(f"before:{bound:g}", _everywhere(_before(bound))), (f"after:{bound:g}", _everywhere(_after(bound)))]
    rows = bench.asked(edits)
    return list(zip(rows[::2], rows[1::2], strict=True))


def _before(bound: float) -> Edit:
    return lambda patch: clamp_exponent(patch, bound)


def _after(bound: float) -> Edit:
    def edit(patch: Patch) -> Variant | None:
        if patch.op not in EXPONENTIALS:
            return None
        program = after(patch, [("aten.clamp.default", (Ref(-1), math.exp(-bound), math.exp(bound)))])
        return Variant("clamp_after_exp", f"clamp to e^±{bound:g} after exp", program, patch.tensors, True)

    return edit


def _everywhere(edit: Edit) -> Edit:
    def both(patch: Patch) -> Variant | None:
        variant = edit(patch)
        return None if variant is None else everywhere(variant, edit, patch)[0]

    return both


def _trial(row: Row) -> Trial:
    return Trial(row.loss, row.bad, row.distortion if row.works else None, row.works)


def _objective(trace: Trace, origin: Element, key: str | None) -> tuple[str | None, Callable[[float], tuple[Trial, Trial]] | None, str]:
    """Return what the objective is called, how it does under a bound, and if there is none, why."""
    try:
        batch = batch_of(trace)
    except NanscopeError as error:
        return None, None, str(error)
    kl = origin.role is Role.KL and batch.inputs.ref_log_probs is not None
    name = key or "trl.grpo"
    settings = framework_settings(name, **({"beta": 0.04} if kl and key is None else {}))
    if batch.inputs.ref_log_probs is None:
        settings = replace(settings, kl=None)
    clamp = "kl_input_clamp_value" if kl else "log_ratio_clamp_value"
    return f"{name}, {clamp}", lambda bound: _pair(batch, name, settings, clamp, bound), ""


def _pair(batch: RecordedBatch, key: str, settings: LossSettings, clamp: str, bound: float) -> tuple[Trial, Trial]:
    free = _as_objective(key, clamped(settings, {clamp: None}))
    healthy, calm = _healthy(batch.inputs, clamp)
    trials = []
    for late in (False, True):
        asked = _as_objective(key, clamped(settings, {clamp: bound, AFTER: late}))
        outcome = evaluate(asked, batch.inputs)
        change = distortion(own_gradient(asked, batch.inputs), free, calm, at=healthy) if outcome.works else None
        trials.append(Trial(outcome.loss, outcome.bad_counted + outcome.bad_masked, change, outcome.works))
    return trials[0], trials[1]


def _healthy(inputs: LossInputs, clamp: str) -> tuple[Tensor, LossInputs]:
    """Return where the exponent is within the reach of exp, and the batch with both policies alike where it is not."""
    field = "ref_log_probs" if clamp == "kl_input_clamp_value" else "old_log_probs"
    log_probs, anchor = inputs.log_probs.detach(), getattr(inputs, field)
    if anchor is None:
        return inputs.mask > 0, inputs
    healthy = torch.isfinite((log_probs - anchor).exp()) & torch.isfinite((anchor - log_probs).exp())
    return healthy & (inputs.mask > 0), replace(inputs, **{field: torch.where(healthy, anchor, log_probs)})


def _as_objective(key: str, settings: LossSettings) -> Objective:
    return Objective(key, key, lambda inputs: objective(inputs, settings).loss)
