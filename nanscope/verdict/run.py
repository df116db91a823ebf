"""The verdict on a run directory: what the run itself said when it ended, or what can be said of one that was killed.

However many ranks wrote it: a snapshot is loaded only where the heads of all of them say that it stands for a cause of its own, and a
history is read only where its rank did not come to count for itself, in blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from nanscope.errors import SnapshotError
from nanscope.snapshot.alignment import called_by, dropped_alone
from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.coverage import Gap, Status, with_gap
from nanscope.snapshot.history import TAIL, Entry, Outline, last_entries, outline
from nanscope.snapshot.observation import Came
from nanscope.snapshot.processes import Who
from nanscope.snapshot.record import DROPPED, RUNNING, Aftermath, RunRecord, records, unwatched
from nanscope.snapshot.runs import bad_step_files, histories
from nanscope.text import count, listed
from nanscope.verdict.diagnose import Question, explained, verdict
from nanscope.verdict.incident import Note, Verdict
from nanscope.verdict.remembered import Memory
from nanscope.verdict.standing import Ranks, Standing, groups_of, say_ranks, told_of

LAST_BYTES = 1 << 18  # of a history, in which its last steps stand

MOST = 32  # bad steps of a run of several ranks that are explained
LIKE = 8  # notes of one kind that are told
WORLDS = 1 << 20  # ranks; whoever says that a run has more did not train


def verdict_of(
    run_dir: Path,
    track: Callable[[Sequence[Path]], Iterable[Path]] = iter,
    *,
    shown: Callable[[Path], str] = str,
    memory: Memory | None = None,
) -> Verdict:
    """Return the verdict on a run from what it wrote. track: shows how far the reading of its snapshots has come. shown: names a file.
    memory: of what was explained before; without one, this user's.

    A snapshot that is damaged is a gap. Raises NanscopeError for a record that is.
    """
    told = records(run_dir)
    number = _numbering(told)
    told = [_renumbered(record, number) for record in told]
    damaged: dict[Path, Gap] = {}
    read = list(_readable(sorted(bad_step_files(run_dir)), lambda path: (_called(BadStep.read(path), number), path), damaged))
    teams = _teams(run_dir, told, read)
    to_explain = [team.to_explain() for team in teams]
    restarts = {record.who: record.restarts for record in told}  # a later attempt goes on from an earlier one, and counts from 1 again
    in_order = sorted(
        (found for those, _ in to_explain for found in those), key=lambda found: (restarts.get(found[0].who, 0), *_order(found))
    )
    files = [path for _, path in in_order]
    # one at a time: each may be as large as a batch
    incidents = explained((Question(file=path, shown=shown(path)) for path in track(files)), memory, partial(_put_down, damaged))
    left = sum(more for _, more in to_explain)
    notes = [Note(remark.slug, remark.text, remark.step) for record in told for remark in record.notes]
    open_ = [found for team in teams for found in team.unfinished()]
    notes += [Note("still_running", text, step) for text, step, alive in open_ if alive]
    if left:
        notes.append(Note("not_explained", f"{left} further bad steps have a cause of their own: `nanscope report FILE` explains one"))
    notes += [note for team in teams if team.several for note in team.numbered_apart()]
    notes += _mixed({*(record.run for record in told), *(one.run for one, _ in read)} - {""})
    gaps = [Gap("unfinished", text, step) for text, step, alive in open_ if not alive]
    gaps += [*damaged.values(), *_unclear(told)]
    if not told and any(team.written for team in teams):
        gaps.append(Gap("unfinished", "how the run ended: there is no run.json"))
    ranks = {team.worker: team.ranks() for team in teams if team.several}
    for team in teams:
        if team.worker in ranks and (missing := ranks[team.worker].of(Standing.UNHEARD)):
            whose = "it" if len(missing) == 1 else "them"
            gaps.append(Gap("unheard", f"{team.called(missing)} never reported: there is no file of {whose}"))
    gaps += [Gap("child-unwatched", f"what a process did that could not be watched: {why}") for why in unwatched(run_dir)]
    # Of several ranks each counts the same steps; what a killed one did not come to count stands in the history.
    return verdict(
        (),
        incidents=incidents,
        notes=list(_few(dict.fromkeys(notes))),
        steps=max([0, *(found.steps for team in teams for found in team.outlines.values()), *(record.steps for record in told)]),
        skipped=max([0, *(record.skipped for record in told)]),
        repaired=max([0, *(record.repaired for record in told)]),
        bad_steps=max([_least_bad(told, damaged), *(found.bad for team in teams for found in team.outlines.values())]),
        backwards=max([0, *(record.backwards for record in told)]),
        gaps=_all_gaps(told, gaps),
        aftermath=_joined(found for record in told for found in record.aftermath),
        ranks=next((ranks[team.worker] for team in sorted(teams, key=_Team.began_at) if team.worker in ranks), None),
        processes=max(1, sum(team.written for team in teams)),
        history=_last_steps(run_dir),
    )


def _last_steps(run_dir: Path) -> list[Entry]:
    """The last steps of the first process that has a history."""
    written = histories(run_dir)
    return [] if not written else [*reversed(list(islice(last_entries(written[min(written)], LAST_BYTES), TAIL)))]


T = TypeVar("T")


def _readable(paths: Iterable[Path], read: Callable[[Path], T], damaged: dict[Path, Gap]) -> Iterator[T]:
    """Yield what is read of some snapshots; one that cannot be read is put down as damaged, and keeps nothing else back."""
    for path in paths:
        try:
            yield read(path)
        except SnapshotError as error:
            _put_down(damaged, Question(file=path), error)


def _put_down(damaged: dict[Path, Gap], question: Question, error: SnapshotError) -> None:
    """Put a snapshot down as damaged."""
    if (path := question.file) is not None:
        damaged[path] = Gap("damaged-snapshot", f"what {path.name} holds: {str(error).removeprefix(f'{path}: ')}")


def _least_bad(told: Iterable[RunRecord], damaged: Collection[Path]) -> int:
    """How many steps were bad at least: as counted, or as told where nothing of it is left."""
    bad = bool(damaged) or any(record.status in (Status.NONFINITE, Status.SUSPECT) for record in told)
    return max([int(bad), *(record.bad_steps for record in told)])


def _unclear(told: Iterable[RunRecord]) -> Iterator[Gap]:
    """Yield what a record says of its end that is neither healthy nor explained by anything else in it."""
    for record in told:
        if record.status not in (RUNNING, "", *_CLEAR) and not record.gaps:
            yield Gap("unclear-end", f"what {record.called} met: its record says {record.status!r}, and not why")


_CLEAR = (Status.HEALTHY, Status.SUSPECT, Status.NONFINITE, Status.UNWATCHED)  # UNWATCHED: it trained nothing


def _mixed(runs: Collection[str]) -> Iterator[Note]:
    """Yield that files of several runs lie in one directory."""
    if len(runs) > 1:
        yield Note("mixed_runs", f"files of {len(runs)} runs lie in this directory, and are told as one: {', '.join(sorted(runs)[:LIKE])}")


def _order(found: tuple[BadStep, Path]) -> tuple[int, int, bool, int, int]:
    one, _ = found
    return one.step, one.update, one.came.arrived, one.rank, one.part


@dataclass(frozen=True, slots=True)
class _Team:
    """Processes of a run that train together: ranks, each of which counts the same steps. worker: what they are called, "" for ranks alone.

    told: what they said. files: of their bad steps. outlines: by rank, of the histories of those that have not ended. written: how many
    histories there are.
    """

    worker: str
    told: tuple[RunRecord, ...]
    files: tuple[tuple[BadStep, Path], ...]
    outlines: Mapping[int, Outline]
    written: int
    several: bool

    @property
    def world(self) -> int:
        """How many ranks there are, 0 where nobody said."""
        return max([0, *(record.world for record in self.told if record.world <= WORLDS)])

    def began_at(self) -> tuple[int, int, str]:
        """The first bad step, for an order in which what went bad stands first."""
        attempt = min([record.restarts for record in self.told], default=0)
        return (attempt if self.files else 1 << 62), min([one.step for one, _ in self.files], default=0), self.worker

    def to_explain(self) -> tuple[Sequence[tuple[BadStep, Path]], int]:
        """Return the snapshots that stand for a cause, and how many more there are than can be looked at."""
        return _to_explain(self.files) if self.several else (self.files, 0)

    def ranks(self) -> Ranks:
        """Who was first."""
        return _ranks(self.files, self.told, self.outlines, self.world)

    def called(self, ranks: Sequence[int]) -> str:
        """Return what a person calls some of them."""
        told = say_ranks(ranks, self.world) if self.several or not self.worker else ""
        return " ".join(filter(None, [self.worker, told]))

    def numbered_apart(self) -> Iterator[Note]:
        """Yield which ranks count otherwise than the others, since their trainer dropped steps there alone."""
        own = {record.rank: record for record in self.told if record.steps}
        updates = {rank: (one.dropped[-1] if len(one.dropped) >= DROPPED else one.steps) - len(one.dropped) for rank, one in own.items()}
        alone = dropped_alone({rank: one.dropped for rank, one in own.items()}, updates)
        for steps in sorted(set(alone.values())):
            ranks = [rank for rank, its in alone.items() if its == steps]
            which = f"step{'' if len(steps) == 1 else 's'} {listed([str(step) for step in steps])} alone"
            whose = f"from there on {'its' if len(ranks) == 1 else 'their'} numbers are {len(steps)} ahead of those of the others"
            text = f"{self.called(ranks)} dropped {which}: {whose}; the ranks are told by those of rank {min(own)}"
            yield Note("numbered_apart", text, steps[0])

    def unfinished(self) -> Iterator[tuple[str, int | None, bool | None]]:
        """Yield what is known of those that have not ended: in words, their last step, and whether they still run."""
        return _unfinished(self.told, self.outlines, self.called)


def _numbering(told: Iterable[RunRecord]) -> Callable[[Who, int], int]:
    """Return what a step is called by the first of the ranks that train together, given who calls it what."""
    own = {record.who: record.untaken for record in told if record.steps}
    first = {worker: dropped for (_, worker), dropped in sorted(own.items(), reverse=True)}

    def number(who: Who, step: int) -> int:
        return step if own.get(who) in (None, first.get(who[1])) else called_by(step, own[who], first[who[1]])

    return number


def _renumbered(record: RunRecord, number: Callable[[Who, int], int]) -> RunRecord:
    named = partial(number, record.who)
    after = [replace(one, of=named(one.of), first=named(one.first), last=named(one.last)) for one in record.aftermath]
    return replace(record, first=record.first and _called(record.first, number), aftermath=tuple(after))


def _called(one: BadStep, number: Callable[[Who, int], int]) -> BadStep:
    return replace(one, step=number(one.who, one.step), of=None if one.of is None else number(one.who, one.of))


def _teams(run_dir: Path, told: Sequence[RunRecord], files: Sequence[tuple[BadStep, Path]]) -> list[_Team]:
    written = histories(run_dir)
    if any(record.member for record in told):  # who only started others has nothing to end
        told = [record for record in told if record.member or record.who in written]
    ended = {record.who for record in told if record.status != RUNNING}
    everybody = {*written, *(record.who for record in told), *(one.who for one, _ in files)}
    teams = []
    for name in sorted({worker for _, worker in everybody}):
        own = tuple(record for record in told if record.worker == name)
        outlines = {who[0]: outline(path) for who, path in written.items() if who[1] == name and who not in ended}
        several = sum(worker == name for _, worker in everybody) > 1 or any(1 < record.world <= WORLDS for record in own)
        mine = tuple((one, path) for one, path in files if one.worker == name)
        teams.append(_Team(name, own, mine, outlines, sum(worker == name for _, worker in written), several))
    return teams


def _to_explain(files: Sequence[tuple[BadStep, Path]]) -> tuple[list[tuple[BadStep, Path]], int]:
    """Return the snapshots that stand for a cause, and how many more there are than can be looked at."""
    paths = dict(files)
    told = told_of(paths)
    return [(one, paths[one]) for one in told[:MOST]], len(told[MOST:])


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


def _unfinished(
    told: Sequence[RunRecord], outlines: Mapping[int, Outline], called: Callable[[Sequence[int]], str]
) -> Iterator[tuple[str, int | None, bool | None]]:
    """Yield what is known of the processes that have not ended: in words, their last step, and whether they still run."""
    reaped = {record.rank for record in told if record.reaped and not outlines.get(record.rank, Outline()).amid}
    running = {record.rank: record.alive for record in told if record.status == RUNNING}
    if told:  # a rank of which only lines are there cannot be asked after
        running = {**dict.fromkeys(outlines), **running}
    running = {rank: alive for rank, alive in running.items() if rank not in reaped}
    for alive in (True, None, False):
        ranks = sorted(rank for rank, found in running.items() if found is alive)
        if not ranks:
            continue
        last = [entry for rank in ranks if rank in outlines and (entry := outlines[rank].last) is not None]
        latest = max(last, key=lambda entry: entry.time, default=None)
        one, name = len(ranks) == 1, called(ranks)
        if alive:
            text = f"{name} still run{'s' if one else ''}"
        else:
            since = "the beginning" if latest is None else f"step {latest.step}, which ended at {_clock(latest.time)}"
            if len({entry.step for entry in last}) > 1 and latest is not None:
                steps = [entry.step for entry in last]
                since = f"steps {min(steps)} to {max(steps)}, the last of which ended at {_clock(latest.time)}"
            was = "was" if one else "were"
            how = f"{was} killed, or left by os._exit" if alive is False else f"{was} killed, or still run{'s' if one else ''}"
            text = f"what {name} did after {since}: {'it' if one else 'they'} {how}"
        yield text, None if latest is None else latest.step, alive


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
