"""Losses that are not finite and that nobody differentiates: the trainer's own guard saw them, and went on.

    if not torch.isfinite(loss):
        continue

A metric that goes by unused looks much the same. So what was differentiated, or went into what was, is nobody's loss passed over; what was
read and not tested is worth a word; and of what was computed beside a loss that was differentiated nobody knows what it is. Two values of
one forward pass that are tested are one loss that is passed over.

How the code came to know is not always seen: `np.isfinite(loss.detach().numpy())` makes no call that tells. So it is worth a word, too, if
a line that otherwise makes losses has made a number that is not finite, in a forward pass that is gone and not differentiated anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from nanscope.capture.doubts import WEIGHTS, Doubt, is_weight, read_by
from nanscope.capture.modules import ModuleCall, ModuleWatch
from nanscope.capture.sites import Place
from nanscope.capture.source import site_of
from nanscope.capture.tape import Tape
from nanscope.program.numbers import is_finite
from nanscope.program.program import Program
from nanscope.text import number
from nanscope.torch_inside import base_of
from nanscope.watching.logbook import Logbook
from nanscope.watching.recording import Recording

LINES = 1 << 10  # that are remembered
NOBODYS: Mapping[int, int] = {}


class PassedOver:
    """Asked when a backward pass begins, when an optimizer is about to step, and when the block ends."""

    def __init__(self, tape: Tape, modules: ModuleWatch, logbook: Logbook) -> None:
        self._tape, self._modules, self._logbook = tape, modules, logbook
        self._told: set[int] = set()  # values, the last time that there were any
        self._lines: set[Place] = set()  # that have made what was differentiated, or called a model that did

    def losses(
        self, programs: Sequence[Program], step: int, refused: bool = False, last: bool = False, ours: Mapping[int, int] = NOBODYS
    ) -> list[tuple[Recording, bool]]:
        """Return the losses that were passed over since the last time, and whether what is differentiated now was begun before they were.

        programs: of what is differentiated now. step: the running one. refused: an exception ends the block, and what was tested last, and
        was bad, is why, be it a loss or what one was to be made of. last: nothing will be differentiated any more.
        ours: references to tensors that nobody comes back by, by identity.
        """
        used = {value for program in programs for value in read_by(program)}
        self._learn(programs)
        asked = self._tape.doubts.take() if self._tape.in_doubt else []
        unasked = bool(programs) or (last and not refused and step > 1)
        thrown = self._thrown_away(used, asked, last, ours) if asked or unasked else []
        if unasked:
            self._look_at_models(used, thrown, step, last)
        doubts = [*(doubt for doubt in thrown if doubt.tested or unasked), *asked]
        if not doubts:
            return []
        left = [doubt for doubt in doubts if doubt.value.id not in used]
        fine = torch.stack([is_finite(doubt.extremes) for doubt in left]).tolist() if left else []
        bad = [doubt for doubt, flag in zip(left, fine, strict=True) if not flag]
        bad = [doubt for doubt in bad if doubt.value.id not in self._told]
        begun = min(filter(self._is_made, used), default=math.inf) if bad else math.inf
        found: list[tuple[Recording, bool]] = []
        told: set[int] = set()
        for doubt in bad:
            recording = self._judged(doubt, used, told, step, refused and doubt is bad[-1])
            if recording is not None:
                found.append((recording, begun < doubt.value.id))
                told |= {doubt.value.id, *(read_by(doubt.program) if doubt.program is not None else ())}
        self._told = {doubt.value.id for doubt in bad} or self._told
        for doubt in (*thrown, *asked):
            doubt.close()
        return found

    def _thrown_away(self, used: set[int], asked: Sequence[Doubt], last: bool, ours: Mapping[int, int]) -> list[Doubt]:
        """Return the numbers of forward passes of which nothing is differentiated, and that nobody has asked about. If somebody has about
        what they were made of, it is for them: whether `per_token_loss` is finite is a question about its mean."""
        known = {doubt.value.id: doubt for doubt in asked}
        thrown = self._tape.doubts.thrown_away(used, last, ours)
        found = [doubt for doubt in thrown if doubt.value.id not in known and self._is_of_a_loss(doubt.value.id)]
        if not found:
            return []
        calls, _ = self._modules.so_far()
        at_work = self._came_of(calls, used).keys()
        left = []
        for doubt in found:
            self._tape.doubts.open(doubt)
            own = read_by(doubt.program) if doubt.program is not None else set()
            models = self._came_of(calls, own)
            evaluates = bool(models) and all(call.training is False for call in models.values())
            leaves = doubt.program.leaves if doubt.program is not None else ()
            of_weights = all(leaf.diff and leaf.origin in WEIGHTS for leaf in leaves if leaf.id in own)
            if evaluates or of_weights or not at_work.isdisjoint(models):
                doubt.close()
                continue
            doubt.truth = any(known[value].truth for value in own & known.keys())
            doubt.tested = any(known[value].tested for value in own & known.keys())
            left.append(doubt)
        return left

    def _look_at_models(self, used: set[int], thrown: Sequence[Doubt], step: int, last: bool) -> None:
        """A model may return its loss: of a call of which nothing is differentiated it is worth a word, if its line otherwise makes losses.

        thrown: what else is told.
        """
        calls = [*self._modules.gone, *self._modules.so_far()[0]]
        if not any(call.numbers for call in calls):
            return
        at_work = self._came_of(calls, used)
        self._lines.update(call.caller for call in at_work.values() if len(self._lines) < LINES)
        told = self._came_of(calls, {value for doubt in thrown if doubt.program is not None for value in read_by(doubt.program)})
        for call in calls:
            if call.number in at_work or call.number in told or call.caller not in self._lines or call.training is False:
                continue
            # what a note of ours refers to is gone if its line has made another one
            is_over = last or call.is_gone() or any(one.caller == call.caller and one.number > call.number for one in at_work.values())
            bad = next((one for one in call.numbers if not bool(is_finite(one))), None) if is_over else None
            if bad is not None and self._logbook.takes_notes():
                code, lasti = call.caller
                site = None if code is None else site_of(code, lasti)
                where = "" if site is None else f" ({Path(site.file).name}:{site.line})"
                text = f"what {call.name} returned{where} was {number(float(bad))}, and nothing was differentiated that it went into"
                self._logbook.note("nonfinite_absorbed", text, step)

    def _learn(self, programs: Sequence[Program]) -> None:
        """Remember the lines that make losses: the last that make a number, before one is scaled or divided by how many there are."""
        for program in programs:
            made = (self._line_of(value) for value in self._numbers_behind(program.output))
            self._lines.update(line for line in made if line is not None and len(self._lines) < LINES)

    def _is_of_a_loss(self, value: int) -> bool:
        """Has a line made it that otherwise makes losses, or what it was scaled from?"""
        return any(self._line_of(number) in self._lines for number in self._numbers_behind(value))

    def _numbers_behind(self, value: int) -> Iterator[int]:
        """Yield a value and those that it was made of, one of the other, as long as each is one number with a gradient."""
        last: int | None = value
        while last is not None:
            yield last
            entry = self._tape.entries.get(self._tape.known.made_by.get(last, -1))
            read = [one for number in (entry.reads() if entry is not None else ()) if (one := self._tape.values.get(number)) is not None]
            behind = {one.id for one in read if one.diff}
            last = behind.pop() if len(behind) == 1 and all(math.prod(one.shape) == 1 for one in read if one.diff) else None

    def _line_of(self, value: int) -> Place | None:
        """Where a value was made, None if it came from outside."""
        entry = self._tape.entries.get(self._tape.known.made_by.get(value, -1))
        return None if entry is None else (entry.code, entry.lasti)

    def _came_of(self, calls: Sequence[ModuleCall], values: Iterable[int]) -> dict[int, ModuleCall]:
        """Which calls of models have made one of some values, by number? Of two that have made something in the same place, the later."""
        made_by = {place: call for call in calls for place in call.outputs}
        places = self._tape.places(value for value in values if value in self._tape.values).values()
        return {call.number: call for place in places if (call := made_by.get(place)) is not None}

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
    return f"{site.name or site.expression or 'a value'} ({Path(site.file).name}:{site.line})"
