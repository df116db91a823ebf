"""Losses that are computed and thrown away, however the trainer's code came to know that they are bad.

    if not np.isfinite(loss.detach().numpy()):  # no call tells of it
        continue

A line that otherwise makes losses has made a number that is not finite, in a forward pass that is gone and of which nothing is
differentiated: that is worth a word. If the code has tested what it was made of, it is a loss that was passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from nanscope.capture.doubts import WEIGHTS, Doubt, read_by
from nanscope.capture.modules import ModuleCall, ModuleWatch
from nanscope.capture.sites import Place
from nanscope.capture.source import site_of
from nanscope.capture.tape import Tape
from nanscope.program.numbers import is_finite
from nanscope.program.program import Program
from nanscope.text import line_in, number
from nanscope.watching.logbook import Logbook

LINES = 1 << 10  # that are remembered


class ThrownAway:
    """Asked when a backward pass begins whose loss is written down, and when the block ends."""

    def __init__(self, tape: Tape, modules: ModuleWatch, logbook: Logbook) -> None:
        self._tape, self._modules, self._logbook = tape, modules, logbook
        self._lines: set[Place] = set()  # that have made what was differentiated, or called a model that did

    def numbers(self, used: set[int], asked: Sequence[Doubt], last: bool, ours: Callable[[], Mapping[int, int]]) -> list[Doubt]:
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

    def look_at_models(self, used: set[int], thrown: Sequence[Doubt], step: int, last: bool) -> None:
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
                where = "" if site is None else f" ({line_in(site.file, site.line)})"
                text = f"what {call.name} returned{where} was {number(float(bad))}, and nothing was differentiated that it went into"
                self._logbook.note("nonfinite_absorbed", text, step)

    def learn(self, programs: Sequence[Program]) -> None:
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
