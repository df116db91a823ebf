"""The logbook: what is kept of one run, in memory and in its folder, and what other ranks wrote there.

run.json                                 what ran, and how it went so far; `run.rank3.json` of a further rank
history.rank0.jsonl                      one line a step
step-000412.rank0.safetensors            a bad step; `.part2` and so on for further bad micro-batches of it
batch-000001.rank0.safetensors           a step that was asked for
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import Tensor

from nanscope.capture.alone import has_peers
from nanscope.foresight.hazard import Check
from nanscope.program.program import EMPTY
from nanscope.snapshot.aside import Aside, is_near
from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.coverage import Gap, Status, with_gap
from nanscope.snapshot.history import Entry, History
from nanscope.snapshot.observation import REDUCED, WRITTEN_LATE, Kind, Observation
from nanscope.snapshot.processes import mark
from nanscope.snapshot.record import DROPPED, Aftermath, Remark, RunRecord, now
from nanscope.snapshot.remote import Remote
from nanscope.snapshot.runs import MAX_BYTES, Folder, history_path
from nanscope.snapshot.step import Reached, Snapshot, Stepped
from nanscope.text import count, is_round, listed
from nanscope.verdict.diagnose import verdict
from nanscope.verdict.forecast import Forecast
from nanscope.verdict.incident import Note, Verdict
from nanscope.verdict.sentence import what_and_where
from nanscope.version import __version__
from nanscope.watching.disk import Disk
from nanscope.watching.dying import close_at_end
from nanscope.watching.mirror import Mirror
from nanscope.watching.peers import PART, PATIENCE, Peers, of_other_ranks
from nanscope.watching.place import Place, is_ranked, rank_and_world, restarts, settle_somewhere
from nanscope.watching.poisoning import Poisoning, is_fed
from nanscope.watching.recording import Recording
from nanscope.watching.share import Share
from nanscope.watching.surroundings import environment
from nanscope.watching.telling import Teller
from nanscope.watching.turns import Turns, in_turn

UNTRAINED = 3  # steps of a run that a scaler has skipped all, after which that is worth a word
STILL = 3  # steps in a row whose gradients are all 0, after which that is worth a word
NOTES = 32  # notes kept per run
WORDED = 3  # bad steps that are not on disk of which it is said what was found
UNLIKE = "replicas differ from here on, and of weights that are sharded only a part was updated"

log = logging.getLogger("nanscope")


class Logbook:
    """What is known of one run. paths: of the snapshots, None for one that could not be written. saved: files of steps that were asked for.

    runs: the folder of them. folder: the run directory, once the run has begun. limit: bad steps with a cause of their own saved per run,
    and bad backward passes per step; later ones are counted. max_bytes: see `Disk`. on_incident: called with each bad step that was kept,
    after it was written; on_warning: with what was said to be about to happen; on_line: with the line of each step. warnings: all that was
    said so.
    """

    def __init__(
        self,
        runs: Folder,
        limit: int,
        max_bytes: int = MAX_BYTES,
        on_incident: Callable[[Snapshot, str | None], None] | None = None,
        leave: Callable[[str], None] | None = None,
        on_warning: Callable[[Forecast], None] | None = None,
        on_line: Callable[[Entry], None] | None = None,
    ) -> None:
        self.runs, self.folder, self.limit, self.rank, self.worker = runs, runs.path, limit, 0, ""
        self._max_bytes, self._on_incident, self._on_warning, self._on_line = max_bytes, on_incident, on_warning, on_line
        self._record = RunRecord()
        self._pid = os.getpid()
        self.turns = Turns()
        self._poisonings: WeakSet[Poisoning] = WeakSet()
        self._join: Callable[[], Place] | None = None
        self._join_forked = self._begin_beside
        self._leave, self._leads = leave or self.close, False
        self._begin()

    def _begin(self) -> None:
        self.history, self._teller = History(), Teller()
        self._still = 0  # the step since which all gradients are 0; 0 where they are not
        self._aftermath: list[Aftermath] = []
        for poisoning in self._poisonings:
            poisoning.forget(self._aftermath)
        self._poisoning = self.another_poisoning()
        self._disk = Disk(None, self._max_bytes)
        self._mirror: Mirror | None = None
        self.snapshots: list[Snapshot] = []
        self.paths: list[Path | None] = []
        self.saved: list[Path] = []
        self.warnings: list[Forecast] = []
        self.checks: list[Check] = []
        self.notes: list[Note] = []
        self.gaps: list[Gap] = []
        self.steps = self.skipped = self.bad_steps = self.backwards = self.repaired = 0
        self._by_scaler = 0  # steps that a loss scaler has skipped
        self._held_peak: int | None = None
        self._skips: list[int] = []
        self._dropped: list[int] = []
        self._peers = Peers(self.folder, self.rank, 0)
        self._verdict: tuple[int, Verdict] | None = None
        self._finished = self._had_peers = False
        self._unheard, self._opened = "", time.monotonic()

    def open(self, place: Place | None, about: RunRecord) -> None:
        """Begin the run. place: where it writes, None if nothing can be written anywhere."""
        self._record = replace(about, started=now(), process=mark(), nanscope=__version__, environment=environment(None, None))
        if place is not None:
            self._settle(place)
        self._put()

    def take_part(self, join: Callable[[], Place] | None, join_forked: Callable[[], Place], about: RunRecord | None) -> None:
        """Take part in a run from the first thing on that is to be kept: a process in which nothing happens has no file.

        join: finds a place in it for this process, join_forked: for one that is forked from it. about: None for who began the run and has
        said so.
        """
        self._join, self._join_forked, self._leads = join, join_forked, about is None
        if about is not None:
            self._record = replace(about, started=now(), process=mark(), nanscope=__version__, member=True)

    def forked(self) -> None:
        """In a forked process, begin a book of its own: it inherits the instruments, and the parent's book is the parent's."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.history.let_go()
            self._begin()
            self._join, self._leads = self._join_forked, False
            self._record = replace(self._record, member=self._join != self._begin_beside, started=now(), process=mark())

    def _settle(self, place: Place) -> None:
        self.folder, self.rank, self.worker = place.path, place.rank, place.worker
        self.runs = place.folder or self.runs
        world = rank_and_world()[1] if place.shared and (place.folder is None or is_ranked()) else 0
        record = replace(self._record, run=place.run, rank=place.rank, worker=place.worker, node=place.node)
        self._record = replace(record, world=world, restarts=restarts())
        self._peers = Peers(place.path, place.rank, world, place.worker)
        aside = Aside(near=is_near(place.path))
        self.history = History(history_path(place.path, *self._record.who), place.run, aside)
        self._disk = Disk(place.path, self._max_bytes, Share(place.path, place.rank, world), aside)
        self._teller = Teller(self.shown(place.path), self._record.called if place.shared else "")
        if self._mirror is None and self.runs.remote and place.path.is_relative_to(self.runs.path):
            remote = Remote(self.shown(place.path))
            self._mirror = Mirror(place.path, remote, self._owns, lambda error: self._disk.unsent(error), led=place.led)

    def _in_this_process(self) -> None:
        """Take the place in a run that is still to be taken."""
        self.forked()  # not all forks are those of Python
        if self._join is not None:
            join, self._join = self._join, None
            self._record = replace(self._record, environment=environment(None, None))
            try:
                self._settle(join())
            except OSError as error:
                log.warning("nanscope [out-unwritable]: %s: what is found is kept in memory only", error)
            self._put()
            if self._record.member or self._join_forked == self._begin_beside:
                close_at_end(self._leave, self.close if self._record.member else None)  # it has no block whose end would close the book

    def _with_a_record(self) -> None:
        """Take the place as far as it takes one to say something of the run: who began it has a record, also if it only starts others."""
        self.forked()
        if self._record.member:
            self._in_this_process()

    def _begin_beside(self) -> Place:
        """A place for a forked process where nobody takes part in anything: a run of its own, beside its parent's."""
        place = settle_somewhere(self.runs, self._record.script)
        if place is None:
            raise OSError("no place")
        return place

    def shown(self, path: Path) -> str:
        """Return a path as the folder of runs was given, relative where that was: a script may have gone to another directory."""
        return self.runs.shown(path)

    def _owns(self, name: str) -> bool:
        return self._record.owns(name)

    def gather(self) -> None:
        """Fetch what other processes have written, where that takes fetching."""
        if self._mirror is not None:
            try:
                self._mirror.fetch()
            except OSError as error:
                self._disk.unsent(error)

    @in_turn
    def begin_step(self) -> None:
        """A step begins."""
        try:
            self.history.begin()
        except OSError as error:
            self._disk.failed("the history could not be written", error)

    @in_turn
    def enter(self, entry: Entry, poisoning: Poisoning | None = None) -> None:
        """Write the line of a step. poisoning: of the weights that it belongs to."""
        self._in_this_process()
        self.steps += 1
        self._by_scaler += entry.stepped == Stepped.BY_SCALER
        if not entry.bad:
            (poisoning or self._poisoning).fine()
        if self.worker or entry.rank != self.rank:  # of a process that has only now got its place
            entry = replace(entry, rank=self.rank, worker=self.worker or None)
        try:
            self._still = (self._still or entry.step) if entry.grad_norm == 0.0 else 0
            self.history.append(entry)
        except OSError as error:
            self._disk.failed("the history could not be written", error)
        if self._on_line is not None:
            self._on_line(entry)
        self._ask_peers(0.0)

    @in_turn
    def note(self, slug: str, text: str, step: int) -> None:
        """Keep a note, once."""
        self._with_a_record()
        if self.takes_notes() and not any(note.slug == slug and note.text == text for note in self.notes):
            self.notes.append(Note(slug, text, step))
            self._put()

    @in_turn
    def gap(self, slug: str, text: str, step: int | None = None) -> None:
        """Keep what training did and was not looked at; counted where it is known. text: what and why, follows "not seen: "."""
        try:
            self._with_a_record()
        finally:  # kept whatever becomes of the files: nothing else stands between a failure of ours and a false all-clear
            known = len(self.gaps)
            self.gaps = with_gap(self.gaps, Gap(slug, text, self.steps + 1 if step is None else step))
            self._verdict = None
        if len(self.gaps) > known:
            self._put()

    def takes_notes(self) -> bool:
        """Is there room for another note?"""
        return len(self.notes) < NOTES

    def blank(self, step: int, loss: Tensor | None, part: int, reached: Reached) -> Snapshot:
        """Return the snapshot of a step of which no more is known than how far the harm got. part: which backward pass of it, from 1."""
        return Snapshot(
            step=step,
            rank=self.rank,
            program=EMPTY,
            tensors={},
            loss=None if loss is None else loss.detach().clone(),
            grads={},
            reached=reached,
            history=tuple(self.history.entries),
            environment=environment(loss, None),
            part=part,
            run=self._record.run,
            worker=self.worker,
        )

    def wants(self, step: int) -> bool:
        """Is there room for another bad backward pass of this step? Consequences of spoilt weights take none of it."""
        saved = [snapshot.step for snapshot in self.snapshots if snapshot.consequence_of is None or snapshot.carried_on is not None]
        return len({*saved, step}) <= self.limit and saved.count(step) < self.limit

    def another_poisoning(self) -> Poisoning:
        """Return what a further thread tells of the weights that it trains."""
        poisoning = Poisoning(self._aftermath)
        self._poisonings.add(poisoning)
        return poisoning

    @in_turn
    def differentiated(self) -> None:
        """Count a backward pass."""
        self.backwards += 1

    @in_turn
    def held(self, peak: int) -> None:
        """So many bytes were held at a time, by one thread."""
        self._held_peak = max(peak, self._held_peak or 0)

    @in_turn
    def count(
        self, step: int, recording: Recording | None, another: bool, poisoning: Poisoning | None = None, of_update: bool = False
    ) -> bool:
        """Count a bad backward pass, and return whether it is to be looked at and kept. another: the step was not known to be bad.

        poisoning: of the weights that it belongs to. of_update: nothing is bad but these, after it.
        """
        self._in_this_process()
        poisoning = poisoning or self._poisoning
        self.bad_steps += another
        room = self.wants(step)
        of = poisoning.explains(step, recording, room, of_update)
        if (of is None and room) or poisoning.doubtful(step):
            return True
        if another and of is not None:
            poisoning.add(step, of)
        elif another:
            self._teller.unsaved()
        if another and is_round(self.bad_steps):
            self._put()
        return False

    def keep(self, snapshot: Snapshot, poisoning: Poisoning | None = None) -> None:
        """Keep a bad step: write it, say so, and call whoever wants to know. poisoning: of the weights that it belongs to."""
        kept = self._keep(snapshot, poisoning or self._poisoning)
        if self._on_incident is not None and kept is not None:  # out of turn: what it calls may wait for another thread
            self._on_incident(*kept)

    @in_turn
    def _keep(self, snapshot: Snapshot, poisoning: Poisoning) -> tuple[Snapshot, str | None] | None:
        fed = is_fed(snapshot.program, snapshot.tensors)
        of = poisoning.of(snapshot.step, snapshot.found, snapshot.reached.loss, fed)
        if of is None and snapshot.carried_on is not None:
            of = snapshot.consequence_of
        if of is not None:
            poisoning.add(snapshot.step, of)
        elif not self.wants(snapshot.step):
            self._teller.unsaved()
            return None
        self.snapshots.append(replace(snapshot, consequence_of=of))
        self.paths.append(None)
        self._write(len(self.snapshots) - 1)
        kept, path = self.snapshots[-1], self.paths[-1]
        shown = self.shown(path) if path is not None else None
        self._teller.found(kept, shown, self._disk.leaves(kept))
        self._put()
        return (kept, shown) if of is None else None

    @in_turn
    def keep_asked(self, snapshot: Snapshot) -> Path | None:
        """Write a step that nothing is wrong with, and return where; None if it could not be."""
        self._in_this_process()
        path = self._disk.save(replace(snapshot, rank=self.rank, worker=self.worker, run=self._record.run))
        if path is not None:
            self.saved.append(path)
        return path

    def foretell(self, forecast: Forecast, snapshot: Snapshot | None) -> None:
        """Say what is about to happen, keep the step that shows it, and call whoever wants to know. snapshot: None if there is none."""
        forecast = self._foretell(forecast, snapshot)
        if self._on_warning is not None:  # out of turn: what it calls may wait for another thread
            self._on_warning(forecast)

    @in_turn
    def _foretell(self, forecast: Forecast, snapshot: Snapshot | None) -> Forecast:
        path = None
        if snapshot is not None and sum(one.snapshot is not None for one in self.warnings) < self.limit:
            path = self.keep_asked(replace(snapshot, notes=(*snapshot.notes, ("said_before", forecast.sentence))))
        forecast = replace(forecast, snapshot=None if path is None else self.shown(path))
        self.warnings.append(forecast)
        self._teller.forecast(forecast)
        self.note("said_before", f"step {forecast.step}: {forecast.sentence}", forecast.step)
        return forecast

    @in_turn
    def keep_check(self, check: Check, snapshot: Snapshot) -> None:
        """Say what would kill a loss, and keep the step that it was asked of."""
        path = self.keep_asked(snapshot)
        shown = None if path is None else self.shown(path)
        self.checks.append(check)
        self._teller.checked(check, shown)
        next_ = "" if shown is None else f" nanscope check {shown}"
        self.note("checked_beforehand", f"checked beforehand, step {check.step}: {check.sentence}{next_}", check.step)

    @in_turn
    def mark(self, step: int, update: int = 1, /, **changes: Any) -> None:
        """Add to what the incidents of the running step reached, in memory and in their files."""
        for index, known in enumerate(self.snapshots):
            if (known.step, known.update) == (step, update):
                self._change(index, replace(known, reached=replace(known.reached, **changes)))

    @in_turn
    def compare(self, logged: Sequence[object]) -> None:
        """Compare with what the trainer logged at the bad steps. logged: its entries, of which those with step and loss count."""
        for index, snapshot in enumerate(self.snapshots):
            shown = [e["loss"] for e in logged if isinstance(e, dict) and e.get("step") == snapshot.step and "loss" in e]
            loss = snapshot.reached.loss
            if shown and loss is not None and isinstance(shown[0], (int, float)):
                snapshot.settings["logged_loss"] = float(shown[0])
                if not math.isfinite(loss) and math.isfinite(shown[0]):
                    notes = [n for n in snapshot.notes if n[0] != "logged_loss"]
                    notes.append(("logged_loss", f"the trainer logged {shown[0]} for this step; the true loss was {loss}"))
                    self._change(index, replace(snapshot, notes=tuple(notes)))

    @in_turn
    def close(self, raised: str = "") -> None:
        """End the run. raised: class of the exception that ended it."""
        if self._finished or self._pid != os.getpid():
            return
        if self._join is not None and self.backwards:
            self._in_this_process()
        self._had_peers = has_peers()
        self._ask_peers(PATIENCE)
        self._finished, self._verdict = True, None
        for index, path in enumerate(self.paths):
            if path is None or not path.exists():
                self._write(index)  # there may be room again, or somebody has deleted it
        self._teller.end()
        try:
            self.history.close()
        except OSError as error:
            self._disk.failed("the history could not be written", error)
        self._record = replace(self._record, ended=now(), status=self._last_status(), raised=raised)
        if self._join is None or not self._record.member:
            self._put()
        self._disk.end(PATIENCE)
        if self._mirror is not None:
            self._mirror.adopts |= self._leads
            if not self._mirror.flush() and self._record.world > 1:
                self.gather()
        took = time.monotonic() - self._opened
        self._unheard = "" if raised else self._peers.unheard(min(PATIENCE, PART * took))
        if self._unheard:
            self._teller.unheard(self._unheard)

    def conclude(self) -> None:
        """The run is over, also in the processes that took part: fetch what they wrote, and say how it ended in view of that."""
        self.gather()
        self._record = replace(self._record, status=self._last_status())
        self._put()
        self._disk.end(PATIENCE)

    @in_turn
    def verdict(self) -> Verdict:
        """Return what was found so far, complete once the book is closed."""
        if self._verdict is None or self._verdict[0] != len(self.snapshots) or not self._finished:
            peers = has_peers() or self._had_peers
            others = of_other_ranks(self.folder, self.snapshots, wait=self._finished, dropped=self._dropped) if peers else {}
            found = verdict(
                [*self.snapshots, *others.values()],
                [*(self.shown(path) if path else None for path in self.paths), *(self.shown(Path(path)) for path in others)],
                files=[*self.paths, *map(Path, others)],
                notes=[*self.notes, *self._untrained(), *self._without_gradient(), *self._not_on_disk(), *self._of_the_unheard()],
                steps=self.steps,
                skipped=self.skipped,
                repaired=self.repaired,
                bad_steps=self.bad_steps,
                backwards=self.backwards,
                gaps=self.gaps,
                aftermath=self._aftermath,
                history=self.history.entries,
            )
            self._verdict = (len(self.snapshots), replace(found, rank=self.rank) if peers else found)
        return self._verdict[1]

    def _without_gradient(self) -> list[Note]:
        last = self.history.entries[-1].step if self._still and self.history.entries else 0
        if last - self._still + 1 < STILL:
            return []
        return [Note("no_gradient", f"every gradient has been exactly 0 since step {self._still}: nothing is trained", self._still)]

    def _of_the_unheard(self) -> list[Note]:
        return [Note("not_heard_of", self._unheard)] if self._unheard else []

    def _untrained(self) -> list[Note]:
        if not self._by_scaler:
            return []
        if self.steps < UNTRAINED or self._by_scaler < self.steps:
            of = f"{self._by_scaler} of {count(self.steps, 'step')}"
            return [Note("scaler_skipped", f"the loss scaler skipped {of}, whose gradients overflowed")]
        return [Note("nothing_trained", f"the loss scaler skipped all {self.steps} steps: nothing was trained")]

    @in_turn
    def skip(self, step: int) -> None:
        """Count a step that this rank keeps from its weights."""
        self.skipped += 1
        self._skips.append(step)

    @in_turn
    def repair(self, another: bool) -> None:
        """Count a backward pass whose gradients were mended. another: its step is counted by nobody else, and was not known to be bad."""
        self.repaired += 1
        self.bad_steps += another

    @in_turn
    def drop(self, step: int) -> None:
        """A step that was counted here, and that the trainer dropped: the other ranks may have counted none."""
        if len(self._dropped) < DROPPED:
            self._dropped = sorted([*self._dropped, step])
            if has_peers():
                self._put()

    def refuse_to_skip(self, step: int, why: str) -> None:
        """A bad step was taken although it was to be skipped. why: in words."""
        if not any(note.slug == "skip_refused" for note in self.notes):
            log.warning("nanscope [skip-refused]: step %d: %s", step, why)
            self.note("skip_refused", why, step)

    def _ask_peers(self, patience: float) -> None:
        """Look up what the other ranks say of the steps at which only theirs tells what ours means. patience: seconds to wait for them."""
        reduced = {snapshot.step for snapshot in self.snapshots if _is_reduced(snapshot.observation)}
        if not self._peers.asks({*reduced, *self._skips}) or not has_peers():
            return
        self.gather()
        for step, entries in self._peers.lines({*reduced, *self._skips}, patience, self._dropped).items():
            fine = [str(entry.rank) for entry in entries if not entry.bad and math.isfinite(entry.grad_norm or 0.0)]
            if step in self._skips and fine:
                text = f"step {step}: rank {self.rank} skipped its update, rank {', '.join(fine)} made it: {UNLIKE}"
                log.warning("nanscope [skipped-alone]: %s", text)
                self.note("skipped_alone", text, step)
            if step in reduced and len(fine) == len(entries):  # a reduction would have brought it to all of them
                for index, snapshot in enumerate(self.snapshots):
                    seen = snapshot.observation
                    if snapshot.step == step and _is_reduced(seen):
                        late = replace(seen, kind=Kind.NONFINITE, origin=replace(seen.origin, op=WRITTEN_LATE))
                        self._change(index, replace(snapshot, observation=late))

    def _change(self, index: int, snapshot: Snapshot) -> None:
        old = self.snapshots[index]
        if (snapshot.reached, snapshot.notes, snapshot.observation.kind) != (old.reached, old.notes, old.observation.kind):
            self.snapshots[index] = snapshot
            self._verdict = None
            self._write(index)

    def _write(self, index: int) -> None:
        self.paths[index] = self._disk.save(self.snapshots[index])
        self.paths = [path if path is not None and self._disk.holds(path) else None for path in self.paths]

    def _put(self) -> None:
        """Write what is known of the run so far."""
        self._record = replace(
            self._record,
            steps=self.steps,
            skipped=self.skipped,
            repaired=self.repaired,
            bad_steps=self.bad_steps,
            backwards=self.backwards,
            gaps=tuple(self.gaps),
            notes=tuple(Remark(note.slug, note.text, note.step) for note in (*self.notes, *self._not_on_disk())),
            aftermath=tuple(self._aftermath),
            held_peak=self._held_peak,
            dropped=tuple(self._dropped),
            first=BadStep.of_snapshot(min(self.snapshots, key=lambda one: one.observation.suspect)) if self.snapshots else None,
        )
        self._disk.write(self._record)

    def _status(self) -> Status:
        """What the verdict will call itself, without a diagnosis."""
        if self.snapshots:
            return Status.SUSPECT if all(snapshot.observation.suspect for snapshot in self.snapshots) else Status.NONFINITE
        return Verdict((), steps=self.steps, bad_steps=self.bad_steps, backwards=self.backwards, gaps=tuple(self.gaps)).status

    def _last_status(self) -> str:
        """What the record says in the end: nothing where others have trained, and this process has only started them."""
        led = self._join is not None and any(path.name != self._record.file_name for path in self.folder.glob("run.rank*.json"))
        return "" if led else str(self._status())

    def _not_on_disk(self) -> list[Note]:
        kept = zip(self.snapshots, self.paths, strict=True)
        lost = [snapshot for snapshot, path in kept if path is None and not self._disk.leaves(snapshot)]
        if not lost:
            return []
        missing = sorted({snapshot.step for snapshot in lost})
        steps = f"step{'' if len(missing) == 1 else 's'} {listed([str(step) for step in missing])}"
        why = f"{steps} could not be kept on disk: {self._disk.problem or 'there is no folder to write to'}"
        found = [one for one in lost if one.consequence_of is None and one.found.phase is not None]  # else the finding was on the log alone
        return [Note("not_on_disk", "; ".join([why, *(f"step {one.step}: {what_and_where(one)}" for one in found[:WORDED])]))]


def _is_reduced(seen: Observation) -> bool:
    """Is it a gradient that came by all-reduce?"""
    return seen.origin.op == REDUCED and not seen.exchanged
