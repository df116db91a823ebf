"""What `check` finds: ways in which a step that is healthy would not have been, each with the numbers that were put in, and executed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from nanscope.causes import Cause
from nanscope.errors import one_line
from nanscope.foresight.pushes import Severity
from nanscope.plain import show
from nanscope.shown import Shown
from nanscope.snapshot.observation import Origin
from nanscope.text import count, line_in
from nanscope.verdict.incident import Fix

if TYPE_CHECKING:
    import pandas


NEARER = 0.9  # of the distance in another dtype: what is not nearer than that is no news


@dataclass(frozen=True, slots=True)
class Spoils:
    """What a trigger does: is the loss not finite, and gradients of what the loss counts, and of what it does not? Where the loss stays
    finite, nobody who looks at it is told."""

    loss: bool
    counted: bool
    masked: bool

    @property
    def silent(self) -> bool:
        """Does the loss look as if nothing had happened?"""
        return not self.loss

    @property
    def words(self) -> str:
        """In words."""
        whose = "of tokens that count" if self.counted else "of masked tokens"
        if self.silent:
            return f"the gradient {whose} is not finite, and the loss looks as if nothing had happened"
        return f"the loss and the gradient {whose} are not finite" if self.counted or self.masked else "the loss is not finite"


@dataclass(frozen=True, slots=True)
class Trigger:
    """What was put into the step. tensor, role: where. masked: at a token that the loss does not count, None where nothing selects.
    value: what stood there then; recorded: what stands there in the step. distance: between the two, None where that is no number.
    words: all of it in words."""

    tensor: str
    role: str | None
    masked: bool | None
    kind: str
    value: float
    recorded: float
    distance: float | None
    words: str


@dataclass(frozen=True, slots=True)
class Hazard:
    """A line that would kill the run.

    origin: where the harm would be born, with the numbers of the trigger. cause, sentence: as of an incident. fix: the best edit, executed
    on the triggered step, None if none is known. change: what that edit does to the gradient of the step as it was recorded, relative to
    its largest element; None where it was not measured. dtype: in which it happens. others: further triggers of the same, in words.
    headroom: what the steps before had left, and where that was going, in words, "" where they do not tell.
    """

    severity: Severity
    origin: Origin
    phase: str
    cause: Cause
    trigger: Trigger
    spoils: Spoils
    sentence: str
    fix: Fix | None
    change: float | None
    dtype: str
    others: tuple[str, ...] = ()
    headroom: str = ""

    def is_told_by(self, other: Hazard) -> bool:
        """Does another hazard say the same: this line, this reason, and a trigger that is not much farther?"""
        one, two = ((hazard.place, hazard.origin.op, hazard.cause, hazard.trigger.masked) for hazard in (self, other))
        here, there = self.trigger.distance, other.trigger.distance
        return one == two and (here is None or there is None or here > NEARER * there)

    @property
    def place(self) -> tuple[str, int]:
        """File and line, ("", 0) where neither is known."""
        return self.origin.file or "", self.origin.line or 0

    @property
    def line(self) -> str:
        """What stands in that line, or else what is known of it."""
        origin = self.origin
        source = dict(origin.source).get(origin.line or -1, "").strip()
        return source or origin.expression or origin.variable or self.trigger.tensor

    @property
    def where(self) -> str:
        """The line as it is said: "loss.py:206", "" where it is not known."""
        return line_in(self.origin.file, self.origin.line) if self.origin.file else ""

    @property
    def words(self) -> str:
        """All that matters, in one line."""
        fix = f"; fix: {self.fix.label}" if self.fix is not None and self.fix.works else ""
        return f"{', '.join(filter(None, (self.line, self.where)))}: {self.trigger.words}: {self.spoils.words}{fix}"


@dataclass(frozen=True, slots=True)
class Safeguard:
    """What in the code keeps a hazard from being one. op, expression, file, line: of the guard. stops: the operator that would die without
    it, "" where it holds back what came in bad; edge, edge_line: where that stands. trigger: at which that was seen, in words; severity:
    who could do that."""

    op: str
    expression: str
    file: str
    line: int
    stops: str
    edge: str
    edge_line: int
    trigger: str
    severity: Severity

    @property
    def where(self) -> str:
        """The line as it is said, "" where it is not known."""
        return line_in(self.file, self.line) if self.file else ""

    @property
    def words(self) -> str:
        """What it does, in words."""
        dies = f"{self.edge}{f' in line {self.edge_line}' if self.edge_line else ''} dies" if self.stops else "the loss takes it in"
        return f"without it {dies}: {self.trigger}"


@dataclass(frozen=True, slots=True, repr=False)
class Check(Shown):
    """The hazards of one step, worst first.

    runs: how often it was run. healed: what was made ordinary first. places: where it could be pushed, left: of these not tried, since the
    runs had come to their limit. guards: what keeps further hazards away. fixed: what the recording has settled, so that it was not tried.
    """

    hazards: tuple[Hazard, ...]
    step: int
    runs: int
    healed: tuple[str, ...] = ()
    places: int = 0
    left: int = 0
    guards: tuple[Safeguard, ...] = ()
    fixed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return one_line(self.sentence)

    @property
    def complete(self) -> bool:
        """Was everything tried that could be? Where nothing could, that is no answer."""
        return not self.left and self.runs > 0

    @property
    def reachable(self) -> tuple[Hazard, ...]:
        """Those that training can reach with nothing broken."""
        return tuple(hazard for hazard in self.hazards if hazard.severity is Severity.REACHABLE)

    @property
    def nearest(self) -> Hazard | None:
        """Of those the one that it takes the smallest shift to, in the units of what is shifted; None if it takes none."""
        shifted = [hazard for hazard in self.reachable if hazard.trigger.distance is not None]
        return min(shifted, key=lambda hazard: hazard.trigger.distance or 0.0, default=None)

    def only(self, severities: Collection[Severity]) -> Check:
        """Return the check with the hazards of some severities."""
        return replace(self, hazards=tuple(hazard for hazard in self.hazards if hazard.severity in severities))

    @property
    def sentence(self) -> str:
        """What there is, in one line."""
        if not self.runs:
            return "Nothing could be tried: no tensor that comes in has numbers that are larger or smaller than others."
        cut = "" if self.complete else f" Not complete: {self.left} of {count(self.places, 'place')} were left when its runs were used up."
        if not self.hazards:
            return f"No hazard found in {count(self.runs, 'run')} of the step.{cut}"
        return f"{count(len(self.hazards), 'hazard')}, {len(self.reachable)} of them {Severity.REACHABLE.words}.{cut}"

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON data."""
        data: dict[str, Any] = show(
            {
                "step": self.step,
                "runs": self.runs,
                "complete": self.complete,
                "places": self.places,
                "left": self.left,
                "healed": list(self.healed),
                "fixed": list(self.fixed),
                "guards": [{**asdict(guard), "severity": guard.severity.name.lower()} for guard in self.guards],
                "hazards": [
                    {
                        "severity": hazard.severity.name.lower(),
                        "cause": str(hazard.cause),
                        "phase": hazard.phase,
                        "origin": hazard.origin.to_json(),
                        "trigger": asdict(hazard.trigger),
                        "spoils": {"loss": hazard.spoils.loss, "counted": hazard.spoils.counted, "masked": hazard.spoils.masked},
                        "silent": hazard.spoils.silent,
                        "sentence": hazard.sentence,
                        "fix": None if hazard.fix is None else asdict(hazard.fix),
                        "change": hazard.change,
                        "dtype": hazard.dtype,
                        "others": list(hazard.others),
                        "headroom": hazard.headroom,
                    }
                    for hazard in self.hazards
                ],
            }
        )
        return data

    def frame(self) -> pandas.DataFrame:
        """Return the hazards as a pandas frame, worst first: one row each, of numbers and text; the columns are those of `COLUMNS`."""
        import pandas

        return pandas.DataFrame([[of(hazard) for of in COLUMNS.values()] for hazard in self.hazards], columns=list(COLUMNS))


COLUMNS: dict[str, Callable[[Hazard], object]] = {  # of the frame
    "severity": lambda hazard: hazard.severity.name.lower(),
    "cause": lambda hazard: str(hazard.cause),
    "phase": lambda hazard: str(hazard.phase),
    "op": lambda hazard: hazard.origin.op,
    "code": lambda hazard: hazard.line,
    "file": lambda hazard: hazard.origin.file or "",
    "line": lambda hazard: hazard.origin.line,
    "dtype": lambda hazard: hazard.dtype,
    "tensor": lambda hazard: hazard.trigger.tensor,
    "role": lambda hazard: hazard.trigger.role or "",
    "masked": lambda hazard: hazard.trigger.masked,  # None where nothing selects
    "trigger": lambda hazard: hazard.trigger.kind,
    "value": lambda hazard: hazard.trigger.value,  # that was put in
    "recorded": lambda hazard: hazard.trigger.recorded,  # that stands in the step
    "distance": lambda hazard: hazard.trigger.distance,  # between the two, in the units of the tensor
    "spoils_loss": lambda hazard: hazard.spoils.loss,
    "spoils_counted": lambda hazard: hazard.spoils.counted,
    "spoils_masked": lambda hazard: hazard.spoils.masked,
    "silent": lambda hazard: hazard.spoils.silent,
    "fix": lambda hazard: "" if hazard.fix is None else hazard.fix.label,
    "works": lambda hazard: None if hazard.fix is None else hazard.fix.works,
    "change": lambda hazard: hazard.change,  # of the step's gradient by the fix, relative to its largest element
    "headroom": lambda hazard: hazard.headroom,
    "sentence": lambda hazard: hazard.sentence,
}
