"""The running step, gate by gate: a backward pass begins and ends, the optimizer steps, the step is closed.

While all is well a step costs one line of history. What is bad at a gate is handed to `examine`, and what that returns to the logbook.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from nanscope.capture.failsafe import Failsafe
from nanscope.capture.gauge import Gauge, Reading
from nanscope.capture.modules import ModuleWatch
from nanscope.capture.tape import Tape
from nanscope.program.numbers import count_bad, norms
from nanscope.program.program import Program
from nanscope.snapshot.history import Entry
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.incident import NonFiniteError
from nanscope.verdict.sentence import absorbed
from nanscope.watching.examine import Examiner, Hit
from nanscope.watching.logbook import Logbook
from nanscope.watching.oddities import Usual
from nanscope.watching.recording import Recording, scaled_by_hand
from nanscope.watching.recordings import Recordings

OnNonFinite = Literal["record", "skip", "stop"]


class Step:
    """The optimizer step that is running; the next one begins in the same object.

    targets: what is watched. asked: numbers of steps to save although nothing is wrong with them.
    """

    def __init__(
        self,
        tape: Tape,
        modules: ModuleWatch,
        failsafe: Failsafe,
        examiner: Examiner,
        logbook: Logbook,
        on_nonfinite: OnNonFinite,
        asked: frozenset[int],
    ) -> None:
        self._tape, self._modules, self._failsafe = tape, modules, failsafe
        self._examiner, self._logbook = examiner, logbook
        self._on_nonfinite, self._asked = on_nonfinite, asked
        self._recordings = Recordings(tape.account, self._look_at_waiting)
        self._current: Recording | None = None
        self._closed = True
        self._bad = False  # this step is known to be bad
        self._foreign = False  # weights were already spoilt by gradients that were not made here
        self._first = False  # the optimizer that steps has no state yet
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._loss: float | None = None
        self._norm: float | None = None
        self._reading: Reading | None = None
        self._began = time.perf_counter()
        # what outlives a step
        self._gauge = Gauge()
        self._steppers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._usual_loss, self._usual_norm = Usual(), Usual()
        self._told: set[tuple[str, int]] = set()  # lines at which something was absorbed

    @property
    def number(self) -> int:
        """Steps are counted from 1, as trainers log them; a resumed trainer's own count goes on."""
        for target in self._examiner.targets:
            count = getattr(getattr(target, "state", None), "global_step", None)
            if isinstance(count, int):
                return count + 1
        return self._logbook.steps + 1

    # The gates.

    def before_backward(self, roots: list[Tensor], seeds: list[Tensor | None]) -> None:
        """A backward pass begins: take the program of its loss from the tape, and watch the gradients at its leaves."""
        self._modules.reset()
        self._modules.busy = True
        if self._current is not None:
            self._current.let_go()  # its backward pass raised, and was never seen to end
        if self._closed:
            self._recordings.clear()
            self._closed = self._bad = False
        program: Program | None = None
        tensors: dict[int, Tensor] = {}
        root = roots[0]
        if len(roots) == 1 and seeds[0] is None and not self._tape.broken:
            with contextlib.suppress(LookupError):
                program, tensors = self._tape.program(self._tape.value_of(root))
        recording = Recording(
            program,
            tensors,
            root.detach(),
            self._modules.finish(),
            self._tape.scaled or scaled_by_hand(program, tensors),
            glimpses=tuple(self._tape.glimpses.values()),
            taken=dict(self._tape.taken),
        )
        self._current = recording
        if program is not None:
            self._read_gauge(program)
        recording.watch(self._failsafe, self._tape.account)

    def after_backward(self) -> None:
        """A backward pass has ended: on a CPU look at once, elsewhere when the optimizer is about to step."""
        recording, self._current = self._current, None
        self._modules.busy = False
        if self._tape.broken:
            self._logbook.gap("tape-failed", f"the loss of a backward pass could not be recorded ({self._tape.broken})")
        self._tape.forget()
        if recording is None:
            return
        self._logbook.backwards += 1
        recording.close()
        self._recordings.append(recording)
        self._tape.leave_room()
        if recording.loss.device.type == "cpu":
            if recording.value is not None:
                self._loss = (self._loss or 0.0) + recording.value
            if not all(bool(flag) for flag in recording.flags):
                self._examine(recording)
            elif not all(bool(flag) for flag in recording.given):
                self._keep(self._examiner.swallowed(recording))
            elif self._reading is not None and self._reading.headroom is not None and self._reading.headroom < 0:
                self._note_absorbed(recording)
        if self._asked and not recording.examined and self.number in self._asked:
            self._failsafe("save-step", self._save_asked, recording)
        recording.looked = recording.loss.device.type == "cpu"

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to step: one look at everything that is still on the device, then at the gradients."""
        self._first = not optimizer.state
        self._look_at_waiting(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [p.grad if not p.grad.is_sparse else p.grad.coalesce().values() for p in parameters if p.grad is not None]
        self._norm = total = float(torch.linalg.vector_norm(norms(grads))) if grads else None
        if total is None:
            return
        if total == 0 and not self._bad:
            self._failsafe("clip-hit", self._look_at_zeros, grads)
        elif math.isfinite(total) or not count_bad(grads):  # finite elements may have an infinite norm
            if not self._bad:
                self._failsafe("spike", self._look_for_spikes, total)
        else:
            self._gradients_are_bad(parameters, grads)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped: are the weights still finite? Then close the step."""
        held = bool(self._held)
        for parameter, grad in self._held:
            parameter.grad = grad
        self._held.clear()
        weights = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        bad = count_bad(weights)
        self._logbook.poisoning.weights(self.number, bad)
        if held:
            self._logbook.mark(self.number, stepped="skipped", weights=len(weights), bad_weights=bad)
        elif self._bad:
            self._logbook.mark(self.number, stepped="taken", weights=len(weights), bad_weights=bad)
        elif bad and not self._foreign:
            self._weights_are_bad(optimizer, len(weights), bad)
        if not self._closed:
            self._close()
        if set(self._steppers) == {optimizer}:  # no other one will ask what the gradients are made of
            self._recordings.let_go()
        self._steppers.add(optimizer)

    def finish(self) -> None:
        """The block is left: look at what no optimizer looked at."""
        if self._closed or not self._recordings.made:
            return
        for recording in self._waiting():
            if not all(bool(flag) for flag in recording.flags):
                self._examine(recording)
        if not self._bad and not any(recording.scaled for recording in self._recordings):
            parameters = [p for _, p in self._modules.parameters().values() if p.grad is not None]
            grads = [p.grad for p in parameters if p.grad is not None]
            if count_bad(grads):
                self._keep(self._examiner.gradients(self._recordings, parameters, grads))
                self._note_gone()

    def forget(self) -> None:
        """Let go of everything that was held."""
        if self._current is not None:
            self._current.let_go()
        self._current = None
        self._recordings.clear()

    # What is found at them.

    def _waiting(self) -> list[Recording]:
        return [r for r in self._recordings if not r.examined and not r.looked]

    def _look_at_waiting(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        waiting = self._waiting()
        if not waiting:
            return
        flags = [torch.stack(r.flags).all() for r in waiting]
        given = [torch.stack(r.given).all() if r.given else flag for r, flag in zip(waiting, flags, strict=True)]
        losses = torch.stack([r.loss.float() for r in waiting])
        answers = torch.stack([torch.stack(flags).float(), torch.stack(given).float(), losses]).tolist()  # the one transfer of a step
        for recording, fine, clean, loss in zip(waiting, *answers, strict=True):
            self._loss = (self._loss or 0.0) + loss
            recording.looked = True
            if not fine:
                self._examine(recording, optimizer)
            elif not clean:
                self._keep(self._examiner.swallowed(recording))

    def _examine(self, recording: Recording, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Something at the edge of the loss was non-finite: was anything harmed, and what did it?"""
        recording.examined = True
        hit = self._examiner.loss(recording)
        if recording.scaled and optimizer is None and not (hit is not None and hit.loss_bad):
            return  # a GradScaler looks at these gradients itself; if it steps all the same, before_step sees them
        if hit is None:
            self._note_absorbed(recording)
            return
        self._keep(hit)
        if self._on_nonfinite == "stop":
            self._stop()

    def _gradients_are_bad(self, parameters: list[nn.Parameter], grads: list[Tensor]) -> None:
        if self._on_nonfinite == "skip":
            self._hold_back(parameters)  # first of all: nothing that fails below may let this step through
        if not self._recordings.made:
            # Nobody differentiated anything here: gradients set by hand, or by a backward pass before the block.
            self._foreign = True
            text = "an optimizer stepped on non-finite gradients that no backward pass in the watched block made"
            self._logbook.note("foreign_gradients", text, self.number)
        elif not self._bad:
            self._failsafe("gradient-hit", lambda: self._keep(self._examiner.gradients(self._recordings, parameters, grads)))
            self._note_gone()
        self._failsafe("mark", self._mark_gradients, len(grads), count_bad(grads))
        if self._on_nonfinite == "stop":
            self._stop()

    def _note_gone(self) -> None:
        """What made the gradients bad may be a backward pass that was let go of."""
        if self._recordings.gone:
            text = "the first backward passes of a step whose gradients went bad, which were not held any more when that was seen"
            self._logbook.gap("not-held", f"{text} (a larger budget= holds more)", self.number)

    def _mark_gradients(self, total: int, bad: int) -> None:
        if self._bad and self._logbook.snapshots:
            reached = self._logbook.snapshots[-1].reached
            most = {"gradients": max(total, reached.gradients or 0), "bad_gradients": max(bad, reached.bad_gradients or 0)}
            self._logbook.mark(self.number, **most)

    def _look_at_zeros(self, grads: list[Tensor]) -> None:
        if self._recordings:
            self._keep(self._examiner.clip(self._recordings[-1], grads))

    def _look_for_spikes(self, total: float) -> None:
        """Everything is finite: is it also of the size that this run is used to?"""
        raw = self._tape.norms[-1] if self._tape.norms else None  # before a clip
        norm = max(total, float(raw)) if raw is not None and raw.numel() == 1 and raw.is_cpu else total
        sizes = (("loss", abs(self._loss or 0.0), self._usual_loss), ("gradient norm", norm, self._usual_norm))
        found = [
            f"{size / usual.largest:.2g} times the largest {name} of the {usual.count} steps before"
            for name, size, usual in sizes
            if usual.exceeded(size)
        ]
        if found and self._recordings:
            hit = self._examiner.spike(max(self._recordings, key=lambda r: abs(r.value or 0.0)), found[0])
            if hit is not None:
                self._keep(hit)
                return
        for _, size, usual in sizes:
            usual.add(size)

    def _weights_are_bad(self, optimizer: torch.optim.Optimizer, total: int, bad: int) -> None:
        """Loss and gradients were finite, the update was not."""
        recording = self._recordings[-1] if self._recordings else None
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        reached = Reached(recording.value if recording else None, len(grads), count_bad(grads), total, bad, "taken")
        self._save(recording, reached, functools.partial(self._examiner.update, optimizer, self._first))

    def _keep(self, hit: Hit | None) -> None:
        if hit is not None:
            self._save(hit.recording, hit.reached, functools.partial(self._examiner.snapshot, hit))

    def _save(self, recording: Recording | None, reached: Reached, describe: Callable[[Snapshot], Snapshot]) -> None:
        """Count a bad step, and have it described and kept if there is room for it."""
        another, self._bad = not self._bad, True
        if self._logbook.count(self.number, recording, another):
            self._logbook.keep(describe(self._blank(recording, reached)))

    def _blank(self, recording: Recording | None, reached: Reached) -> Snapshot:
        part = next((number for number, known in enumerate(self._recordings, start=1 + self._recordings.gone) if known is recording), 1)
        return self._logbook.blank(self.number, recording.loss if recording is not None else None, part, reached)

    def _save_asked(self, recording: Recording) -> None:
        snapshot = self._examiner.asked(recording, self._blank(recording, Reached(recording.value)))
        if snapshot is not None:
            self._logbook.keep_asked(snapshot)

    def _note_absorbed(self, recording: Recording) -> None:
        """A value overflowed and did no harm: worth a word, once for each line."""
        location = self._examiner.absorbed(recording) if self._logbook.takes_notes() else None
        if location is None or location.origin.site is None:
            return
        line = (location.origin.site.file, location.origin.site.line)
        if line not in self._told:
            self._told.add(line)
            self._logbook.note("nonfinite_absorbed", absorbed(location, self.number), self.number)

    def _hold_back(self, parameters: list[nn.Parameter]) -> None:
        """Let the optimizer step over nothing: without gradients it leaves weights and state as they are."""
        self._held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in self._held:
            parameter.grad = None
        self._logbook.skipped += 1

    def _stop(self) -> None:
        self._logbook.mark(self.number, stepped="stopped")
        verdict = self._logbook.verdict()
        path = self._logbook.paths[-1] if self._logbook.paths else None
        message = f"{verdict.sentence}\nsnapshot: {path or 'not written'}"
        raise NonFiniteError(message, verdict=verdict, snapshot=str(path) if path else None)

    def _read_gauge(self, program: Program) -> None:
        reading = self._gauge.read(program, self._tape.tensor)
        self._reading = reading if self._reading is None else self._reading.joined(reading)

    def _close(self) -> None:
        now, reading = time.perf_counter(), self._reading
        entry = Entry(
            step=self.number,
            rank=self._logbook.rank,
            time=round(time.time(), 3),
            seconds=round(now - self._began, 6),
            loss=self._loss,
            grad_norm=self._norm,
            log_ratio_max=reading.highest if reading else None,
            log_ratio_max_masked=reading.highest_masked if reading else None,
            headroom=reading.headroom if reading else None,
            clip_fraction=reading.clipped if reading else None,
            nonfinite=self._bad,
        )
        self._began, self._loss, self._norm, self._reading = now, None, None, None
        self._closed = True
        self._logbook.held_peak = self._tape.account.peak
        self._logbook.enter(entry)
