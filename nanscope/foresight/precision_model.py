"""What is known of the precision of a step. Plain data; no tensor is in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nanscope.errors import one_line
from nanscope.foresight.precision_run import EXACT, Change
from nanscope.foresight.precision_sums import Cancelled, Summed
from nanscope.foresight.precision_tokens import Coarser, HeldLogProbs
from nanscope.plain import show
from nanscope.program.numbers import dtype_name
from nanscope.shown import Shown
from nanscope.text import MOST, number


@dataclass(frozen=True, slots=True)
class Rounds:
    """One call, and what its rounding costs; or two of the same that a minimum or maximum chooses between: where the clip is open they are
    alike, and so is their rounding, of which one half alone would decide.

    places: in the program. name: the variable it is bound to. local: ‖error‖ / ‖result‖ of its own rounding, forward.
    loss, norm: to first order, what that does to the loss, and to the gradient's norm, relative. alone: the step in float64 with the
    rounding of this call alone, forward and backward, executed; None where it was not run. wider: the recorded step with this call in
    `to`, executed.
    """

    places: tuple[int, ...]
    op: str
    name: str | None
    expression: str
    file: str
    line: int
    dtype: str
    local: float
    loss: float
    norm: float
    alone: Change | None = None
    to: str = ""
    wider: Change | None = None

    @property
    def where(self) -> str:
        """file:line, "" if unknown."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}" if self.file else ""

    @property
    def called(self) -> str:
        """What a person calls it: the variable, else the expression, else the operator."""
        return self.name or self.expression or self.op

    @property
    def size(self) -> float:
        """How much of the gradient it costs, as far as it is known."""
        return abs(self.norm) if self.alone is None else self.alone.gradient


@dataclass(frozen=True, slots=True, repr=False)
class Precision(Shown):
    """What is known of one step.

    loss, exact_loss: as recorded, and in float64. dtypes: of what the program computes, the most frequent first. norm: of the gradient in
    float64. recorded: how far the step is from float64. wide: the whole step in float32, where it was recorded in half precision.
    calls: those that round, the costliest of the gradient first; left_out: how many more were not run. decided, of: elements at which the
    clip decides otherwise than in float64, of how many. sums, differences: of these `call` is the place in the program; names: what a
    person calls such a call.
    """

    step: int
    rank: int
    loss: float
    exact_loss: float
    dtypes: tuple[str, ...]
    norm: float
    recorded: Change
    wide: Change | None
    calls: tuple[Rounds, ...]
    left_out: int
    log_probs: tuple[HeldLogProbs, ...]
    decided: int | None
    of: int | None
    moved: tuple[Coarser, ...]
    sums: tuple[Summed, ...]
    differences: tuple[Cancelled, ...]
    names: Mapping[int, str]

    def __str__(self) -> str:
        return one_line(self.sentence)

    @property
    def harmful(self) -> bool:
        """Does rounding change the gradient by more than 1 % of its length?"""
        return not self.recorded.gradient <= MOST

    @property
    def worst(self) -> Rounds | None:
        """The call that costs the gradient most, None where nothing is lost."""
        return next((call for call in self.calls if call.alone is not None and call.alone.gradient > 0), None)

    @property
    def worst_of_loss(self) -> Rounds | None:
        """The call that moves the loss most, None where none does."""
        known = [call for call in self.calls if call.alone is not None and call.alone.loss != 0]
        return max(known, key=lambda call: abs(call.alone.loss) if call.alone is not None else 0.0, default=None)

    @property
    def sentence(self) -> str:
        """What to take from it."""
        if self.dtypes == (dtype_name(EXACT),):
            return "The step was computed in float64: there is nothing to hold it against."
        if not self.recorded.finite:
            return f"As recorded the step is not finite, and in float64 it is: loss {number(self.exact_loss)}.{self._blamed()}"
        if not self.recorded.gradient:
            return "Rounding changes nothing: the gradient is that of float64, to the last bit of what was recorded."
        harm = "Rounding changes" if self.harmful else "Rounding does no harm here: it changes"
        said = f"{harm} the gradient by {share(self.recorded.gradient)} of its length, and the loss by {number(self.recorded.loss)}."
        return f"{said}{self._blamed()}{self._of_loss()}{self._clipped()}"

    def _blamed(self) -> str:
        if (worst := self.worst) is None or worst.alone is None:
            return ""
        where = f", {worst.where}" if worst.where else ""
        cost = f"alone it costs {share(worst.alone.gradient)}" if worst.alone.finite else "alone it makes the step non-finite"
        back = ""
        if worst.wider is not None:
            rest = f"{share(worst.wider.gradient)} left" if worst.wider.finite else "a step that is not finite either"
            back = f"; {worst.to} there leaves {rest}".replace("leaves a step", "gives a step").replace(" left", "")
        return f" Most is lost in {worst.called} ({worst.op}, {worst.dtype}{where}): {cost}{back}."

    def _of_loss(self) -> str:
        most = self.worst_of_loss
        if most is None or most.alone is None or most is self.worst or not self.harmful:
            return ""
        return f" The loss moves most in {most.called} ({most.op}): by {number(most.alone.loss)}."

    def _clipped(self) -> str:
        if not self.of:
            return ""
        return f" The clip decides {'the same everywhere' if not self.decided else f'differently at {self.decided} of {self.of}'}."

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        told = {"sentence": self.sentence, "harmful": self.harmful}
        found: dict[str, Any] = show({"schema": 1, **asdict(replace(self, names={})), **told})
        del found["names"]
        for row in (*found["sums"], *found["differences"]):
            row["name"] = self.names[row["call"]]
        return found


def share(part: float) -> str:
    """Return a part of a whole as people write it: "2.1 %", "3e-05 %"."""
    return "infinitely much" if not math.isfinite(part) else f"{100 * part:.2g} %"
