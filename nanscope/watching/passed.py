"""Losses that are not finite and that nobody differentiates: the trainer's own guard saw them, and went on.

    if not torch.isfinite(loss):
        continue

A metric that goes by unused looks much the same. So what was differentiated, or went into what was, is nobody's loss passed over; what was
read and not tested is worth a word; and of what was computed beside a loss that was differentiated nobody knows what it is. Two values of
one forward pass that are tested are one loss that is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nanscope.capture.doubts import WEIGHTS, Doubt, is_weight, read_by
from nanscope.capture.modules import ModuleWatch
from nanscope.capture.tape import Tape
from nanscope.program.numbers import is_finite
from nanscope.program.program import Program
from nanscope.text import line_in, number
from nanscope.torch_inside import base_of
from nanscope.watching.logbook import Logbook
from nanscope.watching.recording import Recording
from nanscope.watching.thrown import ThrownAway

TERM = "the code tested it, and left it out of the loss that it differentiated"
INSTEAD = "the code tested it, and differentiated another number in its place"


@dataclass(frozen=True, slots=True)
class Passed:
    """One of them. joins: it belongs to the step of what is differentiated now. term: it is no loss, but what was left out of that one."""

    recording: Recording
    joins: bool
    term: bool


class PassedOver:
    """Asked when a backward pass begins, when an optimizer is about to step, and when the block ends."""

    def __init__(self, tape: Tape, modules: ModuleWatch, logbook: Logbook) -> None:
        self._tape, self._modules, self._logbook = tape, modules, logbook
        self._told: set[int] = set()  # values, the last time that there were any
        self._thrown = ThrownAway(tape, modules, logbook)

    def losses(
        self, programs: Sequence[Program], step: int, ours: Callable[[], Mapping[int, int]], refused: bool, last: bool
    ) -> list[Passed]:
        """Return the losses that were passed over since the last time.

        programs: of what is differentiated now. step: the running one. ours: counts references to tensors that nobody comes back by.
        refused: an exception ends the block, and what was tested last, and was bad, is why, be it a loss or what one was to be made of.
        last: nothing will be differentiated any more.
        """
        used = {value for program in programs for value in read_by(program)}
        self._thrown.learn(programs)
        asked = self._tape.doubts.take() if self._tape.in_doubt else []
        unasked = bool(programs) or (last and not refused and step > 1)
        thrown = self._thrown.numbers(used, asked, last, ours) if asked or unasked else []
        if unasked:
            self._thrown.look_at_models(used, thrown, step, last)
        doubts = [*(doubt for doubt in thrown if doubt.tested or unasked), *asked]
        if not doubts:
            return []
        left = [doubt for doubt in doubts if doubt.value.id not in used]
        fine = torch.stack([is_finite(doubt.extremes) for doubt in left]).tolist() if left else []
        bad = [doubt for doubt, flag in zip(left, fine, strict=True) if not flag]
        bad = [doubt for doubt in bad if doubt.value.id not in self._told]
        begun = min(filter(self._is_made, used), default=math.inf) if bad else math.inf
        lines = {program.site_of(call) for program in programs for call in program.calls}
        instead = bool(programs) and all(leaf.diff and leaf.origin in WEIGHTS for one in programs for leaf in one.leaves)  # of no batch
        found: list[Passed] = []
        told: set[int] = set()
        for doubt in bad:
            recording = self._judged(doubt, used, told, step, refused and doubt is bad[-1])
            if recording is not None:
                joins = begun < doubt.value.id
                calls = () if doubt.program is None else doubt.program.calls
                other = doubt.program is not None and bool(calls) and doubt.program.site_of(calls[-1]) not in lines
                recording.left_out = TERM if joins and other else INSTEAD if instead and other else ""
                found.append(Passed(recording, joins or (instead and other), joins and other))
                told |= {doubt.value.id, *(read_by(doubt.program) if doubt.program is not None else ())}
        self._told = {doubt.value.id for doubt in bad} or self._told
        for doubt in (*thrown, *asked):
            doubt.close()
        return found

    def _judged(self, doubt: Doubt, used: set[int], told: set[int], step: int, refused: bool) -> Recording | None:
        """Return a loss that was passed over; what is none, or may be none, is told in another way. told: values behind the others."""
        self._tape.doubts.open(doubt)
        if doubt.is_old or self._is_beside(doubt, told):
            return None
        beside = doubt.may_be_old or self._is_beside(doubt, used)
        if not doubt.tested or (beside and not doubt.truth):
            if self._logbook.takes_notes():
                extremes = doubt.extremes.flatten().tolist()
                bad = next((one for one in extremes if not math.isfinite(one)), extremes[0])
                text = f"{_name(doubt)} was {number(bad)}, and nothing was differentiated that it went into"
                self._logbook.note("nonfinite_absorbed", text, step)
        elif (beside or doubt.extremes.numel() != 1) and not (refused and doubt.truth and doubt.program is not None):
            text = f"what {_name(doubt)} would have done, which was not finite and was never differentiated"
            self._logbook.gap("not-differentiated", text, step)
        else:
            calls, frozen = self._modules.so_far()
            recording = Recording(
                doubt.program,
                doubt.tensors,
                doubt.extremes,
                calls,
                None,
                frozen=frozen,
                places=doubt.places,
                glimpses=tuple(self._tape.glimpses.values()),
                taken=dict(self._tape.taken),
            )
            recording.look_between(self._tape)
            return recording
        return None

    def _is_beside(self, doubt: Doubt, used: set[int]) -> bool:
        """Was something that it was computed from differentiated?"""
        own = read_by(doubt.program) if doubt.program is not None else ()
        return any(value in used and self._is_made(value) for value in own)

    def _is_made(self, value: int) -> bool:
        """Has it a gradient, and is no weight, nor a view of one?"""
        one = self._tape.values.get(value)
        if one is None or not one.diff or (one.tensor is not None and is_weight(base_of(one.tensor))):
            return False
        return one.leaf is None or one.leaf.origin not in WEIGHTS


def _name(doubt: Doubt) -> str:
    """What the code calls it, and where it was made."""
    program = doubt.program
    site = program.site_of(program.calls[-1]) if program is not None and program.calls else None
    if site is None:
        return "a value of a model" if program is not None else "a value"
    return f"{site.name or site.expression or 'a value'} ({line_in(site.file, site.line)})"
