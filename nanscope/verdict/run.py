"""The verdict on a run directory: what the run itself said when it ended, or what can be said of one that was killed.

However many ranks wrote it: a snapshot is loaded only where the heads of all of them say that it stands for a cause of its own, and a
history is read only where its rank did not come to count for itself, in blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.coverage import Gap, with_gap
from nanscope.snapshot.file import load
from nanscope.snapshot.history import Outline, outline
from nanscope.snapshot.observation import Came
from nanscope.snapshot.record import RUNNING, Aftermath, RunRecord, records
from nanscope.snapshot.runs import bad_step_files, histories
from nanscope.text import count
from nanscope.verdict.diagnose import explained, verdict
from nanscope.verdict.incident import Note, Verdict
from nanscope.verdict.standing import Ranks, Standing, groups_of, say_ranks, told_of

MOST = 32  # bad steps of a run of several ranks that are explained
LIKE = 8  # notes of one kind that are told
WORLDS = 1 << 20  # ranks; whoever says that a run has more did not train


def verdict_of(run_dir: Path, track: Callable[[Sequence[Path]], Iterable[Path]] = iter) -> Verdict:
    """Return the verdict on a run from what it wrote. track: shows how far the reading of its snapshots has come.

    Raises NanscopeError for a record that is damaged, SnapshotError for such a snapshot.
    """
    told = records(run_dir)
    ended = {record.rank for record in told if record.status != RUNNING}
    written = histories(run_dir)
    outlines = {rank: outline(path) for rank, path in written.items() if rank not in ended}
    files = [(BadStep.read(path), path) for path in sorted(bad_step_files(run_dir))]
    world = max([0, *(record.world for record in told if record.world <= WORLDS)])
    several = len({*written, *(record.rank for record in told), *(one.rank for one, _ in files)}) > 1 or world > 1
    shown, left = _to_explain(files) if several else ([path for _, path in sorted(files, key=_order)], 0)
    notes = [Note(remark.slug, remark.text, remark.step) for record in told for remark in record.notes]
    open_ = list(_unfinished(told, outlines, world))
    notes += [Note("still_running", text, step) for text, step, alive in open_ if alive]
    if left:
        notes.append(Note("not_explained", f"{left} further bad steps have a cause of their own: `nanscope report FILE` explains one"))
    gaps = [Gap("unfinished", text, step) for text, step, alive in open_ if not alive]
    ranks = _ranks(files, told, outlines, world) if several else None
    if ranks is not None and (missing := ranks.of(Standing.UNHEARD)):
        whose = "it" if len(missing) == 1 else "them"
        gaps.append(Gap("unheard", f"{say_ranks(missing, world)} never reported: there is no file of {whose}"))
    # Of several ranks each counts the same steps; what a killed one did not come to count stands in the history.
    return verdict(
        (),
        incidents=explained((load(path), str(path)) for path in track(shown)),  # one at a time: each may be as large as a batch
        notes=list(_few(dict.fromkeys(notes))),
        steps=max([0, *(found.steps for found in outlines.values()), *(record.steps for record in told)]),
        skipped=max([0, *(record.skipped for record in told)]),
        bad_steps=max([0, *(found.bad for found in outlines.values()), *(record.bad_steps for record in told)]),
        backwards=max([0, *(record.backwards for record in told)]),
        gaps=_all_gaps(told, gaps),
        aftermath=_joined(found for record in told for found in record.aftermath),
        ranks=ranks,
    )


def _order(found: tuple[BadStep, Path]) -> tuple[int, int, bool, int, int]:
    one, _ = found
    return one.step, one.update, one.came is Came.REDUCED, one.rank, one.part


def _to_explain(files: Sequence[tuple[BadStep, Path]]) -> tuple[list[Path], int]:
    """Return the snapshots that stand for a cause, and how many more there are than can be looked at."""
    paths = dict(files)
    told = told_of(paths)
    return [paths[one] for one in told[:MOST]], len(told[MOST:])


def _ranks(files: Iterable[tuple[BadStep, Path]], told: Sequence[RunRecord], outlines: Mapping[int, Outline], world: int) -> Ranks:
    """Who was first: as the heads of the snapshots say it, the records, and last the lines of a rank that came to write neither."""
    first: dict[int, BadStep] = {}
    for one in (*(one for one, _ in files), *(record.first for record in told if record.first is not None)):
        known = first.get(one.rank, one)
        first[one.rank] = min(known, one, key=lambda found: (found.suspect, found.step, found.update, found.part))
    for rank, found in outlines.items():
        if found.first_bad is not None and rank not in first:
            first[rank] = BadStep(step=found.first_bad.step, rank=rank, came=Came.REDUCED)  # nothing of its own was found there
    healthy = [record.rank for record in told if record.status != RUNNING]
    return groups_of(first.values(), healthy, [*(record.rank for record in told), *outlines], world)


def _few(notes: Iterable[Note]) -> Iterator[Note]:
    """Yield so many notes of each kind, and how many more there are: a thousand ranks may each have their own."""
    kinds: dict[str, list[Note]] = {}
    for note in notes:
        kinds.setdefault(note.slug, []).append(note)
    for slug, found in kinds.items():
        yield from found[:LIKE]
        if len(found) > LIKE:
            yield Note(slug, f"and {count(len(found) - LIKE, 'more note')} of this kind")


def _all_gaps(told: Iterable[RunRecord], further: Iterable[Gap]) -> list[Gap]:
    """What one rank or another did not see, each kind once."""
    gaps: list[Gap] = []
    for gap in (*(gap for record in told for gap in record.gaps), *further):
        gaps = with_gap(gaps, gap)
    return gaps


def _joined(told: Iterable[Aftermath]) -> list[Aftermath]:
    """The consequences of each step, which every rank has counted."""
    found: dict[int, Aftermath] = {}
    for one in told:
        other = found.get(one.of, one)
        found[one.of] = Aftermath(one.of, min(one.first, other.first), max(one.last, other.last), max(one.count, other.count))
    return [found[of] for of in sorted(found)]


def _unfinished(told: Sequence[RunRecord], outlines: Mapping[int, Outline], world: int) -> Iterator[tuple[str, int | None, bool | None]]:
    """Yield what is known of the processes that have not ended: in words, their last step, and whether they still run."""
    running = {record.rank: record.alive for record in told if record.status == RUNNING}
    if told:  # a rank of which only lines are there cannot be asked after
        running = {**dict.fromkeys(outlines), **running}
    for alive in (True, None, False):
        ranks = sorted(rank for rank, found in running.items() if found is alive)
        if not ranks:
            continue
        last = [entry for rank in ranks if rank in outlines and (entry := outlines[rank].last) is not None]
        latest = max(last, key=lambda entry: entry.time, default=None)
        one, name = len(ranks) == 1, say_ranks(ranks, world)
        if alive:
            text = f"{name} still run{'s' if one else ''}"
        else:
            since = "the beginning" if latest is None else f"step {latest.step}, which ended at {_clock(latest.time)}"
            if len({entry.step for entry in last}) > 1 and latest is not None:
                steps = [entry.step for entry in last]
                since = f"steps {min(steps)} to {max(steps)}, the last of which ended at {_clock(latest.time)}"
            was = "was" if one else "were"
            how = f"{was} killed" if alive is False else f"{was} killed, or still run{'s' if one else ''}"
            text = f"what {name} did after {since}: {'it' if one else 'they'} {how}"
        yield text, None if latest is None else latest.step, alive


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
