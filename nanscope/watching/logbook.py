"""The logbook: what is kept of one run, in memory and in its folder, and what other ranks wrote there.

run.json                                 what ran, written when it begins
history.rank0.jsonl                      one line a step
step-000412.rank0.safetensors            a bad step; `.part2` and so on for further bad micro-batches of it
batch-000001.rank0.safetensors           a step that was asked for
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.program.program import Program
from nanscope.snapshot.coverage import Gap, with_gap
from nanscope.snapshot.file import load, save
from nanscope.snapshot.history import Entry, History
from nanscope.snapshot.observation import Kind
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.diagnose import verdict
from nanscope.verdict.incident import Note, Verdict
from nanscope.version import __version__
from nanscope.watching.surroundings import environment, has_peers

log = logging.getLogger("nanscope")

NOTES = 32  # notes kept per run
PATIENCE = 3.0  # seconds that a finished rank waits for the file of the one that made a NaN


class Logbook:
    """What is known of one run. paths: of the snapshots, None for one that could not be written. saved: files of steps that were asked for.

    folder: the run directory. limit: bad steps saved per run, and bad backward passes per step; later ones are counted.
    """

    def __init__(self, folder: Path, rank: int, limit: int) -> None:
        self.folder, self.rank, self.limit = folder, rank, limit
        self.history = History()
        self.snapshots: list[Snapshot] = []
        self.paths: list[Path | None] = []
        self.saved: list[Path] = []
        self.notes: list[Note] = []
        self.gaps: list[Gap] = []
        self.steps = self.skipped = self.bad_steps = self.backwards = 0
        self._verdict: tuple[int, Verdict] | None = None
        self._finished = self._had_peers = False

    def open(self, about: dict[str, Any]) -> None:
        """Begin the folder. Raises OSError if it cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        started = {"nanscope": __version__, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "environment": environment(None, None)}
        (self.folder / "run.json").write_text(json.dumps({**started, **about}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        path = self.folder / f"history.rank{self.rank}.jsonl"
        path.unlink(missing_ok=True)
        self.history.path = path

    def enter(self, entry: Entry) -> None:
        """Write the line of a step."""
        self.steps += 1
        self.history.append(entry)

    def note(self, slug: str, text: str, step: int) -> None:
        """Keep a note, once."""
        if self.takes_notes() and not any(note.slug == slug and note.text == text for note in self.notes):
            self.notes.append(Note(slug, text, step))

    def gap(self, slug: str, text: str, step: int | None = None) -> None:
        """Keep what training did and was not looked at; counted where it is known. text: what and why, follows "not seen: "."""
        self.gaps = with_gap(self.gaps, Gap(slug, text, self.steps + 1 if step is None else step))
        self._verdict = None

    def takes_notes(self) -> bool:
        """Is there room for another note?"""
        return len(self.notes) < NOTES

    def blank(self, step: int, loss: Tensor | None, part: int, reached: Reached) -> Snapshot:
        """Return the snapshot of a step of which no more is known than how far the harm got. part: which backward pass of it, from 1."""
        return Snapshot(
            step=step,
            rank=self.rank,
            program=Program((), (), -1),
            tensors={},
            loss=None if loss is None else loss.detach().clone(),
            grads={},
            reached=reached,
            history=tuple(self.history.entries),
            environment=environment(loss, None),
            part=part,
        )

    def wants(self, step: int) -> bool:
        """Should another bad backward pass of this step be saved?"""
        saved = [snapshot.step for snapshot in self.snapshots]
        return len({*saved, step}) <= self.limit and saved.count(step) < self.limit

    def keep(self, snapshot: Snapshot) -> None:
        """Keep a bad step, and write it."""
        self.snapshots.append(snapshot)
        self.paths.append(None)
        self._write(len(self.snapshots) - 1)

    def keep_asked(self, snapshot: Snapshot) -> None:
        """Write a step that nothing is wrong with. Raises OSError if it cannot be written."""
        self.saved.append(save(snapshot, self.folder))

    def mark(self, step: int, **changes: Any) -> None:
        """Add to what the incident of the running step reached, in memory and in its file."""
        if self.snapshots and self.snapshots[-1].step == step:
            last = self.snapshots[-1]
            self._change(len(self.snapshots) - 1, replace(last, reached=replace(last.reached, **changes)))

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

    def close(self) -> None:
        """End the run."""
        self._had_peers = has_peers()
        self._finished = True
        self.history.close()

    def verdict(self) -> Verdict:
        """Return what was found so far, complete once the book is closed."""
        if self._verdict is None or self._verdict[0] != len(self.snapshots) or not self._finished:
            peers = has_peers() or self._had_peers
            others = of_other_ranks(self.folder, self.snapshots, wait=self._finished) if peers else {}
            found = verdict(
                [*self.snapshots, *others.values()],
                [*(str(path) if path else None for path in self.paths), *others],
                notes=self.notes,
                steps=self.steps,
                skipped=self.skipped,
                bad_steps=self.bad_steps,
                backwards=self.backwards,
                gaps=self.gaps,
            )
            self._verdict = (len(self.snapshots), found)
        return self._verdict[1]

    def _change(self, index: int, snapshot: Snapshot) -> None:
        if snapshot.reached != self.snapshots[index].reached or snapshot.notes != self.snapshots[index].notes:
            self.snapshots[index] = snapshot
            self._verdict = None
            self._write(index)

    def _write(self, index: int) -> None:
        try:
            self.paths[index] = save(self.snapshots[index], self.folder)
        except OSError as error:
            log.warning("nanscope [snapshot-unwritten]: step %d could not be saved: %s", self.snapshots[index].step, error)


def of_other_ranks(folder: Path, own: Sequence[Snapshot], *, wait: bool) -> dict[str, Snapshot]:
    """Return the snapshots that other ranks wrote into the same folder for the steps at which a NaN arrived from elsewhere, by path.

    Ranks tell each other through files: a collective here could be one that only some ranks enter.
    """
    steps = {snapshot.step for snapshot in own if snapshot.observation.kind is Kind.ARRIVED}
    ranks = {snapshot.rank for snapshot in own}
    found: dict[str, Snapshot] = {}
    until = time.monotonic() + (PATIENCE if wait else 0.0)
    while steps:
        for path in sorted(path for step in steps for path in folder.glob(f"step-{step:06d}.rank*.safetensors")):
            if str(path) not in found:
                with contextlib.suppress(NanscopeError):
                    snapshot = load(path)
                    if snapshot.rank not in ranks:
                        found[str(path)] = snapshot
        made = {path: snapshot for path, snapshot in found.items() if snapshot.observation.kind is not Kind.ARRIVED}
        if made or time.monotonic() >= until:
            return made
        time.sleep(0.1)
    return {}
