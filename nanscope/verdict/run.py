"""The verdict on a run directory: what the run itself said when it ended, or what can be said of one that was killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from nanscope.snapshot.coverage import Gap, with_gap
from nanscope.snapshot.file import load
from nanscope.snapshot.history import Entry, read
from nanscope.snapshot.record import RUNNING, Aftermath, RunRecord, records
from nanscope.verdict.diagnose import verdict
from nanscope.verdict.incident import Note, Verdict


def verdict_of(run_dir: Path, track: Callable[[Sequence[Path]], Iterable[Path]] = iter) -> Verdict:
    """Return the verdict on a run from what it wrote. track: shows how far the reading of its snapshots has come.

    Raises NanscopeError for a record that is damaged, SnapshotError for such a snapshot.
    """
    files = sorted(run_dir.glob("step-*.rank*.safetensors"))
    told = records(run_dir)
    entries = [entry for history in sorted(run_dir.glob("history.rank*.jsonl")) for entry in read(history)]
    notes = [Note(remark.slug, remark.text, remark.step) for record in told for remark in record.notes]
    unfinished = list(_unfinished(told, entries))
    # Of several ranks each counts the same steps; what a killed one did not come to count stands in the history.
    return verdict(
        [load(file) for file in track(files)],
        [str(file) for file in files],
        notes=list(dict.fromkeys([*notes, *(Note("still_running", text, step) for text, step, alive in unfinished if alive)])),
        steps=max([len({entry.step for entry in entries}), *(record.steps for record in told)]),
        skipped=max([0, *(record.skipped for record in told)]),
        bad_steps=max([len({entry.step for entry in entries if entry.nonfinite}), *(record.bad_steps for record in told)]),
        backwards=max([0, *(record.backwards for record in told)]),
        gaps=_all_gaps(told, [Gap("unfinished", text, step) for text, step, alive in unfinished if not alive]),
        aftermath=_joined(found for record in told for found in record.aftermath),
    )


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


def _unfinished(told: Iterable[RunRecord], entries: Sequence[Entry]) -> Iterator[tuple[str, int | None, bool | None]]:
    """Yield what is known of each process that has not ended: in words, its last step, and whether it still runs."""
    for record in told:
        if record.status == RUNNING:
            last = max((entry for entry in entries if entry.rank == record.rank), key=lambda entry: entry.time, default=None)
            alive = record.alive
            since = "the beginning" if last is None else f"step {last.step}, which ended at {_clock(last.time)}"
            how = "was killed" if alive is False else "was killed, or still runs"
            text = f"rank {record.rank} still runs" if alive else f"what rank {record.rank} did after {since}: it {how}"
            yield text, None if last is None else last.step, alive


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
