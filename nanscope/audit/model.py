"""What an audit is made of: findings, the figures of each micro-batch and of each reduction. Plain data; no tensor is in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from nanscope.audit.weights import Scheme
from nanscope.errors import one_line
from nanscope.objective.reduction import Guard
from nanscope.plain import frame, show
from nanscope.shown import Shown
from nanscope.text import count, number

if TYPE_CHECKING:
    import pandas


class Effect(StrEnum):
    """What a finding means for the loss of this step."""

    CHANGES = "changes the loss"
    RISK = "could change it"
    NOTE = "explains it"


class Sure(StrEnum):
    """Where a finding comes from."""

    MEASURED = "measured on this batch"
    SETTINGS = "told by the settings"
    GUESSED = "fits the numbers, and so does another explanation"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know. sentence: plain, with the numbers of this batch. figures: the same numbers by name."""

    slug: str
    effect: Effect
    sentence: str
    sure: Sure = Sure.MEASURED
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartFigures:
    """One micro-batch. token_mean: of its loss. loss: as recorded, or as its reduction gives it; None if unknown."""

    source: str
    rank: int
    rows: int
    empty_rows: int
    tokens: int
    token_mean: float | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class Reduced:
    """The step under one reduction.

    averaged: over each micro-batch by itself, then the mean over micro-batches and ranks. whole: over the step in one piece.
    factor:   averaged, in token means; None where one of them is 0. row_weight: averaged, a token of the shortest row against the longest.
    adds_up:  the two give every token the same weight. adds_up_if: when they do in general. count: what to divide by to make them.
    uses:     losses of frameworks that reduce like this.
    """

    scheme: Scheme
    title: str
    averaged: float
    whole: float
    factor: float | None
    row_weight: float
    adds_up: bool
    adds_up_if: str
    count: str
    uses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Denominator:
    """What a framework's loss does with nothing valid, tried: are loss and gradient finite?

    guard, row_guard: of the count of all, and of the tokens of a row.
    """

    key: str
    guard: Guard
    row_guard: Guard
    empty_row: bool
    empty_batch: bool


@dataclass(frozen=True, slots=True, repr=False)
class Audit(Shown):
    """What is known of one step.

    step: None for batches that came from no file. token_mean: of the loss over all valid tokens; None if there are none.
    reduction: what the loss is, in words; None if nothing told. used: the schemes it is. loss: of the whole step, as it was reduced.
    recorded: the loss in the file, of a single one. left_out: valid tokens without a finite loss; they count as tokens, with 0.
    denominators: what the losses of all frameworks do, where a denominator is a finding.
    """

    step: int | None
    ranks: int
    rows: int
    empty_rows: int
    tokens: int
    left_out: int
    token_mean: float | None
    reduction: str | None
    used: tuple[Scheme, ...]
    loss: float | None
    recorded: float | None
    parts: tuple[PartFigures, ...]
    reductions: tuple[Reduced, ...]
    denominators: tuple[Denominator, ...]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return one_line(self.sentence)

    @property
    def sentence(self) -> str:
        """What the loss is, and whether that is all there is to say."""
        value = self.recorded if self.loss is None else self.loss
        is_it = f"the loss is {self.reduction}" if self.reduction else "which reduction the loss had is not known"
        is_it += f": {number(value)}" if value is not None else ""
        if value is not None and self.recorded is not None and number(self.recorded) != number(value):
            is_it += f" (recorded {number(self.recorded)})"
        changing = sum(finding.effect is Effect.CHANGES for finding in self.findings)
        if changing:
            return f"{is_it}; {count(changing, 'finding')} {'changes' if changing == 1 else 'change'} it"
        if any(finding.effect is Effect.RISK for finding in self.findings):
            return f"{is_it}; nothing changes it on this batch"
        if not self.used:
            return is_it
        unit = "token" if Scheme.ROW_MEAN not in self.used or Scheme.TOKEN_MEAN in self.used else "row"
        return f"{is_it}; nothing changes it, and every {unit} weighs the same"

    @property
    def changes_loss(self) -> bool:
        """Does a finding change the loss of this step?"""
        return any(finding.effect is Effect.CHANGES for finding in self.findings)

    def frame(self) -> pandas.DataFrame:
        """Return the findings as a pandas frame, indexed by their slugs: the fields of `Finding`, effect and sure in words."""
        found = frame(Finding, self.findings)
        return found.assign(effect=found["effect"].map(str), sure=found["sure"].map(str))

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        found: dict[str, Any] = show(asdict(self))
        return found
