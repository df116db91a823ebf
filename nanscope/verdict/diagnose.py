"""From observations to a verdict: what happened, why, how far it got, and which fix was seen to work.

    step 412 · backward: coef_1 = torch.exp(log_importance_weights) overflowed at [2, 27] …

The observation says what is known, `rules` name the cause, `replay` tries the fixes, `sentence` tells it; here it becomes one verdict,
so that every report tells the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nanscope.errors import ProgramError, SnapshotError, words_of
from nanscope.frameworks.live import objective_words
from nanscope.frameworks.table import recognise
from nanscope.locate.observe import observe
from nanscope.plain import ordered
from nanscope.program.program import Program
from nanscope.replay.folk import folk_rows
from nanscope.replay.tries import NOTHING, Replay, replay
from nanscope.roles import Role
from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.coverage import Gap
from nanscope.snapshot.file import load
from nanscope.snapshot.history import Entry
from nanscope.snapshot.observation import TEST, UNMADE, Kind, Observation, Phase, Row
from nanscope.snapshot.processes import called
from nanscope.snapshot.record import Aftermath
from nanscope.snapshot.step import Snapshot
from nanscope.text import number
from nanscope.verdict.because import because
from nanscope.verdict.fixes import fixes_of
from nanscope.verdict.incident import Incident, Note, Verdict
from nanscope.verdict.map import picture_of
from nanscope.verdict.remedies import known, remedies
from nanscope.verdict.remembered import Diagnosis, Memory
from nanscope.verdict.sample import sample_of
from nanscope.verdict.sentence import sentence, token_of
from nanscope.verdict.standing import Ranks
from nanscope.verdict.token import token_at_origin, with_texts
from nanscope.verdict.tokens import tokens_of
from nanscope.version import __version__


def verdict(
    snapshots: Sequence[Snapshot],
    paths: Sequence[str | None] = (),
    *,
    files: Sequence[Path | None] = (),
    notes: Sequence[Note] = (),
    steps: int = 0,
    skipped: int = 0,
    repaired: int = 0,
    bad_steps: int = 0,
    backwards: int = 0,
    gaps: Sequence[Gap] = (),
    aftermath: Sequence[Aftermath] = (),
    ranks: Ranks | None = None,
    incidents: Sequence[Incident] = (),
    processes: int = 1,
    history: Sequence[Entry] = (),
) -> Verdict:
    """Diagnose the snapshots of one run, in order.

    paths: where each was saved, as a person calls it. files: where it lies on this machine. notes: what else the run noticed. steps,
    skipped, repaired, bad_steps, backwards: its counts. gaps: what nobody saw. aftermath: which steps are consequences. ranks: who was
    first, and who followed. incidents: of snapshots that were explained before. processes: that trained. history: the last steps.
    """
    shown, lying = ([*given, *[None] * len(snapshots)] for given in (paths, files))
    numbered = sorted(zip(snapshots, lying, shown, strict=False), key=lambda one: _order(one[0]))
    incidents = [*incidents, *explained(Question(*one) for one in numbered)]
    everything = [*notes, *(note for incident in incidents for note in incident.notes)]
    bad_steps = max(bad_steps, len({(incident.step, incident.update) for incident in incidents}))
    return Verdict(
        tuple(incidents),
        tuple(dict.fromkeys(everything)),
        steps,
        skipped,
        bad_steps,
        __version__,
        backwards,
        tuple(gaps),
        tuple(aftermath),
        ranks,
        processes,
        repaired,
        tuple(history),
    )


@dataclass(frozen=True, slots=True)
class Question:
    """A step that is to be explained. held: as it is in memory, None if it is to be read where that is needed.

    file: where it lies on this machine, None if nowhere. shown: what a person calls that.
    """

    held: Snapshot | None = None
    file: Path | None = None
    shown: str | None = None

    def snapshot(self) -> Snapshot:
        """Return the step. Raises SnapshotError if it cannot be read."""
        if self.held is not None:
            return self.held
        assert self.file is not None
        return load(self.file)

    def head(self) -> BadStep:
        """Return the step in short. Raises SnapshotError if it cannot be read."""
        if self.held is not None:
            return BadStep.of_snapshot(self.held)
        assert self.file is not None
        return BadStep.read(self.file)


def explained(
    questions: Iterable[Question], memory: Memory | None = None, unread: Callable[[Question, SnapshotError], object] | None = None
) -> list[Incident]:
    """Explain the snapshots of one run one after another: of a step, who made the harm before whom it reached.

    memory: of what was explained before; without one, this user's. unread: is told of one that cannot be read, which keeps no other back;
    without it that is raised.
    """
    incidents: list[Incident] = []
    memory = Memory() if memory is None else memory
    poisoned: dict[str, tuple[int, int]] = {}  # by worker, step and update: what ranks do reaches each other, and nobody else
    for question in questions:
        try:
            one = question.head()
            here = (one.step, one.update, one.worker)
            source = next((i for i in incidents if (i.step, i.update, i.worker) == here and i.rank != one.rank), None)
            told = f"rank {source.rank}: {source.sentence}" if source is not None else ""
            since = poisoned.get(one.worker, here[:2])  # what its own update has spoilt was not so when it began
            incident = incident_of(question, memory, poisoned_at=since[0] if since < here[:2] else None, source=told)
        except SnapshotError as error:
            if unread is None:
                raise
            unread(question, error)
            continue
        incidents.append(incident)
        if one.spoilt:
            poisoned.setdefault(one.worker, here[:2])
        del question  # before the next one is read
    return incidents


def incident_of(question: Question, memory: Memory, *, poisoned_at: int | None = None, source: str = "") -> Incident:
    """Explain one step as `diagnose` does, unless it was explained before. Raises SnapshotError if it cannot be read."""
    key = memory.key(Diagnosis, question.file, question.held, poisoned_at=poisoned_at, source=source)
    found = memory.of(key, lambda: diagnosis(question.snapshot(), poisoned_at=poisoned_at, source=source), Diagnosis.lasts)
    return replace(found.incident, snapshot=question.shown)


def _order(snapshot: Snapshot) -> tuple[int, int, bool, int, int]:
    return snapshot.step, snapshot.update, snapshot.observation.kind is Kind.ARRIVED, snapshot.rank, snapshot.part


def examine(
    snapshot: Snapshot, replayed: Replay | None = None, *, poisoned_at: int | None = None, source: str = ""
) -> tuple[Observation, Replay, str]:
    """Return what is known of a snapshot's step, its replay, and why it could not be replayed ("" if it could)."""
    problem = ""
    if replayed is None:
        try:
            replayed = replay(snapshot)
        except ProgramError as error:
            replayed, problem = NOTHING, str(error)
        except Exception as error:  # noqa: BLE001 - whatever fails in here, the step is told with what it reached
            replayed, problem = NOTHING, words_of(error)
    seen, location = snapshot.observation, replayed.location
    if location is not None and replayed.trace is not None and not seen.outside:
        observed = observe(location, replayed.trace)
    else:  # the origin lies outside the file's program (in the model, in a clip): told as it was seen
        loss = snapshot.reached.loss
        phase = Phase.FORWARD if loss is not None and not math.isfinite(loss) else Phase.BACKWARD
        observed = replace(seen, phase=seen.phase or phase)
        if seen.origin.op == UNMADE and snapshot.reached.bad_weights:  # no loss is to blame, and the weights are what is spoilt
            observed = replace(observed, phase=Phase.WEIGHTS, origin=replace(seen.origin, role=Role.WEIGHTS))
    if seen.outside or seen.tried:  # what was tried on the whole program is known, and what is left of it may not tell
        asked = tuple(row for row in replayed.rows if row.kind == "asked") if seen.tried else replayed.rows
        replayed = replace(replayed, rows=(*(_again(row, replayed) for row in seen.tried), *asked), bench=None)
    live, here = snapshot.found.origin, observed.origin
    if (live.op, live.index, live.shape, live.line) == (here.op, here.index, here.shape, here.line):
        observed = replace(observed, origin=replace(here, batch=live.batch))  # its program was whole: a file may hold less of it
    since = snapshot.consequence_of if poisoned_at is None else poisoned_at  # which the run has told the file
    return replace(observed.joined(seen), poisoned_at=since, source=source), replayed, problem


def _again(row: Row, replayed: Replay) -> Row:
    """A row of the process; whether the recorded step comes out again is what the file shows."""
    known = row.kind == "recorded" and replayed.reproduction.loss is not None
    return replace(row, note=replayed.reproduction.words) if known else row


def diagnose(
    snapshot: Snapshot,
    path: str | None = None,
    replayed: Replay | None = None,
    *,
    poisoned_at: int | None = None,
    source: str = "",
) -> Incident:
    """Explain one snapshot.

    replayed: a replay that was already run, to save a second one. poisoned_at, source: what an earlier step and another rank have to do
    with it, see `Observation`.
    """
    return replace(diagnosis(snapshot, replayed, poisoned_at=poisoned_at, source=source).incident, snapshot=path)


def diagnosis(snapshot: Snapshot, replayed: Replay | None = None, *, poisoned_at: int | None = None, source: str = "") -> Diagnosis:
    """Return what `diagnose` does, and whether the step goes wrong again."""
    about = {name: ordered(getattr(snapshot, name)) for name in ("settings", "objective", "environment")}
    snapshot = replace(snapshot, **about)  # as its file has them: of a step in memory the same is told
    seen, replayed, problem = examine(snapshot, replayed, poisoned_at=poisoned_at, source=source)
    failing = replayed.location is not None or snapshot.observation.outside  # or it was seen where the file does not reach
    incident = _incident(snapshot, seen, replayed, problem)
    return Diagnosis(incident, failing, replayed.trace is not None)


def _incident(snapshot: Snapshot, seen: Observation, replayed: Replay, problem: str) -> Incident:
    if problem:
        snapshot = replace(snapshot, notes=(*snapshot.notes, ("not_replayed", problem)))
    cause, tests = because(seen, replayed)
    if replayed.bench is not None:
        replayed.bench.let_go()  # nothing more is tried
    framework = recognise({site.file for site in snapshot.program.sites} | {f"/{snapshot.objective.get('site', '')}"})
    fixes, rejected = fixes_of(seen, cause, replayed.rows)
    advised = folk_rows(snapshot, framework, replayed.trace) if replayed.location is not None and not seen.suspect else ()
    best = next((fix.id for fix in fixes if fix.executed and fix.proven), None)
    tokens = None if seen.outside else with_texts(tokens_of(replayed, best), snapshot.texts)
    sample = sample_of(tokens, replayed.trace, known(snapshot.settings, snapshot.objective), seen.origin.batch)
    spot = token_of(snapshot, seen.origin)
    if spot and tokens is not None:  # which knows more of what is a token than the step alone
        spot = tokens.layout.spot(tokens.row, tokens.column) if sample is None else ", ".join(filter(None, (sample.place, sample.group)))
    phase = str(seen.phase)
    reached = {
        "loss": snapshot.reached.loss is not None and not math.isfinite(snapshot.reached.loss),
        "gradients": [snapshot.reached.bad_gradients, snapshot.reached.gradients],
        "weights": [snapshot.reached.bad_weights, snapshot.reached.weights],
        "stepped": snapshot.reached.stepped,
        **({"optimizer": snapshot.reached.optimizer} if snapshot.reached.optimizer else {}),
    }
    found = [Note(slug, text, snapshot.step) for slug, text in (*snapshot.notes, *_second_fault(replayed.rows))]
    return Incident(
        step=snapshot.step,
        rank=snapshot.rank,
        phase=phase,
        cause=cause,
        headline=_headline(snapshot, phase, spot),
        sentence=sentence(snapshot, seen, cause),
        origin=seen.origin,
        chain=seen.chain,
        loss=snapshot.reached.loss,
        reached=reached,
        fixes=fixes,
        rejected=rejected,
        framework=framework.name if framework else None,
        remedies=remedies(framework, cause, seen.origin, known(snapshot.settings, snapshot.objective), advised),
        notes=tuple(found),
        snapshot=None,
        rows=(*(row for row in replayed.rows if row.kind != TEST), *advised, *tests),
        reproduction=replayed.reproduction,
        suspect=seen.suspect,
        history=snapshot.history,
        environment=snapshot.environment,
        settings=snapshot.settings,
        opaque=snapshot.opaque,
        picture=None if seen.outside else picture_of(replayed),
        tokens=tokens,
        lines=tuple(_lines(snapshot.program, seen)),
        objective=snapshot.objective,
        loss_words=objective_words(snapshot.objective),
        consequence_of=snapshot.consequence_of,
        update=snapshot.update,
        micro_batch=snapshot.part,
        micro_batches=snapshot.reached.micro_batches,
        blame=seen.blame,
        worker=snapshot.worker,
        token=token_at_origin(tokens),
        sample=sample,
    )


def _lines(program: Program, seen: Observation) -> Iterator[tuple[str, tuple[tuple[int, str], ...]]]:
    """Yield the lines of source around the origin and around each link, by file, the origin's first."""
    origin = seen.origin
    wanted = {(origin.file, origin.line), *((link.file or origin.file, link.line) for link in seen.chain)}
    found: dict[str, dict[int, str]] = {origin.file: dict(origin.source)} if origin.file else {}
    for site in program.sites:
        if (site.file, site.line) in wanted:
            found.setdefault(site.file, {}).update(site.source)
    yield from ((file, tuple(sorted(lines.items()))) for file, lines in found.items() if lines)


def _second_fault(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield a note where the step has two faults: no edit at the origin heals it, and one uncovers another origin."""
    edits = [row for row in rows if row.kind == "fix"]
    first = next((row for row in edits if row.then), None)
    if first is not None and not any(row.works and row.id not in {one.id for one in edits if one.then} for row in edits):
        both = " Both edits together heal it." if any(row.works for row in edits) else ""
        yield "second_fault", f"a second fault: with {first.id} the step goes wrong at the next place, {first.then}.{both}"


_STEPPED = {
    "taken": "{} stepped",
    "skipped": "{} step skipped",
    "stopped": "run stopped before the optimizer step",
    "repaired": "{} stepped on repaired gradients",
    "replaced": "{} stepped on replaced gradients",
    "skipped by the trainer": "{} step skipped by the trainer",
    "skipped by the scaler": "{} step skipped by the scaler",
    "taken by hand": "step taken by hand",
}


_LEFT_ALONE = {"skipped by the trainer", "skipped by the scaler"}  # that the weights are clean goes without saying


def _headline(snapshot: Snapshot, phase: str, sample: str) -> str:
    """Where it happened and how far it got, in figures. sample: of the batch, in words, "" if unknown."""
    r = snapshot.reached
    parts = []
    if r.loss is not None:
        parts.append(f"loss {number(r.loss)}" + (" (finite)" if math.isfinite(r.loss) else ""))
    bad = [f"{r.bad_gradients} of {r.gradients} weight gradients"] if r.bad_gradients and r.gradients else []
    bad += [f"{r.bad_weights} of {r.weights} weights"] if r.bad_weights else []
    if r.bad_gradients == 0 and r.gradients:
        parts.append("weight gradients clean")
    if bad:
        parts.append(f"{' and '.join(bad)} non-finite")
    if r.bad_weights == 0 and r.stepped not in _LEFT_ALONE:
        parts.append("weights clean")
    if r.stepped in _STEPPED:
        parts.append(_STEPPED[r.stepped].format(r.optimizer or "optimizer"))
    where = f"{snapshot.place} · {called(snapshot.rank, snapshot.worker)} · {phase}" + (f" at {sample}" if sample else "")
    return f"{where}   " + " · ".join(parts)
