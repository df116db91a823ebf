"""Keeps a run alive: where a loss hands a bad gradient to its model, the gradient of the proven fix goes in its place.

nanscope [repaired]: step 60: took the gradient of a proven fix, fill ref_log_ratio with 0 where completion_mask excludes it, before exp at
demo.py:206: 24 of 2048 elements of torch.exp(ref_log_ratio) did the harm, distortion 0.0; the trainer logs NaN for this step; the repaired
loss is 0.05304 (19 ms)

It happens inside the backward pass, at the tensors that the loss reads, before a gradient reaches a weight or another rank: each rank mends
its own loss and asks nobody. What no edit is proven on, what lies in the model, and whatever fails in here is skipped, as "skip" does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nanscope.capture.failsafe import Failsafe
from nanscope.capture.feeding import feeding
from nanscope.capture.hooks import acts
from nanscope.capture.unseen import is_traced, unseen
from nanscope.errors import ProgramError
from nanscope.program.local import is_plain
from nanscope.program.numbers import is_finite
from nanscope.snapshot.step import Reached, Snapshot, place
from nanscope.text import count, number
from nanscope.verdict.proof import Proof, Site, prove
from nanscope.watching.examine import Examiner, Hit
from nanscope.watching.keeping import Keeper
from nanscope.watching.logbook import Logbook
from nanscope.watching.mending import Mending
from nanscope.watching.recording import Recording

log = logging.getLogger("nanscope")


class Repair:
    """Mends the gradients of one thread's steps. most: backward passes of the run that are mended; a further one ends it."""

    def __init__(self, keeper: Keeper, examiner: Examiner, logbook: Logbook, failsafe: Failsafe, most: int) -> None:
        self._keeper, self._examiner, self._logbook, self._failsafe, self._most = keeper, examiner, logbook, failsafe, most
        self._known: dict[Site, str] = {}  # edits that were proven
        self._kept: set[Site] = set()

    def watch(self, recording: Recording) -> None:
        """A backward pass begins."""
        recording.mending = Mending()
        recording.mends = partial(self._at_edge, recording, recording.mending)

    def _at_edge(self, recording: Recording, mending: Mending, leaf: int, gradient: Tensor) -> Tensor | None:
        """Hook of a tensor that the loss reads: return what goes on in the place of its gradient, None for itself. Never raises."""
        given: list[Tensor | None] = []
        if not (torch.compiler.is_compiling() or is_traced()):
            with unseen():
                self._failsafe("repair", lambda: given.append(self._mended(recording, mending, leaf, gradient)))
        if not given:
            mending.decided = True
        return given[0] if given else None

    def _mended(self, recording: Recording, mending: Mending, leaf: int, gradient: Tensor) -> Tensor | None:
        if mending.proof is None and not mending.decided:
            if bool(is_finite(gradient)):
                mending.passed.add(leaf)
                return None
            mending.decided = True
            self._decide(recording, mending, leaf, gradient)
        if mending.proof is None or leaf in mending.left:
            return None
        mended = mending.proof.grads.get(leaf)
        return torch.zeros_like(gradient) if mended is None else mended.to(gradient.dtype)

    def _decide(self, recording: Recording, mending: Mending, leaf: int, gradient: Tensor) -> None:
        """Find the edit whose gradient is taken, if there is one."""
        if not _is_within_reach(recording) or (recording.scaled and not self._examiner.at_any_scale(recording)):
            return
        if self._logbook.repaired >= self._most:
            self._keeper.stops = True
            return
        began, fed = time.perf_counter(), feeding(_edge(recording))
        with contextlib.suppress(ProgramError):  # a program that cannot be run again
            proof = prove(self._as_it_is(recording, {} if leaf in fed else {leaf: gradient.detach()}), self._known)
            if proof is None or not all(_goes_along(proof, one) for one in mending.passed | fed):
                return
            scale = 1.0 if recording.scale is None else float(recording.scale.factor)
            mending.proof, mending.left, mending.loss = proof, fed, (proof.row.loss or 0.0) / scale
            mending.seconds = time.perf_counter() - began
            self._known[proof.site] = proof.row.id

    def _as_it_is(self, recording: Recording, grads: dict[int, Tensor]) -> Snapshot:
        """The running step, as far as it takes to run it again."""
        assert recording.program is not None
        step, loss = self._keeper.course.counts.number, recording.loss.detach()
        return Snapshot(step, self._logbook.rank, recording.program, recording.tensors, loss, grads, Reached())

    def keep(self, recording: Recording, mending: Mending, proof: Proof) -> None:
        """A backward pass that was mended has ended: count it, tell it, and keep the first of its origin."""
        course, first = self._keeper.course, proof.site not in self._kept
        another, course.bad = not course.bad, course.bad or not first
        self._logbook.repair(another=another and not first)
        self._kept.add(proof.site)
        told = _Told(proof)
        course.line.repair(told.short, mending.loss, float(recording.unscaled))
        text = told.whole
        if recording.value is not None and not math.isfinite(recording.value):
            text += f"; the trainer logs {number(recording.value)} for this step; the repaired loss is {number(mending.loss)}"
        step = place(course.counts.number, course.counts.update, recording.micro_batch)
        log.warning("nanscope [repaired]: %s: %s (%.0f ms)", step, text, 1000 * mending.seconds)
        if first:
            hit = self._examiner.mended(recording)
            self._keeper.save(recording, hit.reached, partial(self._described, hit, text))

    def _described(self, hit: Hit, text: str, blank: Snapshot) -> Snapshot:
        found = self._examiner.snapshot(hit, blank)
        return replace(found, notes=(*found.notes, ("repaired", text)))


def _edge(recording: Recording) -> dict[int, Tensor]:
    """The tensors between the loss and its model."""
    program = recording.program
    return {} if program is None else {leaf.id: recording.tensors[leaf.id] for leaf in program.leaves if leaf.diff}


def _is_within_reach(recording: Recording) -> bool:
    """Is the gradient at the edge of a loss what its program makes, and nothing bad what it was handed?"""
    edge = _edge(recording)
    hooks = [hook.function for own in recording.others.values() for hook in own if acts(hook)]
    plain = all(tensor.requires_grad and is_plain(tensor) and not bool(tensor.isnan().any()) for tensor in edge.values())
    return bool(edge) and plain and not recording.seeds and all(map(_is_of_ranks, hooks))


def _is_of_ranks(hook: object) -> bool:
    """Is a hook one of torch's own, which gathers weights and changes no gradient?"""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")


ROUNDING = 32  # units in the last place of the largest element


def _goes_along(proof: Proof, leaf: int) -> bool:
    """Does an edit leave the gradient of a leaf as it was? That one went on, or others are added to it."""
    before, after = proof.recorded.get(leaf), proof.grads.get(leaf)
    if before is None or after is None:
        return before is after
    most = ROUNDING * torch.finfo(before.dtype).eps * before.abs().amax()
    return bool(is_finite(before)) and bool(((before - after).abs() <= most).all())


@dataclass(frozen=True, slots=True)
class _Told:
    """What was done, in words."""

    proof: Proof

    @property
    def short(self) -> str:
        """For the history."""
        return f"{self.proof.row.id}{self._where}: {self._elements}, {self._distortion}"

    @property
    def whole(self) -> str:
        """For the log and the report."""
        fix, what = self.proof.row.label, self.proof.what
        return f"took the gradient of a proven fix, {fix}{self._where}: {self._elements} of {what} did the harm, {self._distortion}"

    @property
    def _where(self) -> str:
        file, line, _ = self.proof.site
        return "" if file is None else f" at {Path(file).name}:{line}"

    @property
    def _elements(self) -> str:
        return f"{self.proof.bad} of {count(self.proof.size, 'element')}"

    @property
    def _distortion(self) -> str:
        found = self.proof.row.distortion
        return "no element is healthy" if found is None else f"distortion {found:.1g}" if found else "distortion 0.0"
