"""From observations to a verdict: what happened, why, how far it got, and which fix was seen to work.

    step 412 · backward: coef_1 = torch.exp(log_importance_weights) overflowed at [2, 27] …

`case` says what is known, `rules` name the cause, `replay` tries the fixes, `words` tell it; here it becomes one verdict, so that every
report tells the same story.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nanscope.case import EXPS, NO_STORY, Case, Link, Place, Story, operand_name, place_json
from nanscope.causes import ADVICE, CAUSES, Cause
from nanscope.errors import ProgramError, SnapshotError
from nanscope.frameworks import Framework, recognise
from nanscope.frameworks.live import objective_words
from nanscope.ledger import Entry, checked, show
from nanscope.locate import Location, Phase
from nanscope.program import Program, Run
from nanscope.replay import Replay, Row, replay
from nanscope.roles import last_word
from nanscope.rules import cause_of
from nanscope.snapshot import Snapshot
from nanscope.words import headline, sentence


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a word that is no incident. slug: its kind."""

    slug: str
    text: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that was tried on the recorded step, or, with executed=False, that can only be advised.

    id: class of the fix. where: file:line. label: the edit. loss, bad gradients, distortion: see `replay.Row`.
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


@dataclass(frozen=True, slots=True)
class Incident:
    """One bad step, explained."""

    step: int
    rank: int
    phase: str
    cause: Cause
    headline: str
    sentence: str
    origin: Place
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
    reproduces: bool | None
    suspect: bool
    history: tuple[Entry, ...]
    environment: dict[str, Any]
    settings: dict[str, Any]
    opaque: tuple[str, ...]
    picture: Picture | None = None
    objective: dict[str, Any] = field(default_factory=dict)
    loss_words: str = ""  # the objective in one line


@dataclass(frozen=True, slots=True)
class Picture:
    """The offending tensor as a map of rows and tokens, cut to a readable size.

    values: [rows][columns], None outside the tensor. masked: the same, True where the loss does not count. row, column: the bad element
    within the cut. first_row, first_column: where the cut begins. rows, columns: size of the whole. what: what is shown.
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run came to. incidents: the first harmful one first."""

    incidents: tuple[Incident, ...]
    notes: tuple[Note, ...] = ()
    steps: int = 0
    skipped: int = 0
    bad_steps: int = 0
    version: str = field(default="")

    @property
    def healthy(self) -> bool:
        """Nothing harmful was seen."""
        return not self.incidents

    @property
    def status(self) -> str:
        """ "healthy", "non-finite", or "suspect" where everything stayed finite and a step was ruined all the same."""
        if self.healthy:
            return "healthy"
        return "suspect" if all(incident.suspect for incident in self.incidents) else "non-finite"

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.incidents:
            return self.incidents[0].sentence
        words = f"{self.steps} step{'' if self.steps == 1 else 's'} watched, no non-finite loss, gradient or weight"
        absorbed = [note for note in self.notes if note.slug == "nonfinite_absorbed"]
        return f"{words}; {absorbed[0].text}" if absorbed else words

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON data; non-finite numbers are text."""
        return {
            "schema": 1,
            "nanscope": self.version,
            "status": self.status,
            "sentence": self.sentence,
            "steps": self.steps,
            "bad_steps": self.bad_steps,
            "skipped": self.skipped,
            "incidents": [_incident_json(incident) for incident in self.incidents],
            "notes": [_note_json(note) for note in self.notes],
        }


def verdict(
    snapshots: Sequence[Snapshot],
    paths: Sequence[str | None] = (),
    *,
    notes: Sequence[Note] = (),
    steps: int = 0,
    skipped: int = 0,
    bad_steps: int = 0,
) -> Verdict:
    """Diagnose the snapshots of one run, in order.

    paths: where each was saved. notes: what else the run noticed. steps, skipped, bad_steps: its counts.
    """
    from nanscope import __version__

    incidents: list[Incident] = []
    poisoned: int | None = None
    numbered = [(snapshot, paths[index] if index < len(paths) else None) for index, snapshot in enumerate(snapshots)]
    # Of one step, the rank that made the harm comes before those that it reached.
    for snapshot, path in sorted(numbered, key=lambda pair: (pair[0].step, bool(pair[0].observed.get("allreduce")), pair[0].rank)):
        source = next((i for i in incidents if i.step == snapshot.step and i.rank != snapshot.rank), None)
        story = Story(poisoned, f"rank {source.rank}: {source.sentence}" if source is not None else "")
        incidents.append(diagnose(snapshot, path, story=story))
        if poisoned is None and snapshot.reached.bad_weights:
            poisoned = snapshot.step
    everything = [*notes, *(note for incident in incidents for note in incident.notes)]
    bad_steps = max(bad_steps, len({incident.step for incident in incidents}))
    return Verdict(tuple(incidents), tuple(dict.fromkeys(everything)), steps, skipped, bad_steps, __version__)


def examine(snapshot: Snapshot, replayed: Replay | None = None, *, story: Story = NO_STORY) -> tuple[Case, Replay, str]:
    """Return what is known of a snapshot's origin, its replay, and why it could not be replayed ("" if it could)."""
    problem = ""
    if replayed is None:
        try:
            replayed = replay(snapshot)
        except ProgramError as error:
            replayed, problem = Replay((), None, None, None, None), str(error)
    location, seen = replayed.location, snapshot.observed
    if location is not None and replayed.run is not None and not seen.get("outside"):
        case = Case.of(location, snapshot.program, replayed.run)
    else:
        # The origin lies outside the file's program (in the model, in a clip): told as it was seen.
        try:
            case = Case.observed(snapshot, seen.get("location") or {})
            if seen.get("rows"):
                replayed = replace(replayed, rows=tuple(_row_from_json(row) for row in seen["rows"]))
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise SnapshotError(f"what was observed in step {snapshot.step} is not readable ({error})", slug="snapshot-damaged") from None
    return case.with_seen(seen, story), replayed, problem


def diagnose(snapshot: Snapshot, path: str | None = None, replayed: Replay | None = None, *, story: Story = NO_STORY) -> Incident:
    """Explain one snapshot.

    replayed: a replay that was already run, to save a second one. story: what earlier steps and other ranks have to do with it.
    """
    case, replayed, problem = examine(snapshot, replayed, story=story)
    if problem:
        snapshot = replace(snapshot, notes=(*snapshot.notes, ("not_replayed", problem)))
    location, seen = replayed.location, snapshot.observed
    cause = cause_of(case)
    framework = recognise({site.file for site in snapshot.program.sites} | {f"/{snapshot.objective.get('site', '')}"})
    fixes, rejected = _fixes(case, cause, replayed.rows)
    phase = str(case.phase)
    reached = {
        "loss": snapshot.reached.loss is not None and not math.isfinite(snapshot.reached.loss),
        "gradients": [snapshot.reached.bad_gradients, snapshot.reached.gradients],
        "weights": [snapshot.reached.bad_weights, snapshot.reached.weights],
        "stepped": snapshot.reached.stepped,
    }
    found = [Note(slug, text, snapshot.step) for slug, text in snapshot.notes]
    return Incident(
        step=snapshot.step,
        rank=snapshot.rank,
        phase=phase,
        cause=cause,
        headline=headline(snapshot, phase),
        sentence=sentence(snapshot, case, cause),
        origin=case.place,
        chain=case.chain,
        loss=snapshot.reached.loss,
        reached=reached,
        fixes=fixes,
        rejected=rejected,
        framework=framework.name if framework else None,
        remedies=_remedies(framework, cause),
        notes=tuple(found),
        snapshot=path,
        rows=replayed.rows,
        reproduces=replayed.reproduces,
        suspect=case.facts.suspect,
        history=snapshot.history,
        environment=snapshot.environment,
        settings=snapshot.settings,
        opaque=snapshot.opaque,
        picture=_picture(snapshot.program, location, replayed.run)
        if location is not None and replayed.run is not None and not seen.get("outside")
        else None,
        objective=snapshot.objective,
        loss_words=objective_words(snapshot.objective),
    )


# -- fixes ---------------------------------------------------------------------------------------------------------------------------------


def _fixes(case: Case, cause: Cause, rows: Sequence[Row]) -> tuple[tuple[Fix, ...], tuple[Fix, ...]]:
    """Return the fixes that work, best first, and what was tried and does not."""
    where = f"{Path(case.place.file).name}:{case.place.line}" if case.place.file and case.place.line else None
    wanted = CAUSES[cause].fixes
    vocabulary = {"_log_softmax", "log_softmax"} & set(case.facts.ancestors) and not {"gather", "index"} & set(case.facts.ancestors)
    if cause is Cause.INF_MINUS_INF and (len(case.place.shape) > 2 or vocabulary):
        wanted = ("finite_mask_fill", "mask_before_op", "drop_invalid_sample")  # over a vocabulary there are no samples to drop
    if cause is Cause.LOG_ZERO and case.place.dtype in ("float16", "bfloat16"):
        wanted = ("stable_function", "upcast_fp32", "clamp_input")
    if case.facts.multiplied and "mask_before_op" not in wanted[:1]:
        wanted = ("mask_before_op", *wanted)
    if case.phase is Phase.OPTIMIZER and cause is Cause.EPS_UNDERFLOW:
        wanted = ("representable_eps", "upcast_fp32")  # eps is the setting that people can change
    natural = {name: position for position, name in enumerate(wanted)}
    tried = [_as_fix(row, where) for row in rows if row.kind in ("fix", "control", "asked") and (row.total or row.loss is not None)]
    working = [fix for fix in tried if fix.works and not fix.id.endswith("_after_op")]
    working.sort(key=lambda fix: (fix.id not in natural, _bucket(fix.distortion), natural.get(fix.id, 99)))
    advised = [
        Fix(name, ADVICE[name], where, False, None)
        for name in wanted
        if name not in {fix.id for fix in tried} and name in ("validate_config", "fix_upstream", "initialise_memory", "skip_bad_step")
    ]
    rejected = tuple(fix for fix in tried if not fix.works or fix.id.endswith("_after_op"))
    if not working and not advised:
        advised = [Fix(name, ADVICE[name], where, False, None) for name in wanted if name not in {fix.id for fix in rejected}]
    first = advised if cause is not Cause.ZERO_DENOMINATOR or case.facts.setting else []
    return (*first, *working, *(fix for fix in advised if fix not in first)), rejected


def _bucket(distortion: float | None) -> float:
    """Distortions below the noise of the dtype are the same."""
    if distortion is None:
        return 1.0
    return 0.0 if distortion < 1e-4 else distortion


def _as_fix(row: Row, where: str | None) -> Fix:
    return Fix(row.id, row.label, where, True, row.works, row.loss, row.bad, row.total, row.distortion)


def _remedies(framework: Framework | None, cause: Cause) -> tuple[str, ...]:
    """Return what helps in the framework's own words; where something does, also what it guards against already."""
    if framework is None:
        return ()
    helps = tuple(f"{r.setting}: {r.text}" if r.setting else r.text for r in framework.remedies if str(cause) in r.causes)
    return (*helps, *(f"has: {guard}" for guard in framework.guards)) if helps else ()


# -- JSON ----------------------------------------------------------------------------------------------------------------------------------


def rows_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows of a replay as JSON data."""
    return [{name: show(value) for name, value in asdict(row).items()} for row in rows]


def _row_from_json(data: dict[str, Any]) -> Row:
    return Row(**checked(Row, data))


def _fix_json(fix: Fix) -> dict[str, Any]:
    return {
        "id": fix.id,
        "label": fix.label,
        "where": fix.where,
        "executed": fix.executed,
        "works": fix.works,
        "loss": show(fix.loss),
        "bad_gradients": [fix.bad, fix.total] if fix.executed else None,
        "distortion": show(fix.distortion),
    }


def _note_json(note: Note) -> dict[str, Any]:
    return {"slug": note.slug, "text": note.text, "step": note.step}


def _incident_json(i: Incident) -> dict[str, Any]:
    return {
        "step": i.step,
        "rank": i.rank,
        "phase": i.phase,
        "cause": str(i.cause),
        "status": "suspect" if i.suspect else "non-finite",
        "headline": i.headline,
        "sentence": i.sentence,
        "origin": place_json(i.origin),
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
        "settings": i.settings,
        "objective": i.objective,
        "environment": i.environment,
    }


# -- the map -------------------------------------------------------------------------------------------------------------------------------


MAP_ROWS, MAP_COLUMNS = 24, 64


def _picture(program: Program, location: Location, run: Run) -> Picture | None:
    """Cut the offending tensor, or the exponent that made it, to a map around the bad element."""
    origin = location.origin
    shown, what = run.values[origin.value_id], origin.variable or origin.op
    if origin.op in EXPS and origin.operands:
        shown, what = run.values[origin.operands[0].id], operand_name(origin, 0)
    if shown.dim() == 0 or not shown.is_floating_point() or shown.shape != run.values[origin.value_id].shape:
        return None
    flat = shown.reshape(-1, shown.shape[-1]) if shown.dim() > 1 else shown.reshape(1, -1)
    row, column = divmod(origin.flat, flat.shape[1])
    top = max(0, min(row - MAP_ROWS // 2, flat.shape[0] - MAP_ROWS))
    left = max(0, min(column - MAP_COLUMNS // 2, flat.shape[1] - MAP_COLUMNS))
    window = flat[top : top + MAP_ROWS, left : left + MAP_COLUMNS]
    masked = None
    for drop in origin.drops:
        if drop.by is None or drop.how not in ("mask", "select"):
            continue
        mask = run.values[drop.by]
        try:
            whole = mask.expand(shown.shape).reshape(flat.shape)
        except RuntimeError:
            continue
        excluded = whole == whole[row, column]
        masked = tuple(tuple(bool(x) for x in line) for line in excluded[top : top + MAP_ROWS, left : left + MAP_COLUMNS].tolist())
        break
    values = tuple(tuple(float(x) for x in line) for line in window.double().tolist())
    return Picture(last_word(what), values, masked, row - top, column - left, top, left, flat.shape[0], flat.shape[1])
