"""From observations to a verdict: what happened, why, how far it got, and which fix was seen to work.

    step 412 · backward: coef_1 = torch.exp(log_importance_weights) overflowed at [2, 27] …

`case` says what is known, `rules` name the cause, `replay` tries the fixes, `words` tell it; here it becomes one verdict, so that every
report tells the same story.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from nanscope.errors import ProgramError, SnapshotError
from nanscope.frameworks.live import objective_words
from nanscope.frameworks.table import recognise
from nanscope.locate.observe import NO_STORY, Case, Story
from nanscope.replay.tries import Replay, replay
from nanscope.snapshot.step import Snapshot
from nanscope.verdict.fixes import _fixes, _remedies
from nanscope.verdict.incident import Incident, Note, Verdict, _row_from_json
from nanscope.verdict.map import _picture
from nanscope.verdict.rules import cause_of
from nanscope.verdict.sentence import headline, sentence


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
    from nanscope.version import __version__

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
