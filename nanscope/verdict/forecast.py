"""What is about to happen, and what would come of it: said before, with the fix that was executed.

ref_log_ratio at masked tokens gains 1.6 nats a step: at this pace exp overflows in about 12 steps (grpo_loss, line 206); the loss would
be NaN, since a masked token overflows, and the mask multiplies inf by 0; fix: fill ref_log_ratio with 0 where completion_mask …
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from nanscope.causes import CAUSES, Cause
from nanscope.plain import show
from nanscope.replay.driven import driven
from nanscope.replay.tries import replay
from nanscope.snapshot.observation import UNSEEN, Row
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.snapshot.trend import Approach
from nanscope.text import number
from nanscope.verdict.diagnose import diagnose
from nanscope.verdict.incident import Fix, Incident


@dataclass(frozen=True, slots=True)
class Runaway:
    """A gauge that runs to its edge. name: of what is read. masked: at tokens that the loss does not count, None where nobody knows.

    value, edge: in `unit`. end: what happens at the edge, in words. place: "function, line n", "" where no line is known; file, line.
    """

    name: str
    masked: bool | None
    value: float
    edge: float
    unit: str
    end: str
    place: str = ""
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Something that is about to go wrong, as `on_warning` is given it.

    step: at which it was said. harm: what would come of it, executed on that step, "" where that cannot be. fix: the best that was tried
    there, None if none was or none works. incident: what would be told of it. snapshot: path of the step, None if it is not on disk.
    """

    step: int
    runaway: Runaway
    approach: Approach
    harm: str = ""
    fix: Fix | None = None
    incident: Incident | None = None
    snapshot: str | None = None

    @property
    def steps(self) -> int:
        """In about how many steps, at this pace; at least 1."""
        return max(1, round(self.approach.steps))

    @property
    def short(self) -> str:
        """What runs where, in a few words."""
        what, pace = self.runaway, self.approach
        where = {True: " at masked tokens", False: " at counted tokens", None: ""}[what.masked]
        unit = what.unit if math.isclose(abs(pace.slope), 1.0) else f"{what.unit}s"
        gains = "gains" if pace.slope > 0 else "loses"
        soon = "step" if self.steps == 1 else "steps"
        return f"{what.name}{where} {gains} {number(abs(pace.slope))} {unit} a step: at this pace {what.end} in about {self.steps} {soon}"

    @property
    def sentence(self) -> str:
        """The warning in one line."""
        parts = [self.short + (f" ({self.runaway.place})" if self.runaway.place else ""), self.harm]
        parts += [f"fix: {self.fix.label}"] if self.fix is not None else []
        return "; ".join(part for part in parts if part)

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as JSON data."""
        what, pace = self.runaway, self.approach
        return {
            "step": self.step,
            "name": what.name,
            "masked": what.masked,
            "value": show(what.value),
            "edge": show(what.edge),
            "unit": what.unit,
            "file": what.file,
            "line": what.line or None,
            "slope": show(pace.slope),
            "steps": [show(one) for one in (pace.soonest, pace.steps, pace.latest)],
            "harm": self.harm,
            "fix": self.fix and {"id": self.fix.id, "label": self.fix.label, "distortion": show(self.fix.distortion)},
            "snapshot": self.snapshot,
            "sentence": self.sentence,
        }


def foresee(snapshot: Snapshot, value: int, like: Tensor, flat: int, edge: float) -> Incident | None:
    """Drive one element of a recorded step over an edge, run it, and return what would be told of that; None if it would do no harm.

    value: id of what is driven. like: what it holds in the step, flat: which element of it.
    Raises ProgramError if the step cannot be run.
    """
    by = edge + 1.0 - float(like.detach().flatten()[flat])
    program, tensors = driven(snapshot.program, snapshot.tensors, value, like, flat, by)
    moved = replace(snapshot, program=program, tensors=tensors, grads={}, loss=None, observation=UNSEEN, notes=(), asked=False)
    replayed = replay(moved)
    if replayed.location is None:
        return None
    recorded = next((row for row in replayed.rows if row.kind == "recorded"), None)
    reached = Reached() if recorded is None else Reached(recorded.loss, recorded.total, recorded.bad)
    return diagnose(replace(moved, reached=reached), replayed=replayed)


def harm_of(incident: Incident) -> str:
    """Return what would come of it: "the loss would be NaN, since a masked token overflows, and the mask multiplies inf by 0"."""
    loss = incident.loss
    if loss is not None and not math.isfinite(loss):
        what = f"the loss would be {'NaN' if math.isnan(loss) else 'infinite'}"
    else:
        what = f"the loss would stay finite and {_gradients(incident.rows)}"
    return f"{what}, since {CAUSES[incident.cause].title}" if incident.cause is not Cause.UNKNOWN else what


def _gradients(rows: Sequence[Row]) -> str:
    recorded = next((row for row in rows if row.kind == "recorded"), None)
    some = recorded is not None and 0 < recorded.bad < recorded.total
    return f"{recorded.bad} of {recorded.total} gradients be NaN" if some and recorded is not None else "the gradient be NaN"


def best_fix(incident: Incident) -> Fix | None:
    """Return the best fix that was seen to work on it, None if none was."""
    return next((fix for fix in incident.fixes if fix.executed and fix.works), None)
