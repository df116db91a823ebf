"""What a run came to, as plain data: the verdict, its incidents, the fixes that were tried."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from nanscope.causes import Cause
from nanscope.errors import Deliberate, one_line
from nanscope.locate.layout import Layout
from nanscope.plain import show
from nanscope.replay.reproduction import Reproduction
from nanscope.shown import Shown
from nanscope.snapshot.coverage import Gap, Status, gap_words
from nanscope.snapshot.history import Entry
from nanscope.snapshot.observation import Blame, Diff, Link, Origin, Row
from nanscope.snapshot.processes import called
from nanscope.snapshot.record import Aftermath
from nanscope.snapshot.step import place
from nanscope.text import count, is_spared
from nanscope.verdict.sample import BatchRow
from nanscope.verdict.standing import Ranks
from nanscope.verdict.token import Token
from nanscope.verdict.tokens import TokenMap


class NonFiniteError(Deliberate):
    """Raised into the training loop by `on_nonfinite="stop"`, after the snapshot is on disk.

    verdict: what was found (`Verdict`), snapshot: where the step was saved, None if it could not be written.
    """

    def __init__(self, message: str, *, verdict: Verdict, snapshot: str | None) -> None:
        super().__init__(message, slug="nonfinite-step")
        self.verdict = verdict
        self.snapshot = snapshot


# notes of a run without incident
TOLD = ("nothing_trained", "no_gradient", "scaler_skipped", "infinite_weight", "infinite_state", "overflow_skipped", "nonfinite_absorbed")


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a word that is no incident. slug: its kind."""

    slug: str
    text: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that was tried on the recorded step, or, with executed=False, that can only be advised.

    id: class of the fix. where: file:line. label: the edit. loss, bad gradients, distortion: see `replay.Row`. diffs: what it is in the
    source, () where that cannot be written; rest: what it does besides, in words, at places of which it cannot. cost: see `replay.Row`.
    """

    id: str
    label: str
    where: str | None
    executed: bool
    works: bool | None
    loss: float | None = None
    bad: int = 0
    total: int = 0
    distortion: float | None = None
    diffs: tuple[Diff, ...] = ()
    rest: tuple[str, ...] = ()
    cost: str = ""

    @property
    def proven(self) -> bool:
        """Was it seen to work, and to leave the healthy elements alone, and at no other cost?"""
        return bool(self.works) and is_spared(self.distortion) and not self.cost


@dataclass(frozen=True, slots=True, repr=False)
class Incident(Shown):
    """One bad step, explained."""

    step: int
    rank: int
    phase: str
    cause: Cause
    headline: str
    sentence: str
    origin: Origin
    chain: tuple[Link, ...]
    loss: float | None
    reached: dict[str, Any]
    fixes: tuple[Fix, ...]
    rejected: tuple[Fix, ...]
    framework: str | None
    remedies: tuple[str, ...]
    notes: tuple[Note, ...]
    snapshot: str | None
    rows: tuple[Row, ...]
    reproduction: Reproduction
    suspect: bool
    history: tuple[Entry, ...]
    environment: dict[str, Any]
    settings: dict[str, Any]
    opaque: tuple[str, ...]
    picture: Picture | None = None
    tokens: TokenMap | None = None
    lines: tuple[tuple[str, tuple[tuple[int, str], ...]], ...] = ()  # of the source that the chain goes through: file, (number, text)
    objective: dict[str, Any] = field(default_factory=dict)
    loss_words: str = ""  # the objective in one line
    consequence_of: int | None = None  # the earlier step that had spoilt the weights
    update: int = 1  # which one of the steps of this number
    micro_batch: int = 1  # which backward pass of the step
    micro_batches: int | None = None
    blame: Blame | None = None  # what came in, far out of its own range, and made the origin overflow
    worker: str = ""  # what its process is called where that is not a rank alone
    token: Token | None = None  # at the origin, where its id was saved
    sample: BatchRow | None = None  # which one of the batch it belongs to

    def __str__(self) -> str:
        return one_line(self.sentence)

    @property
    def process(self) -> str:
        """What a person calls its process."""
        return called(self.rank, self.worker)

    @property
    def place(self) -> str:
        """Which backward pass of which step, in words."""
        return place(self.step, self.update, self.micro_batch, self.micro_batches)

    @property
    def reproduces(self) -> bool | None:
        """Did the recorded loss come out again, bit for bit or but for rounding? None if there was nothing to compare with."""
        return self.reproduction.holds


@dataclass(frozen=True, slots=True)
class Picture:
    """The offending tensor as a map of rows and tokens, cut to a readable size.

    values: [rows][columns], None outside the tensor. masked: the same, True where the loss does not count. row, column: the bad element
    within the cut. first_row, first_column: where the cut begins. rows, columns: size of the whole. what: what is shown. layout: how it
    lies in the batch.
    """

    what: str
    values: tuple[tuple[float, ...], ...]
    masked: tuple[tuple[bool, ...], ...] | None
    row: int
    column: int
    first_row: int
    first_column: int
    rows: int
    columns: int
    layout: Layout = Layout.TOKENS


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Shown):
    """What one run came to. incidents: the first harmful one first. backwards: backward passes that were watched. gaps: what was not.
    aftermath: the consequences of incidents, saved or not. ranks: of several, who was first and who followed. processes: that trained.
    history: the last steps of the first of them. rank: of several the one that this is of, whatever became of the others.
    """

    incidents: tuple[Incident, ...]
    notes: tuple[Note, ...] = ()
    steps: int = 0
    skipped: int = 0
    bad_steps: int = 0
    version: str = field(default="")
    backwards: int = 0
    gaps: tuple[Gap, ...] = ()
    aftermath: tuple[Aftermath, ...] = ()
    ranks: Ranks | None = None
    processes: int = 1
    repaired: int = 0  # backward passes
    history: tuple[Entry, ...] = field(default=(), compare=False)
    rank: int | None = None

    def __str__(self) -> str:
        return one_line(self.sentence)

    @property
    def healthy(self) -> bool:
        """The run was watched, all of it, and nothing harmful was seen."""
        return self.status is Status.HEALTHY

    @property
    def causes(self) -> tuple[Incident, ...]:
        """The incidents without those that only follow from an earlier one; all of them where that one is not there."""
        return tuple(incident for incident in self.incidents if incident.consequence_of is None) or self.incidents

    @property
    def status(self) -> Status:
        """What was found; without an incident, how much of the run was watched."""
        if self.incidents:
            return Status.SUSPECT if all(incident.suspect for incident in self.incidents) else Status.NONFINITE
        if self.bad_steps:
            return Status.NONFINITE
        if not self.steps and not self.backwards:
            return Status.UNWATCHED
        return Status.PARTLY if self.gaps else Status.HEALTHY

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.incidents:
            spread = self.ranks.sentence if self.ranks is not None else ""
            return " ".join(filter(None, (self.incidents[0].sentence, spread and f"{spread}.")))
        unseen = f"not seen: {gap_words(self.gaps)}" if self.gaps else ""
        if self.status is Status.UNWATCHED:
            why = unseen or "no backward pass and no optimizer step was seen here"
            return f"nothing was watched, so nothing can be said of this run: {why}"
        looked = count(self.steps, "step") if self.steps else count(self.backwards, "backward pass")
        looked += f" of {self.processes} processes" if self.processes > 1 else "" if self.rank is None else f" of rank {self.rank}"
        if self.bad_steps:  # the disk was full, or somebody took the files away
            return "; ".join(filter(None, [f"{looked} watched, {self.bad_steps} bad, and nothing of that was kept", unseen]))
        told = {slug: [note.text for note in self.notes if note.slug == slug][:1] for slug in TOLD}
        fine = "no non-finite loss or gradient" if told["infinite_weight"] else "no non-finite loss, gradient or weight"
        fine = "no non-finite loss or weight" if told["nothing_trained"] or told["scaler_skipped"] else fine
        fine = "no non-finite weight" if told["overflow_skipped"] else fine
        return "; ".join(filter(None, [f"{looked} watched, {fine}", unseen, *(text for slug in TOLD for text in told[slug])]))

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON data; non-finite numbers are text."""
        return {
            "schema": 1,
            "nanscope": self.version,
            "status": str(self.status),
            "sentence": self.sentence,
            "steps": self.steps,
            "backwards": self.backwards,
            "bad_steps": self.bad_steps,
            "skipped": self.skipped,
            **({"repaired": self.repaired} if self.repaired else {}),
            **({"processes": self.processes} if self.processes > 1 else {}),
            "incidents": [_incident_json(incident) for incident in self.incidents],
            "consequences": [asdict(found) for found in self.aftermath],
            "notes": [_note_json(note) for note in self.notes],
            "gaps": [asdict(gap) for gap in self.gaps],
            "ranks": self.ranks and self.ranks.to_json(),
        }


def _fix_json(fix: Fix) -> dict[str, Any]:
    return {
        "id": fix.id,
        "label": fix.label,
        "where": fix.where,
        "executed": fix.executed,
        "works": fix.works,
        "proven": fix.proven if fix.executed else None,
        "loss": show(fix.loss),
        "bad_gradients": [fix.bad, fix.total] if fix.executed else None,
        "distortion": show(fix.distortion),
        "diffs": [asdict(diff) for diff in fix.diffs],
        "rest": list(fix.rest),
        **({"cost": fix.cost} if fix.cost else {}),
    }


def _note_json(note: Note) -> dict[str, Any]:
    return {"slug": note.slug, "text": note.text, "step": note.step}


def _incident_json(i: Incident) -> dict[str, Any]:
    return {
        "step": i.step,
        "update": i.update,
        "micro_batch": i.micro_batch,
        "micro_batches": i.micro_batches,
        "rank": i.rank,
        **({"worker": i.worker} if i.worker else {}),
        "phase": i.phase,
        "cause": str(i.cause),
        "status": "suspect" if i.suspect else "non-finite",
        "headline": i.headline,
        "sentence": i.sentence,
        "origin": i.origin.to_json(),
        **({"token": asdict(i.token)} if i.token is not None else {}),
        **({"sample": asdict(i.sample)} if i.sample is not None else {}),
        "blame": i.blame and show(asdict(i.blame)),
        "chain": [
            {"text": link.text, "file": link.file, "line": link.line, "value": show(link.value), "backward": link.backward}
            for link in i.chain
        ],
        "loss": show(i.loss),
        "reached": i.reached,
        "fixes": [_fix_json(fix) for fix in i.fixes],
        "rejected": [_fix_json(fix) for fix in i.rejected],
        "framework": i.framework,
        "remedies": list(i.remedies),
        "notes": [_note_json(note) for note in i.notes],
        "snapshot": i.snapshot,
        "reproduces": i.reproduces,
        "reproduction": i.reproduction.to_json(),
        "consequence_of": i.consequence_of,
        "settings": i.settings,
        "objective": i.objective,
        "environment": i.environment,
    }
