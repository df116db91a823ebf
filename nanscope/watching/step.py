"""The running step, gate by gate: a backward pass begins and ends, the optimizer steps, the step is closed.

While all is well a step costs one line of history. What is bad at a gate is handed to `examine`, and what that returns to the logbook.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from nanscope.capture.awake import Awake
from nanscope.capture.failsafe import Failsafe
from nanscope.capture.feeding import parameters_behind
from nanscope.capture.modules import ModuleCall, ModuleWatch
from nanscope.capture.tape import Tape
from nanscope.capture.validation import is_refusal
from nanscope.program.numbers import count_bad
from nanscope.program.program import Program
from nanscope.snapshot.step import Reached, Stepped
from nanscope.watching.absorbed import Absorbed
from nanscope.watching.acting import OnNonFinite
from nanscope.watching.answers import fetched
from nanscope.watching.arriving import Arriving
from nanscope.watching.beforehand import Beforehand
from nanscope.watching.consumed import Consumed
from nanscope.watching.counts import Counts, Tally
from nanscope.watching.course import Course
from nanscope.watching.cruise import Cruise, Familiar
from nanscope.watching.deep import Deep
from nanscope.watching.ending import Ending
from nanscope.watching.examine import Examiner, Hit
from nanscope.watching.gradients import Gradients
from nanscope.watching.inside import REFUSED, Inside
from nanscope.watching.keeping import Keeper
from nanscope.watching.line import Line
from nanscope.watching.logbook import Logbook
from nanscope.watching.optimizers import Optimizers, updated_by
from nanscope.watching.outlook import Outlook
from nanscope.watching.passed import PassedOver
from nanscope.watching.readable import readable
from nanscope.watching.recording import Recording, Unwritten
from nanscope.watching.recordings import Recordings
from nanscope.watching.refusal import refused_by, refused_by_call
from nanscope.watching.relay import Relay
from nanscope.watching.remains import Remains
from nanscope.watching.repair import Repair
from nanscope.watching.scale import LossScale, scale_of
from nanscope.watching.skipping import BY_HAND, IN_A_CLOSURE, Skipping
from nanscope.watching.spared import Spared
from nanscope.watching.weights import Weights


class Step(Relay):
    """The optimizer step that is running; the next one begins in the same object.

    max_repairs: see `watch`. asked: numbers of steps to save although nothing is wrong with them. tally, optimizers: those of all threads,
    each of which has a step of its own. late: it had computed something before it was watched. awake: listens to its models in deep steps.
    checks: each loss is checked once.
    """

    def __init__(
        self,
        tape: Tape,
        modules: ModuleWatch,
        failsafe: Failsafe,
        examiner: Examiner,
        logbook: Logbook,
        on_nonfinite: OnNonFinite,
        max_repairs: int,
        asked: frozenset[int],
        tally: Tally,
        optimizers: Optimizers,
        late: bool,
        awake: Awake,
        checks: bool,
    ) -> None:
        self._failsafe, self._examiner, self._logbook = failsafe, examiner, logbook
        self._asked = asked
        recordings = Recordings(tape.account, self._look_at_waiting)
        course = Course(Counts(examiner.targets, tally), recordings, logbook.another_poisoning())
        remains = Remains(modules, tape, optimizers)
        keeper = Keeper(course, examiner, logbook, failsafe, remains.told, late=late, stops=on_nonfinite == "stop")
        super().__init__(tape, modules, optimizers, remains, keeper)
        self._current: Recording | None = None
        self._cruise = Cruise(tape)
        self._familiar: Familiar | None = None  # what is known of the running pass, where its loss was not written down when it began
        self._over: list[int] | None = []  # values that it differentiates for the last time, None if they are not known
        self._again: list[int] = []  # those that it may differentiate again
        self._first = False  # the optimizer that steps has no state yet
        self._stepping: torch.optim.Optimizer | None = None  # has begun, and may call back for the loss
        self._overflowed = False  # a fused optimizer was told by its scaler to do nothing
        self._inside = Inside()
        # what outlives a step
        self._outlook = Outlook(tape, keeper, examiner, logbook)
        self._beforehand = Beforehand(keeper, logbook, checks)
        self._ending = Ending(tape, modules, self._optimizers)
        self._skipping = Skipping(tape, logbook) if on_nonfinite in ("skip", "repair") else None
        self._repair = Repair(keeper, examiner, logbook, failsafe, max_repairs, tape.budget * 4) if on_nonfinite == "repair" else None
        self._passed = PassedOver(tape, modules, logbook)
        self._caught: tuple[str, Hit] | None = None  # what a call has refused, and what it said
        # that are in no model, as far as is seen
        self._bare: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
        self._absorbed = Absorbed(examiner, logbook)
        self._gradients = Gradients(keeper, examiner, logbook, failsafe)
        self._weights = Weights(remains, self._gradients, keeper, examiner, logbook, failsafe)
        self._spared = Spared(keeper, examiner, logbook, self._weights.or_buffers_bad, on_nonfinite != "record")
        self._consumed = Consumed()
        self._arriving = Arriving(tape.replacing, failsafe)
        self._deep = Deep(awake, examiner, keeper, logbook)
        awake.step = lambda: tally.begun + self._course.closed

    @property
    def number(self) -> int:
        """The number of the running step, of the next one between two."""
        return self.counts.next if self._course.closed else self.counts.number

    # The gates.

    def before_backward(self, roots: list[Tensor], seeds: list[Tensor | None], kept: bool) -> None:
        """A backward pass begins: take the program of its loss from the tape, and watch the gradients at its leaves.

        kept: its graph stays, and may be differentiated again.
        """
        if self._current is not None:
            self._current.let_go()  # what it came to could not be told
        self._go_on()
        if self._course.closed and self._recordings and not self._tape.in_doubt:  # of what was passed over it is asked first
            self._failsafe("step-over", self._let_go)
        if len(roots) == 1 and seeds[0] is None and not kept and self._stepping is None and self._repair is None and self._optimizers.any:
            self._failsafe("cruise", self._cruise.recognise, roots[0])
        self._familiar = found = self._cruise.take()
        self._failsafe("step-ends", self._look_whether_it_was_dropped)
        if found is None:
            self._failsafe("tape", self._tape.settle)
        sliced = [] if self._tape.broken or found is not None else [self._sliced(root) for root in roots]
        self._failsafe("passed-over", self._keep_passed_over, [program for program, _ in sliced if program is not None])
        calls, frozen = self._modules.finish()
        models = {model for call in calls for model in call.models}
        self.counts.meet(models)
        self._inside.begin(models)
        if self._course.closed:
            self._open()
        self.counts.begin()
        self._failsafe("refused", self._keep_caught)
        self._course.took.clear()
        if found is not None:
            recording = self._recognised(found, calls, frozen)
        else:
            recording = self._recorded(sliced, roots, seeds, kept, calls, frozen)
        self._current = recording
        self._failsafe("deep", self._deep.begin, recording)
        self._recordings.reach(recording)
        self._failsafe("gauge", self._outlook.read, recording, found)
        if not self._optimizers.any and recording.program is not None:  # one would look at the gradients of what it updates
            self._bare.update(parameters_behind(recording.program, recording.tensors))
        self._failsafe("consumed", self._consumed.before, self._optimizers.without(models))
        self._failsafe("arriving", self._arriving.before, models)
        if self._skipping is not None:
            self._failsafe("skipping", self._skipping.before_backward, self._modules.seen)
        if recording.unwritten is None:
            self._failsafe("glue", recording.look_between, self._tape)
            self._failsafe("handed", recording.look_at_seeds, self._tape)
        if self._repair is not None:
            self._repair.watch(recording)
        recording.watch(self._failsafe, self._tape.account, self._modules.parts)
        if found is None:
            self._failsafe("cruise", self._cruise.learn, roots[0], recording, self._outlook.dials)
        if not (recording.waits or all(map(bool, recording.flags))):
            self._failsafe("remains", self._remains.look_back)
            if self._consumed.known and not recording.flags[0] and self._repair is None:
                self._failsafe("loss-hit", self._examine, recording)  # its weights are others when it is over

    def _recorded(
        self,
        sliced: list[tuple[Program | None, dict[int, Tensor]]],
        roots: list[Tensor],
        seeds: list[Tensor | None],
        kept: bool,
        calls: list[ModuleCall],
        frozen: list[ModuleCall],
    ) -> Recording:
        """A backward pass whose loss is written down. sliced: the program of each root, and its leaves."""
        program, tensors = sliced[0] if len(sliced) == 1 and seeds[0] is None else (None, {})
        given = readable([seed for seed in seeds if seed is not None], "gradients that backward was given", self._logbook.gap)
        self._over, self._again = (known := self._tape.known_as(roots)), []
        if kept:
            self._over, self._again = [], known or []
        return Recording(
            program,
            tensors,
            readable(roots[:1], "losses", self._logbook.gap)[0],
            calls,
            scale_of(program, tensors, self._tape.scaler),
            glimpses=tuple(self._tape.glimpses.values()),
            taken=dict(self._tape.taken),
            micro_batch=self.counts.micro_batch,
            places=self._tape.places(tensors),
            frozen=frozen,
            seeds=tuple(given),
            aside=sliced[0] if given and len(sliced) == 1 else (None, {}),
        )

    def _recognised(self, found: Familiar, calls: list[ModuleCall], frozen: list[ModuleCall]) -> Recording:
        """A backward pass whose loss is written down when somebody asks."""
        loss = readable([found.root], "losses", self._logbook.gap)[0]
        been, still_read = found.been_through(calls)
        unwritten = Unwritten(found.root, found.leaves, found.edges, been, still_read, found.made, self._tape.settle)
        glimpses = tuple(self._tape.glimpses.values())
        recording = Recording.recognised(
            loss, calls, unwritten, glimpses=glimpses, micro_batch=self.counts.micro_batch, frozen=frozen, tape=self._tape
        )
        self._modules.came_before(calls)
        self._tape.later(partial(recording.write_down, self._tape, self._failsafe), recording.lose, [found.root])
        return recording

    def after_backward(self, raised: BaseException | None = None) -> None:
        """A backward pass has ended: on a CPU look at once, elsewhere when the optimizer is about to step. raised: how it ended, if so."""
        recording, self._current = self._current, None
        self._failsafe("arriving", self._arriving.after)
        if recording is not None and recording.unwritten is not None and raised is None:
            self._has_passed(recording, recording.unwritten)
        else:
            if self._familiar is not None:
                self._over, self._again = self._tape.known_as([self._familiar.root]), []  # it has been written down amid its pass
            own, between = recording.been_through() if recording is not None and self._over else (set(), [])
            waiting = self._tape.forget(over=[*self._over, *between] if self._over else self._over, roots=self._again)
            if recording is None:
                return
            if self._over is not None:
                self._modules.wait(recording.calls, waiting, own or set(recording.places.values()))
        self._familiar = None
        self._tape.made_by_backward(recording.inputs())
        self._logbook.differentiated()
        recording.close()
        if not recording.is_whole():
            recording.forget_program()
            self._logbook.gap("weights-released", "the inside of a loss that read weights which their sharded model has let go of")
        if raised is None:
            self._recordings.append(recording)
        self._tape.leave_room()
        if self._skipping is not None:
            self._failsafe("skipping", self._skipping.after_backward, self._modules.seen)
        self._failsafe("gradients-left", self._course.left.take, recording, self._tape.mark())
        if raised is not None:
            self._look_at_raised(recording, raised)
            self._failsafe("step-inside", self._step_inside, False)
            return
        fine = recording.waits or all(bool(flag) for flag in recording.flags)
        # a loss that is bad says enough; gradients that a sharded model keeps elsewhere are waited for
        waits = recording.waits or not (fine or not recording.flags[0] or self._examiner.at_hand(recording))
        if not waits and len(self._waiting()) > 1:
            self._look_at_waiting()  # what went bad first is told first
        elif not waits:
            if recording.value is not None:
                self._course.line.add_loss(float(recording.unscaled))
            if recording.examined:
                pass
            elif not fine:
                self._examine(recording)
            elif not all(bool(flag) for flag in recording.given):
                self._keeper.keep(self._examiner.swallowed(recording))
            else:
                self._look_at_fine(recording)
        if self._course.bad and not recording.waits:
            self._failsafe("mark", self._count_gradients, recording)  # nobody may ask for them again before they are dropped
        if self._stepping is not None:
            self._failsafe("closure", self._look_at_a_closure, self._stepping)
        if self._asked and not recording.examined and self.counts.number in self._asked:
            self._failsafe("save-step", self._keeper.asked, recording)
        if not recording.examined and not self._course.bad:
            self._failsafe("check", self._beforehand.look, recording)
        recording.looked = not waits
        self._failsafe("step-inside", self._step_inside, True)

    def _has_passed(self, recording: Recording, unwritten: Unwritten) -> None:
        """The backward pass of a loss that is not written down has ended: nothing waits that was called before it."""

        def over() -> list[int] | None:
            known = self._tape.known_as([unwritten.root])
            return None if known is None else [*known, *recording.been_through()[1]]

        self._tape.has_passed(over)
        self._modules.wait(recording.calls, unwritten.still_read, unwritten.been.keys())

    def _look_at_fine(self, recording: Recording) -> None:
        self._failsafe("deep", self._deep.judge, recording)
        self._failsafe("forecast", self._outlook.judge, recording)
        if self._course.line.overflowed and not self._course.bad:
            self._absorbed.note(recording, self.counts.number)
        elif recording.scale is not None and (self._course.search.stuck or recording.scale.is_low()):
            self._look_at_gradients()

    def _count_gradients(self, recording: Recording) -> None:
        grads = self._examiner.at_hand(recording)
        if bad := count_bad(grads):
            self._keeper.mark_gradients(len(grads), bad)

    def before_step_inside(self, optimizer: torch.optim.Optimizer) -> None:
        """One is about to step while a backward pass goes on, in a hook: its gradients may be gone when that has ended."""
        self._first = not optimizer.state
        self._optimizers.add(optimizer, self._modules.seen)
        self._inside.add(optimizer, self._gradients.of(optimizer)[1])

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool = False) -> None:
        """The optimizer is about to step: one look at everything that is still on the device, then at the gradients.

        closure: it may make others first.
        """
        self._go_on(steps=True)
        self._stepping = optimizer
        if self._course.closed and (not self._recordings.made or self._updates_another_model(optimizer)):
            self._open()  # on gradients that no backward pass here has made
        self._failsafe("passed-over", self._keep_passed_over, [])
        self._first = not optimizer.state
        self._optimizers.add(optimizer, self._modules.seen)
        found_inf = getattr(optimizer, "found_inf", None)
        self._overflowed = found_inf is not None and bool(found_inf)
        self._look_at_waiting(None if self._overflowed else optimizer)
        if not self._overflowed:
            self._failsafe("spared", self._spared.settle, None)
        parameters, grads = self._gradients.of(optimizer)
        if self._overflowed and self._recordings[-1:] and (scale := self._recordings[-1].scale) is not None:
            self._skip(scale)
        if not grads or self._overflowed or (closure and optimizer in self._course.took):
            return
        by_hand = any(recording.scale is not None and recording.scale.scaler is None for recording in self._recordings)
        line = Line() if self._course.closed else self._course.line  # of two optimizers the first has closed the step
        acts = self._skipping is not None or self._keeper.stops
        total = line.measure(grads, self._tape, getattr(optimizer, "grad_scale", None), by_hand, read=acts)
        if self._skipping is not None:
            self._failsafe("skipping", self._skipping.before_step, self.number, parameters, grads, total)
        self._gradients.judge(optimizer, parameters, grads, total)
        self._failsafe("deep", self._deep.before_step, optimizer)
        if self._skipping is not None and self._skipping.skips:
            self._keeper.unexplained()

    def _updates_another_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does it update what was called here, and is none of that what the last step was about?"""
        weights = {id(weight) for weight in updated_by(optimizer)}
        if self._recordings.reach_to(weights):
            return False
        return any(id(weight) in weights for model in self._modules.outermost() for weight in model.parameters())

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped: are the weights still finite? Then close the step."""
        self._stepping = None
        held = self._skipping is not None and self._skipping.skips
        if self._skipping is not None:
            self._skipping.after_step()
        self._look_at_waiting(None if self._overflowed else optimizer)  # what a closure has differentiated since
        self._failsafe("deep", self._deep.after_step, optimizer, not (held or self._overflowed))
        self._look_at_weights([optimizer], Stepped.SKIPPED if held else Stepped.BY_SCALER if self._overflowed else self._course.line.taken)

    def _look_at_weights(self, optimizers: Sequence[torch.optim.Optimizer], stepped: Stepped) -> None:
        """They have stepped: close the step."""
        optimizer = optimizers[-1]
        self._failsafe("spared", self._spared.settle, stepped)
        weights, bad = self._course.wrote[optimizer] = self._weights.after(optimizers, self._first)
        self._failsafe("tape", self._tape.updated, (weight for one in optimizers for weight in updated_by(one)))
        self._tape.begin_stretch()
        # of two optimizers the second has no say in what the first has written
        if self._course.bad and (bad or not self._course.closed or stepped is Stepped.SKIPPED):
            wrote = [*self._course.wrote.values()]
            weights, bad = sum(of for of, _ in wrote), sum(bad for _, bad in wrote)
            self._keeper.mark(stepped=stepped, weights=weights, bad_weights=bad, optimizer=self._optimizers.name(optimizer))
        if not self._course.closed:
            self._course.line.optimizer = self._optimizers.name(optimizer)
            self._close(stepped)
        if set(self._course.steppers) == set(optimizers):  # no other one will ask what the gradients are made of
            self._failsafe("step-over", self._let_go)
        elif not self._course.steppers and self._are_all(optimizers):
            self._failsafe("step-over", self._tape.let_go_of_gradients)
        self._course.steppers.update(optimizers)
        self._course.took.update(optimizers)

    def _are_all(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Do they update all that is trained?"""
        updated = {id(weight) for one in optimizers for weight in updated_by(one)}
        trained = (weight for model in self._modules.outermost() for weight in model.parameters() if weight.requires_grad)
        return all(id(weight) in updated for weight in trained)

    def _let_go(self) -> None:
        """The step is over, and whoever may ask about it has asked."""
        done = frozenset().union(*(one.unwritten.made for one in self._recordings if one.unwritten is not None))
        self._recordings.let_go()
        self._tape.close(done)
        self._modules.came_before(())

    def _step_inside(self, may_stop: bool) -> None:
        """A backward pass has ended in which optimizers may have stepped: what they did is a step. may_stop: training, if that was bad."""
        optimizers = self._inside.optimizers
        if not optimizers:
            self._taken_by_hooks(may_stop)
            return
        total, grads, bad = self._inside.seen()
        self._course.line.norm = total
        self._look_at_waiting(harmless=not bad)
        if not bad:
            self._gradients.look_for_spikes(optimizers[0], total)
        else:
            self._gradients.were_bad(grads, bad)
            if self._skipping is not None:
                self._logbook.refuse_to_skip(self.counts.number, REFUSED)
        self._look_at_weights(optimizers, self._course.line.taken)
        if self._course.bad and may_stop:
            self._keeper.stop_if_asked()

    def _taken_by_hooks(self, may_stop: bool) -> None:
        """Hooks of the trainer's own may have updated the weights, or passed over gradients that no optimizer will see."""
        by_hand = self._consumed.after()
        stepped = None if self._course.closed else Stepped.BY_HAND if by_hand else self._inside.taken_by_hooks(self._course.bad)
        if stepped is None:
            return
        harmless = stepped is Stepped.BY_HAND and not self._weights.bad()
        self._look_at_waiting(dropped=not harmless, harmless=harmless)
        if stepped is Stepped.BY_HAND:
            self._failsafe("own-update", self._weights.after_own_update, True)
        self._keeper.mark(stepped=stepped)
        self._close(stepped)
        if self._course.bad and may_stop:
            self._keeper.stop_if_asked()

    def begin_beside(self, other: Step) -> None:
        """Take part in the step of another thread, which is differentiating right now."""
        if self._course.closed and not other._course.closed:
            self._open(other.counts)

    def finish(self, raised: str = "", thread: bool = False, error: BaseException | None = None) -> None:
        """The block is left: look at what no optimizer looked at. raised: class of what ended it. thread: only the thread has ended. error:
        that, where it came through this thread."""
        if not raised:
            self._go_on()
        self._course.raised = False
        self._look_whether_it_was_dropped(last=True, raised=bool(raised))
        self._failsafe("spared", self._spared.settle, None)
        self._failsafe("passed-over", self._keep_passed_over, [], bool(raised), True)
        if error is not None and not self._course.bad:
            self._failsafe("passed-over", self._keep_refused, error)
        self._failsafe("refused", self._keep_caught, error, True)
        self._logbook.held(self._tape.account.peak)
        if not self._course.closed and self._recordings.made:
            for recording in self._waiting():
                if not all(bool(flag) for flag in recording.flags):
                    self._examine(recording)
            if not self._course.bad and not any(recording.scaled for recording in self._recordings):
                self._look_at_gradients()
        if self._tape.gave_gradients and not (self._logbook.backwards or self._logbook.steps):
            self._logbook.gap("own-gradients", "what was done with the gradients that torch.autograd.grad gave", self.number)
        if not thread:
            self._failsafe("remains", self._look_at_what_is_left)

    def forget(self) -> None:
        """Let go of everything that was held."""
        if self._current is not None:
            self._current.let_go()
        self._current = self._caught = None
        self._course.end()

    def let_go(self) -> None:
        """Refer to no tensor any more, not even weakly."""
        if self.runs and self._recordings:
            self._logbook.gap("swapped", "what was recorded of a step before its weights were swapped for others", self.number)
        if self._current is not None:
            self._current.let_go()
        self._current = self._caught = None
        self._recordings.let_go_of_weights()
        self._remains.let_go()
        self._bare.clear()
        self._consumed.let_go()
        self._arriving.let_go()

    def passed_over(self) -> None:
        """The loop has come round, and what its code had found wrong with a loss it did not differentiate."""
        self._keep_passed_over([])

    def refused(self, args: tuple[object, ...], error: Exception) -> None:
        """A call raises: if that is for NaN among what it was given, it is told when the loop has caught it."""
        if self._caught is None:
            hit = refused_by_call(self._examiner, args, error, self._tape.callers.place())
            self._caught = None if hit is None else (str(error), hit)

    # A backward pass that raised.

    def _look_at_raised(self, recording: Recording, error: BaseException) -> None:
        """Nobody may step on what it left: look now, at what it had come to; what was asked to be raised waits for the error to pass."""
        self._course.raised, recording.examined = True, True
        self._recordings.made += 1
        try:
            if recording.value is not None:
                self._course.line.add_loss(float(recording.unscaled))
            hit, known = self._examiner.raised(recording, error)
            if not self._is_of_scale(recording, hit):
                self._keeper.keep(hit)
            if not known:
                self._gap_raised()
                self._course.raised = self._course.bad  # else all is said
        finally:
            recording.let_go()

    def _gap_raised(self) -> None:
        self._logbook.gap("backward-raised", "what came of a backward pass that raised", self.number)

    def _go_on(self, steps: bool = False) -> None:
        """Training goes on: what has a backward pass that raised become? steps: an optimizer steps on what it left."""
        raised, self._course.raised = self._course.raised, False
        if not raised:
            return
        if not self._course.bad:
            self._gap_raised()
            return
        self._keeper.stop_if_asked()
        if not (steps or self._course.closed or self._course.left.parameters) and self._recordings.made == 1:
            self._keeper.mark(stepped=Stepped.BY_TRAINER)
            self._close(Stepped.BY_TRAINER)

    # A step that no optimizer takes.

    def _look_whether_it_was_dropped(self, last: bool = False, raised: bool = False) -> None:
        """Another backward pass begins, or the block ends: does it still belong to the running step? Then its gradients are still there.

        raised: by an exception, and nobody had come to drop it.
        """
        if self._course.closed or self._stepping is not None or not self._recordings.made:
            return
        stepped = self._ending.became(self._course, last, raised)
        if stepped is None:
            return
        overflowed = self._ending.norm_is_bad() or self.counts.skipped
        taken = stepped is Stepped.BY_HAND
        self._look_at_waiting(dropped=not taken)
        self._failsafe("spared", self._spared.settle, stepped)
        scales = [recording.scale for recording in self._recordings if recording.scale is not None]
        if overflowed and not self._course.bad and (not scales or self._course.search.stuck):
            self._gradients.keep()
            self._keeper.unexplained()
        if taken:
            if scales and not self._course.bad and self._weights.bad():  # what a scaler would have skipped was taken
                for recording in [one for one in self._recordings if not all(map(bool, one.flags))]:
                    self._examine(recording, dropped=True, taken=True)
            self._failsafe("own-update", self._weights.after_own_update)
        elif scales:
            self._skip(scales[-1])
        optimizer = self._optimizers.of(self._course.left.parameters)
        self._course.line.before = self._ending.norm(self._course.left) if all(scale.scaler is not None for scale in scales) else None
        self._course.line.optimizer = self._optimizers.name(optimizer)
        self._keeper.mark(stepped=stepped, optimizer=self._course.line.optimizer)
        stops = self._course.bad and not self._course.stopped  # who was told and goes on has dropped it
        self._close(stepped)
        if stops:
            self._keeper.stop_if_asked()

    def _keep_passed_over(self, programs: list[Program], refused: bool = False, last: bool = False) -> None:
        """A loss that was passed over is a micro-batch of the running step, or a step of its own. programs: what is differentiated now.

        refused: an exception ends the block. last: it ends.
        """
        for passed in self._passed.losses(programs, self.number, self._cruise.references, refused, last):
            recording = passed.recording
            reached = Reached() if passed.term else Reached(recording.value)
            self._keep_undifferentiated(Hit(recording, reached, loss_bad=True), passed.joins, refused, not recording.left_out)
            if not passed.term:  # what it was left out of is taken
                self._keeper.stop_if_asked()

    def _keep_refused(self, error: BaseException) -> None:
        """An exception ends the block: what it refused, if that was NaN."""
        hit = refused_by(self._examiner, error)
        if hit is not None:
            self._keep_undifferentiated(hit, False, True)
            self._keeper.stop_if_asked()

    def _keep_caught(self, error: BaseException | None = None, last: bool = False) -> None:
        """The loop has gone on after a call that raised, and that is of the step which it begins. last: it begins none. error: what ends
        the block all the same."""
        caught, self._caught = self._caught, None
        if caught is None or (error is not None and (str(error) == caught[0] or is_refusal(error))):
            return
        if last:
            self._keep_undifferentiated(caught[1], False, True)
        else:
            caught[1].recording.micro_batch = self.counts.micro_batch
            self._keeper.keep(caught[1])

    def _keep_undifferentiated(self, hit: Hit, joins: bool, refused: bool, counted: bool = True) -> None:
        """counted: it is a micro-batch of its own."""
        alone, recording = self._course.closed and not joins, hit.recording
        if self._course.closed:
            self._open()
        if counted:
            self.counts.begin()
        recording.micro_batch = self.counts.micro_batch + (not counted)
        if hit.reached.loss is not None:
            self._course.line.add_loss(hit.reached.loss)
        self._keeper.keep(hit)
        if alone:
            stepped = Stepped.NONE if refused else Stepped.BY_TRAINER  # which did not come to it
            self._keeper.mark(stepped=stepped)
            self._close(stepped)

    def _sliced(self, root: Tensor) -> tuple[Program | None, dict[int, Tensor]]:
        try:
            return self._tape.program(self._tape.value_of(root))
        except LookupError:
            return None, {}

    def _skip(self, scale: LossScale) -> None:
        """A scaled step was skipped, as a scaler does that looks for its scale."""
        was_stuck = self._course.search.stuck
        self._course.search.skip(scale)
        if scale.is_low() and not self._course.bad:
            text = f"why a step was skipped at a loss scale of {float(scale.factor):g}, at which nothing overflows that does not without it"
            self._logbook.gap("skipped-by-scaler", text, self.counts.number)
        if self._course.search.stuck and not was_stuck:
            skipped = f"{self._course.search.skipped} steps in a row were skipped"
            text = f"{skipped}, and no loss scale fits: these gradients are not finite at any"
            self._logbook.note("scaler_stuck", text, self.counts.number)

    def _look_at_gradients(self) -> None:
        known = {key: parameter for key, (_, parameter) in self._modules.parameters().items()} | dict(self._bare)
        self._gradients.look_at(known.values())

    def _look_at_a_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has let a closure differentiate, and takes its step on that without asking again."""
        parameters, grads = self._gradients.of(optimizer)
        if grads and not math.isfinite(self._course.line.measure(grads, self._tape, None, by_hand=False, read=True)) and count_bad(grads):
            self._look_at_waiting(optimizer)  # what went bad first is told first
            if self._skipping is not None and not self._skipping.skips:
                self._logbook.refuse_to_skip(self.counts.number, IN_A_CLOSURE)
            self._gradients.are_bad(parameters, grads)

    def _look_at_what_is_left(self) -> None:
        models = list(self._modules.seen)  # which nobody else may hold by now
        found = self._weights.left()
        if found is not None:
            self._open()
            self._weights.keep_left(found)
        models.clear()

    # What is found at them.

    def _waiting(self) -> list[Recording]:
        return [r for r in self._recordings if not r.examined and not r.looked]

    def _look_at_waiting(self, optimizer: torch.optim.Optimizer | None = None, dropped: bool = False, harmless: bool = False) -> None:
        waiting = self._waiting()
        if not waiting:
            return
        flags = [torch.stack(r.flags).all() for r in waiting]
        given = [torch.stack(r.given).all() if r.given else flag for r, flag in zip(waiting, flags, strict=True)]
        losses = torch.stack([r.unscaled.float() for r in waiting])
        asked = torch.stack([torch.stack(flags).float(), torch.stack(given).float(), losses])
        for recording, fine, clean, loss, numbers in fetched(waiting, asked):
            self._failsafe("gauge", self._outlook.take, recording, numbers)
            self._course.line.add_loss(loss)
            recording.looked = True
            if not fine:
                self._examine(recording, optimizer, dropped, harmless)
            elif not clean:
                self._keeper.keep(self._examiner.swallowed(recording))
            else:
                self._failsafe("deep", self._deep.judge, recording)
                self._failsafe("forecast", self._outlook.judge, recording)

    def _examine(
        self,
        recording: Recording,
        optimizer: torch.optim.Optimizer | None = None,
        dropped: bool = False,
        fine: bool = False,
        taken: bool = False,
    ) -> None:
        """Something at the edge of the loss was non-finite: was anything harmed, and what did it? dropped: its gradients are gone.

        fine: they were seen, and were finite. taken: somebody has stepped on them, whatever scaled the loss.
        """
        recording.examined = True
        if self._repair is not None and recording.mends is not None and (proof := recording.mends.mending.proof) is not None:
            self._failsafe("repaired", self._repair.keep, recording, recording.mends.mending, proof)
            return
        recording.open_forward()
        hit = self._examiner.loss(recording)
        if optimizer is None and not taken and self._is_of_scale(recording, hit):
            return  # a GradScaler looks at these gradients itself; if it steps all the same, before_step sees them
        gone = not fine and (dropped or not self._examiner.at_hand(recording))
        if hit is None and gone and self._ending.norm_may_be_bad():
            hit = Hit(recording, Reached(recording.value, scaled=recording.scaled))
        if hit is None:
            self._absorbed.note(recording, self.counts.number)
            return
        if optimizer is None and not taken and self._spared.takes(hit):
            return
        self._keeper.keep(hit)
        self._keeper.stop_if_asked()

    def _is_of_scale(self, recording: Recording, hit: Hit | None) -> bool:
        """May it be the scale that made something of a loss overflow, and nothing else?"""
        if recording.scale is None or self._course.search.stuck or (hit is not None and hit.loss_bad):
            return False
        return not recording.scale.is_low() and not self._examiner.at_any_scale(recording)

    def _open(self, beside: Counts | None = None) -> None:
        """Another step begins. beside: the numbers of one that another thread is in."""
        self._recordings.clear()
        self._course.closed = False
        self._course.fine()
        self.counts.open(beside)
        self._tape.replacing.take()  # of gradients that no optimizer has seen
        self._failsafe("remains", self._meet_models)
        self._logbook.begin_step()

    def _meet_models(self) -> None:
        found = self._remains.begin(self.counts.number)
        for text in found if not self._logbook.bad_steps else ():  # a bad step may have made them so before anybody met them
            self._logbook.note("infinite_weight", text, self.counts.number)

    def _close(self, stepped: Stepped) -> None:
        """The step is over."""
        if self._course.bad and self.counts.micro_batch > 1:
            self._keeper.mark(micro_batches=self.counts.micro_batch)
        if stepped is Stepped.BY_HAND and self._course.bad and self._skipping is not None:
            self._logbook.refuse_to_skip(self.counts.number, BY_HAND)
        if stepped in (Stepped.TAKEN, Stepped.REPAIRED, Stepped.REPLACED):
            self._course.search.found()
        self._failsafe("forecast", self._outlook.close)
        entry = self._course.line.entry(self.counts, self._logbook.rank, stepped, self._course.bad, self._course.ruined)
        self._course.line, self._course.closed, self._keeper.late = Line(), True, False
        self._course.left.forget()
        self._logbook.held(self._tape.account.peak)
        self._logbook.enter(entry, self._course.poisoning)
        if self.counts.counted and stepped in (Stepped.BY_TRAINER, Stepped.NONE):
            self._logbook.drop(self.counts.number)
