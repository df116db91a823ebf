"""Does `check` say of a recorded step what the atlas says of the loss? Cell by cell: a fault, and a token of the step that it is put at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hazards.steps import FOREIGN, batch, from_the_door, step

from nanscope.atlas import atlas
from nanscope.atlas.faults import Fault, FaultKind, Where
from nanscope.atlas.harm import Harm
from nanscope.foresight.aims import aims
from nanscope.foresight.hazard import Check
from nanscope.foresight.search import check
from nanscope.frameworks.paths import LossPath
from nanscope.locate.trace import Trace
from nanscope.objective.settings import LossInputs

HARMFUL = Harm.LOSS | Harm.VALID | Harm.MASKED  # what is finite and wrong, `check` does not look for
FIELDS = {"log_probs": 1, "old_log_probs": -1, "ref_log_probs": 1, "rollout_log_probs": -1, "entropy": 0}  # sign in the log-ratio
FAR = 200.5  # nats: as far as the atlas goes, and a rounding
SET = {FaultKind.NEGATIVE_INFINITY: "is −inf", FaultKind.NAN: "is NaN"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. code: the atlas's letters. found: does `check` call it a hazard, None if it looked at no such token?"""

    path: LossPath
    fault: Fault
    code: str
    harmful: bool
    found: bool | None

    @property
    def agrees(self) -> bool:
        """A tensor that the loss does not read is no place to look at, and does no harm."""
        return bool(self.found) is self.harmful

    @property
    def words(self) -> str:
        """What is to be said of a cell that does not agree."""
        told = {None: "does not look there", True: "finds a hazard", False: "finds none"}[self.found]
        return f"{self.path.name}: {self.fault.name} is {self.code} in the atlas, and check {told}"


def cells(path: LossPath) -> list[Cell]:
    """Return the cells of a loss path: all faults of the atlas, for which `check` is asked about steps of both signs of the advantage."""
    found = atlas([path.name])
    row = found.cells[found.paths.index(path)]
    told: dict[tuple[str, FaultKind, Where, int], bool] = {}
    for sign in (1.0, -1.0):
        for key, harm in _told(path, batch(sign)):
            told[key] = told.get(key, False) or harm
    return [
        Cell(path, fault, harm.code, bool(harm & HARMFUL), told.get((fault.tensor, fault.kind, fault.where, fault.advantage)))
        for fault, harm in zip(found.faults, row, strict=True)
        if fault.advantage and fault.where is not Where.ROW
    ]


def _told(path: LossPath, inputs: LossInputs) -> Iterator[tuple[tuple[str, FaultKind, Where, int], bool]]:
    """Yield what `check` says of each token that it looks at."""
    recorded = step(path, inputs)
    snapshot = from_the_door(recorded) if path.framework in FOREIGN else recorded
    found = check(snapshot)
    words = {one for hazard in found.hazards for one in (hazard.trigger.words, *hazard.others)}
    trace = Trace.of(snapshot.program, dict(snapshot.tensors))
    for aim in aims(trace):
        place = _place(inputs, float(trace.values[aim.leaf.id].flatten()[aim.flat[0]])) if len(aim.flat) == 1 else None
        if place is None:
            continue
        field, row, column = place
        where = Where.VALID if inputs.mask[row, column] > 0 else Where.MASKED
        sign = 1 if inputs.advantages[row] > 0 else -1
        told = f"{aim.words}{', at a masked token,' if aim.masked else ''} "
        for kind, says in SET.items():
            yield (field, kind, where, sign), told + says in words
        for way, direction in (("rises by ", 1), ("falls by ", -1)):
            far = [float(one.removeprefix(told + way).split(" ")[0]) for one in words if one.startswith(told + way)]
            kind = FaultKind.PLUS if direction * FIELDS[field] > 0 else FaultKind.MINUS
            if FIELDS[field]:
                yield (field, kind, where, sign), min(far, default=FAR) < FAR
    yield ("mask", FaultKind.EMPTY, Where.BATCH, 1), _dies_of_nothing(found)


def _place(inputs: LossInputs, value: float) -> tuple[str, int, int] | None:
    """Return which number of the batch this is: none stands there twice."""
    for field in FIELDS:
        found = (getattr(inputs, field).detach() == value).nonzero()
        if len(found):
            return field, int(found[0, 0]), int(found[0, 1])
    return None


def _dies_of_nothing(found: Check) -> bool:
    """Is a mask told of that selects nothing?"""
    return any(
        hazard.trigger.role == "mask" and hazard.trigger.value == 0 and "all of " in hazard.trigger.words for hazard in found.hazards
    )
