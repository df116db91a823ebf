"""What deep looks find: damage that leaves every number finite. Asked of the steps in which the inside of the models was listened to.

    overflow inside, loss and gradients finite  →  the model is run again as a program, and held against float64
    loss                                        →  its own program is held against float64, if that is small
    update of an optimizer                      →  a few weights are held against what float64 makes of its state,
                                                   which is asked for infinities

What cannot be held against float64 is noted, and no incident.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import torch

from nanscope.capture.alone import alone
from nanscope.capture.awake import Awake
from nanscope.capture.depth import Room, Sounding
from nanscope.capture.sites import Place
from nanscope.capture.source import Key, apart, site_of
from nanscope.errors import ProgramError
from nanscope.locate.trace import Trace
from nanscope.locate.twin import absorbed, residue
from nanscope.program.numbers import dtype_name, tensor_bytes
from nanscope.snapshot.observation import Kind, Observation
from nanscope.snapshot.step import Reached
from nanscope.text import line_in, show_index
from nanscope.torch_inside import compiles_backward
from nanscope.watching.deeper import reruns_of, second_look
from nanscope.watching.examine import Examiner, Hit
from nanscope.watching.keeping import Keeper
from nanscope.watching.laid import name_of
from nanscope.watching.logbook import Logbook
from nanscope.watching.look import Look, run_again
from nanscope.watching.recording import Recording
from nanscope.watching.updates import Updates, infinite_state

LARGEST = 16 << 20  # bytes of the leaves of a loss that is run again though nothing speaks against it
OFTEN = 3  # times that one line is looked into which overflows, and does no harm


class Deep:
    """Asks. awake: listens to the models of the thread."""

    def __init__(self, awake: Awake, examiner: Examiner, keeper: Keeper, logbook: Logbook) -> None:
        self._awake, self._examiner, self._keeper, self._logbook = awake, examiner, keeper, logbook
        self._updates = Updates()
        self._looked: Counter[Key] = Counter()  # how often, at lines that overflow
        self._told: set[tuple[str | None, int | None]] = set()

    def begin(self, recording: Recording) -> None:
        """A backward pass begins."""
        recording.heard = self._awake.take()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        if self._awake.is_due and not self._keeper.course.bad:
            self._updates.begin(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer, taken: bool) -> None:
        """It has stepped, or, if it is not taken, has done nothing: did it go as far as it should have?"""
        if not taken or self._keeper.course.bad:
            self._updates.let_go()
            return
        if self._awake.is_due:
            self._ask_the_state(optimizer)
        found = self._updates.judge(optimizer)
        if found is None:
            return
        weight, seen = found
        name = name_of(weight, self._examiner.modules.parameters()) or "a weight"
        if (seen.optimizer, None) not in self._told:
            self._told.add((seen.optimizer, None))
            recordings = self._keeper.course.recordings
            seen = replace(seen, weight=name, origin=replace(seen.origin, variable=name))
            last = recordings[-1] if recordings else None
            reached = Reached(last.value if last is not None else None)
            self._keeper.save(last, reached, lambda blank: replace(blank, observation=seen, found=seen), seen)

    def _ask_the_state(self, optimizer: torch.optim.Optimizer) -> None:
        found = infinite_state(optimizer)
        if found is None:
            return
        weight, state, index = found
        name = name_of(weight, self._examiner.modules.parameters()) or "a weight"
        where = f"{state} of {name} is infinite at {show_index(index)} in {type(optimizer).__name__}"
        text = f"{where}: what is divided by it is 0, and trains no more"
        self._logbook.note("infinite_state", text, self._keeper.course.counts.number)

    def judge(self, recording: Recording) -> None:
        """A backward pass has ended, and its loss and gradients are finite: are they also right?"""
        heard, recording.heard = recording.heard, None
        if heard is None:
            return
        sounding = heard.ask()
        self._keeper.course.line.add_room(*_words(sounding.room))
        if self._keeper.course.bad or compiles_backward():  # what we differentiate would be compiled, too
            return
        try:
            hit = self._of_models(recording, sounding) if sounding.overflows else self._of_loss(recording)
        except ProgramError:
            return  # it holds what no program can make again
        if hit is not None and hit.look is not None and hit.look.location is not None:
            site = hit.look.location.origin.site
            line = (site.file, site.line) if site is not None else (None, None)
            if line not in self._told:
                self._told.add(line)
                self._keeper.keep(hit)

    def _of_models(self, recording: Recording, sounding: Sounding) -> Hit | None:
        fresh = [(op, place) for op, place in sounding.overflows if self._looked[apart(*place)] < OFTEN]
        self._looked.update({apart(*place) for _, place in fresh})
        if not fresh:
            return None
        look = _second_look(recording, self._examiner)
        if look is None or look.trace is None:
            op, place = fresh[0]
            text = f"{op} overflowed inside the model ({_line_of(place)}), and what was made of it is finite"
            self._logbook.note("nonfinite_absorbed", f"{text}; it could not be held against float64", self._keeper.course.counts.number)
            return self._of_loss(recording)
        return _judged(recording, look)

    def _of_loss(self, recording: Recording) -> Hit | None:
        if recording.program is None or recording.scaled or tensor_bytes(recording.tensors) > LARGEST:
            return None
        return _judged(recording, Look(Trace.of(recording.program, recording.tensors), None))


@alone()
def _second_look(recording: Recording, examiner: Examiner) -> Look | None:
    """Run the models once more as a program; None if that is not possible."""
    reruns = reruns_of(recording, examiner.modules, examiner.tape.budget * 4)
    return run_again(reruns.notes, functools.partial(second_look, recording, reruns))


def _judged(recording: Recording, look: Look) -> Hit | None:
    """Return what is wrong in a step, held against float64."""
    assert look.trace is not None
    for kind, find in ((Kind.ABSORBED, absorbed), (Kind.SPIKE, residue)):
        try:
            found = find(look.trace)
        except ProgramError:  # what it was recorded of has no kernel for float64
            continue
        if found is not None:
            look = Look(look.trace, found.location, look.second, notes=look.notes)
            return Hit(recording, Reached(recording.value), look=look, seen=Observation(kind, scale=found.words))
    return None


def _words(room: Room | None) -> tuple[float | None, str]:
    return (None, "") if room is None else (room.bits, f"{room.op} in {dtype_name(room.dtype)}, {_line_of(room.place)}")


def _line_of(place: Place) -> str:
    code, lasti = place
    site = None if code is None else site_of(code, lasti)
    return "an unknown line" if site is None else line_in(site.file, site.line)
