"""Does what `check` tries of a recorded step do what the atlas says of the loss? Cell by cell: a fault, at a token of the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hazards.steps import FOREIGN, batch, from_the_door, step

from nanscope.atlas import atlas
from nanscope.atlas.faults import Fault, FaultKind, Where
from nanscope.atlas.harm import GRADIENT, Harm
from nanscope.foresight.aims import Aim, aims
from nanscope.foresight.hazard import Spoils
from nanscope.foresight.pushes import FAR, Push
from nanscope.foresight.search import harms
from nanscope.frameworks.paths import LossPath
from nanscope.locate.trace import Trace
from nanscope.objective.settings import LossInputs

Key = tuple[str, FaultKind, Where, int]  # tensor, what is put there, where, sign of the advantage
SIGNS = {"log_probs": 1, "old_log_probs": -1, "ref_log_probs": 1, "rollout_log_probs": -1, "entropy": 0}  # of a tensor in its log-ratio


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: what harm the fault does by the atlas, and what `check` has found there, both as the loss and the gradient; None where it
    looked at no such token."""

    path: LossPath
    fault: Fault
    atlas: tuple[bool, bool]
    check: tuple[bool, bool] | None

    @property
    def agrees(self) -> bool:
        """A tensor that the loss does not read is no place to look at, and does no harm."""
        return (self.check or (False, False)) == self.atlas

    @property
    def words(self) -> str:
        """What is to be said of a cell that does not agree."""
        return f"{self.path.name}: {self.fault.name} {_spoils(self.atlas)} in the atlas, and check {_spoils(self.check)}"


def _spoils(harm: tuple[bool, bool] | None) -> str:
    told = {
        (False, False): "does no harm",
        (True, False): "spoils the loss",
        (False, True): "spoils the gradient",
        (True, True): "spoils both",
    }
    return "does not look there" if harm is None else told[harm]


def cells(path: LossPath) -> list[Cell]:
    """Return the cells of a loss path: all faults of a token, for which steps of both signs of the advantage are asked, and the empty mask."""
    found = atlas([path.name])
    row = found.cells[found.paths.index(path)]
    told: dict[Key, tuple[bool, bool]] = {}
    for sign in (1.0, -1.0):
        told.update(_told(path, batch(sign)))
    return [
        Cell(path, fault, (Harm.LOSS in harm, bool(harm & GRADIENT)), told.get((fault.tensor, fault.kind, fault.where, fault.advantage)))
        for fault, harm in zip(found.faults, row, strict=True)
        if fault.advantage and fault.where is not Where.ROW
    ]


def _told(path: LossPath, inputs: LossInputs) -> dict[Key, tuple[bool, bool]]:
    """What `check` finds at each token that it looks at: of two as far as a fault goes, the farther one."""
    recorded = step(path, inputs)
    snapshot = from_the_door(recorded) if path.framework in FOREIGN else recorded
    trace = Trace.of(snapshot.program, dict(snapshot.tensors))
    told: dict[Key, tuple[bool, bool]] = {}
    for aim in aims(trace):
        for field, where, sign in _places(inputs, aim, trace):
            told |= dict.fromkeys(((field, kind, where, sign) for kind in _kinds(field)), (False, False))
    for push, spoils in sorted(harms(snapshot), key=lambda one: abs(one[0].strength)):
        for field, where, sign in _places(inputs, push.aim, trace):
            kind = _kind(field, push)
            if kind is not None:
                told[field, kind, where, sign] = _harm(spoils)
    return told


def _kinds(field: str) -> Iterator[FaultKind]:
    if field == "mask":
        yield FaultKind.EMPTY
        return
    yield from (FaultKind.NEGATIVE_INFINITY, FaultKind.NAN, *((FaultKind.PLUS, FaultKind.MINUS) if SIGNS[field] else ()))


def _kind(field: str, push: Push) -> FaultKind | None:
    """Which of the atlas's faults a push is, None if it is none."""
    if push.kind == "set":
        return {-math.inf: FaultKind.NEGATIVE_INFINITY, 0.0: FaultKind.EMPTY if field == "mask" else None}.get(
            push.strength, FaultKind.NAN if math.isnan(push.strength) else None
        )
    if push.kind == "shift" and abs(push.strength) <= FAR and SIGNS.get(field):
        return FaultKind.PLUS if push.strength * SIGNS[field] > 0 else FaultKind.MINUS
    return None


def _harm(spoils: Spoils) -> tuple[bool, bool]:
    return spoils.loss, spoils.counted or spoils.masked


def _places(inputs: LossInputs, aim: Aim, trace: Trace) -> Iterator[tuple[str, Where, int]]:
    """Yield which token of the batch an aim is, or whether it is all of the mask: no number stands in the batch twice."""
    content = trace.values[aim.leaf.id]
    if aim.whole and len(aim.flat) > 1 and content.shape == inputs.mask.shape and bool((content == inputs.mask).all()):
        yield "mask", Where.BATCH, 1
    if len(aim.flat) > 1:
        return
    value = float(content.flatten()[aim.flat[0]])
    for field in SIGNS:
        for row, column in (getattr(inputs, field).detach() == value).nonzero().tolist():
            yield field, Where.VALID if inputs.mask[row, column] > 0 else Where.MASKED, 1 if inputs.advantages[row] > 0 else -1
