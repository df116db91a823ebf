"""What happened in a bad step, as a snapshot.

    hit = examiner.loss(recording)                 was anything harmed, and how far did it get?
    snapshot = examiner.snapshot(hit, blank)       located as deep as needed, described, and narrowed to what goes into a file

The first half is cheap and says whether there is anything; the second may run the model again.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nanscope.capture.alone import has_peers
from nanscope.capture.differentiated import Part, weighted
from nanscope.capture.glue import glue_before
from nanscope.capture.log import SHARE
from nanscope.capture.modules import ModuleCall, ModuleWatch, place_of, tensors_in
from nanscope.capture.tape import Tape
from nanscope.errors import ProgramError, words_of
from nanscope.frameworks.live import objective_of
from nanscope.frameworks.table import recognise
from nanscope.locate.location import spotted
from nanscope.locate.observe import observe, observe_made
from nanscope.locate.origin import Location
from nanscope.locate.trace import Trace
from nanscope.program.calls import Computes
from nanscope.program.local import local, memory_of
from nanscope.program.numbers import count_bad, first_nonfinite, is_finite
from nanscope.snapshot.observation import (
    CHANGED,
    FROZEN,
    REDUCED,
    SPREAD,
    UNMADE,
    UNSEEN,
    UNTRACED,
    WRITTEN,
    WRITTEN_LATE,
    Kind,
    Observation,
    Phase,
)
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.torch_inside import has_backward_hooks, hooks_on
from nanscope.watching.afterwards import arrived, by_hook, handed, hooked, late, received, update_seen, written
from nanscope.watching.carried import CarriedOn
from nanscope.watching.closely import look_closely, number_look
from nanscope.watching.deeper import deeper_look, swallowed_look, weight_look
from nanscope.watching.laid import in_its_weight, name_of
from nanscope.watching.look import HIDING, NOTHING, Look, is_settled
from nanscope.watching.narrow import to_save, with_beside
from nanscope.watching.oddities import infinite_norm, look_for_spike, overflowing_clip, overflowing_norm, repeated_tokens
from nanscope.watching.optimizers import Optimizers, is_left_alone, is_torchs, settings_in_words, unusable, updated_by
from nanscope.watching.recording import Recording
from nanscope.watching.remains import AT_END
from nanscope.watching.scale import unscaled
from nanscope.watching.statistics import buffer_look
from nanscope.watching.surroundings import environment, find_trainer, logged_loss, sampled, settings
from nanscope.watching.updates import huge_weights
from nanscope.watching.vocabulary import picked_ids, with_texts
from nanscope.watching.written import update_look, written_look

log = logging.getLogger("nanscope")

LEFT_BEHIND = "the update of {} was made again from what it left behind, and came out finite: something that it reads has changed since"
BY_HAND = "the training loop"  # stands for an optimizer that there is none of

CLIPPED = 8  # gradients that are asked how they became 0; a clip treats all alike


@dataclass(frozen=True, slots=True)
class Hit:
    """Something went wrong in a backward pass, or after it.

    look: where it was located, None if nobody looked yet. seen: what no program shows. loss_bad: the loss itself is not finite.
    """

    recording: Recording
    reached: Reached
    loss_bad: bool = False
    look: Look | None = None
    seen: Observation = UNSEEN


@dataclass(frozen=True, slots=True)
class Examiner:
    """Looks at bad steps. targets: what is watched. save_tokens: token ids go into the file, with their text. optimizers: all seen."""

    tape: Tape
    modules: ModuleWatch
    targets: tuple[Any, ...]
    save_tokens: bool
    optimizers: Optimizers
    carried: CarriedOn = field(default_factory=CarriedOn)

    def loss(self, recording: Recording) -> Hit | None:
        """Return what a non-finite value at the edge of the loss harmed, None if nothing."""
        loss_bad = not bool(is_finite(recording.loss)) and (not recording.scaled or self.at_any_scale(recording, backward=False))
        grads = self.at_hand(recording)
        bad = count_bad(grads)
        if not loss_bad and not bad:
            return None
        reached = Reached(recording.value, *_counted(len(grads), bad), scaled=recording.scaled)
        given = next((seed for seed in recording.seeds if not loss_bad and not bool(is_finite(seed))), None)
        if given is not None:
            seen = handed(given)
            look = None if recording.handed is not None else NOTHING
            return Hit(recording, reached, look=look, seen=replace(seen, kind=Kind.ARRIVED) if has_peers() else seen)
        return Hit(recording, reached, loss_bad)

    def at_hand(self, recording: Recording) -> list[Tensor]:
        """Return the gradients that can be counted: none while a sharded model still keeps them elsewhere, none once they were dropped."""
        named, grads = self.modules.parameters(), self.modules.gradients()
        if recording.program is not None:
            own = [t for leaf in recording.program.leaves if leaf.diff and (t := recording.tensors[leaf.id]).is_leaf and id(t) not in named]
            grads += [t.grad for t in own if t.grad is not None]
        return grads

    def at_any_scale(self, recording: Recording, backward: bool = True) -> bool:
        """Is a loss that was multiplied against underflow bad without that, too? backward: or a gradient that it makes by itself."""
        if math.isnan(recording.value or 0.0):
            return True
        program = unscaled(recording.program) if recording.program is not None else None
        if program is None:
            return False
        try:
            run = program.execute(recording.tensors, backward=backward, ends=True)
        except ProgramError:
            return False
        return not all(bool(is_finite(made)) for made in (run.values[program.output], *run.grads.values()))

    def absorbed(self, recording: Recording) -> Location | None:
        """Return what overflowed in a loss and did no harm, None if nothing or if nobody can say in which line."""
        if recording.program is None:
            return None
        location = spotted(Trace.of(recording.program, recording.tensors, backward=False))
        return location if location is not None and location.origin.site is not None else None

    def vanished(self, recording: Recording) -> tuple[str, bool] | None:
        """Return whose gradient was not finite although none is that arrived, and whether hooks may have seen to that; None if none was."""
        if recording.program is None or not self.at_hand(recording):
            return None
        bad = next((leaf for leaf, grad in recording.own_grads().items() if not bool(is_finite(grad))), None)
        leaf = recording.program.leaf(bad) if bad is not None else None
        if leaf is None:
            return None
        parts = [part for module in list(self.modules.seen) for part in module.modules()]
        hooked = any(map(has_backward_hooks, parts))
        hooked = hooked or any(has_backward_hooks(one) for _, one in self.modules.parameters().values())
        return leaf.name or f"what {leaf.made_by or 'the batch'} gives", hooked

    def swallowed(self, recording: Recording) -> Hit | None:
        """A kernel dropped a NaN of its batch: all stayed finite, and the step taught something else than it should have."""
        look = swallowed_look(recording, self.tape.budget * 4, self.modules)
        if look is None or look.location is None:
            return None
        return Hit(
            recording, Reached(recording.value, *_counted(len(self.modules.gradients()), 0)), look=look, seen=Observation(Kind.SWALLOWED)
        )

    def mended(self, recording: Recording) -> Hit:
        """Return what a backward pass met whose gradients were mended at the edge of its loss."""
        grads = self.at_hand(recording)
        reached = Reached(recording.value, *_counted(len(grads), count_bad(grads)), scaled=recording.scaled)
        return Hit(recording, reached, not bool(is_finite(recording.loss)))

    def spike(self, recording: Recording, scale: str) -> Hit | None:
        """Everything is finite, and out of scale: what made it so?"""
        look = look_for_spike(recording, functools.partial(self._deeper, recording))
        if look is None:
            return None
        return Hit(
            recording,
            Reached(recording.value, *_counted(len(self.modules.gradients()), 0)),
            look=look,
            seen=Observation(Kind.SPIKE, scale=scale),
        )

    def gradients(self, recordings: Sequence[Recording], parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> Hit | None:
        """Gradients are non-finite although nothing was seen at the edge of the loss: the model's own backward made it, or whoever
        changed the gradients after backward."""
        candidates = [r for r in recordings if r.program is not None or r.calls]
        if not candidates:
            return None
        last, known = candidates[-1], True
        reached = Reached(last.value, len(grads), count_bad(grads), scaled=last.scaled)
        for found in candidates:
            look = look_closely(found, functools.partial(self._deeper, found, backward=True))
            if look.location is None and look.seen is None:
                look = self._before_functions(found) or look
            if look.location is not None or look.seen is not None:
                clipped = Observation(Kind.CLIP) if self._ruined_by_its_norm(look) else UNSEEN
                return Hit(found, replace(reached, loss=found.value), look=look, seen=clipped)
            known = known and look.knows_the_backward
        bad = [(parameter, grad) for parameter, grad in zip(parameters, grads, strict=True) if not bool(is_finite(grad))]
        if not bad:
            return self._dropped(last, known, all(recording.program is not None for recording in candidates), look)
        # a clip multiplies all of them by the norm of one that is bad
        clipping = self.tape.clipping
        parameter, spoilt = next((pair for pair in bad if (norm := clipping.norm_of(pair[1])) is not None and not is_finite(norm)), bad[0])
        if self._norm_overflowed():
            overflowed = overflowing_norm(self._deeper(last), clipping.site())
            if overflowed is not None:
                return Hit(last, reached, look=NOTHING, seen=overflowed)
        changed = written_look(self.tape, spoilt)
        if changed is not None and changed.location is not None and changed.location.origin.born:
            return Hit(last, reached, look=replace(changed, notes=look.notes))  # notes: of the last try
        named = self.modules.parameters()
        name = name_of(parameter, named) or "a weight"
        shown = torch.tensor(math.nan) if self._is_everywhere(spoilt) else spoilt
        if changed is not None and not self._as_it_came(changed, spoilt):
            seen = written(name, spoilt, changed, WRITTEN_LATE if has_peers() else WRITTEN, parameter)
        elif has_peers():
            seen = arrived(name, spoilt, REDUCED if known else SPREAD, parameter)
        elif all(recording.program is not None for recording in candidates):
            seen = hooked(name, shown, last, hooks_on(parameter)) if known else late(name, shown, UNTRACED)
        else:
            seen = UNSEEN
        return Hit(last, reached, look=replace(NOTHING, notes=look.notes), seen=in_its_weight(seen, parameter, named))

    def _is_everywhere(self, gradient: Tensor) -> bool:
        """Has a clip made a gradient bad at every element, so that nobody can tell where it was bad before?"""
        part = local(gradient)
        return self.tape.clipping.norm_of(gradient) is not None and part is not None and not bool(torch.isfinite(part).any())

    def unmade(self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> Observation:
        """Return a non-finite gradient that no backward pass here has made."""
        parameter, spoilt = next(pair for pair in zip(parameters, grads, strict=True) if not bool(is_finite(pair[1])))
        named = self.modules.parameters()
        return in_its_weight(late(name_of(parameter, named) or "a weight", spoilt, UNMADE, weight=parameter), parameter, named)

    def overwritten(self, last: Recording, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> Hit:
        """Gradients are bad that were fine when they were clipped: what was written to them since was not seen."""
        parameter, spoilt = next(pair for pair in zip(parameters, grads, strict=True) if not bool(is_finite(pair[1])))
        named = self.modules.parameters()
        seen = in_its_weight(late(name_of(parameter, named) or "a weight", spoilt, WRITTEN, weight=parameter), parameter, named)
        return Hit(last, Reached(last.value, len(grads), count_bad(grads), scaled=last.scaled), look=NOTHING, seen=seen)

    def raised(self, recording: Recording, error: BaseException) -> tuple[Hit | None, bool]:
        """Return what a backward pass met that raised: a flag that was reached says it, or the same pass made once more.

        And whether that is all that can be asked: False where it was to be made once more, and could not be.
        """
        if not all(bool(flag) for flag in recording.flags):
            recording.open_forward()
            return self.loss(recording) or Hit(recording, Reached(recording.value, scaled=recording.scaled)), True
        if recording.scaled or not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
            return None, True  # it may be the scale; who wants to end is not kept waiting; and there is no room
        look = look_closely(recording, functools.partial(self._deeper, recording, backward=True))
        if look.location is not None or look.seen is not None:
            return Hit(recording, Reached(recording.value), look=look), True
        return None, look.knows_the_backward and not look.notes

    def _dropped(self, last: Recording, known: bool, whole: bool, look: Look) -> Hit | None:
        """The trainer has dropped the gradients, or put others in their place, and what this rank made of them was finite: only their norm
        is left to tell, or what it has asked of them, or, where it counts what it skips, that there was a reason.

        known: its own backward was made once more. whole: all losses of the step were recorded. look: the last that was taken.
        """
        norm = next((norm for norm in self.tape.clipping.norms if not bool(is_finite(norm))), None)
        seen = None if norm is None else overflowing_norm(self._deeper(last), self.tape.clipping.site())
        norm = torch.tensor(math.nan) if norm is None else norm
        if seen is None and has_peers():
            seen = arrived("the whole model", norm, REDUCED if known else SPREAD)
        elif seen is None and whole:
            seen = late("the whole model", norm, CHANGED if known else UNTRACED)
        if seen is None:
            return None
        return Hit(last, Reached(last.value, scaled=last.scaled), look=replace(NOTHING, notes=look.notes), seen=seen)

    def _as_it_came(self, changed: Look, gradient: Tensor) -> bool:
        """Did a gradient come bad from backward or from a reduction, and not from what the trainer did to it afterwards?"""
        came = (leaf for leaf in changed.program.leaves if leaf.origin in HIDING or self.tape.is_of_ranks(leaf.id, gradient))
        return any(not bool(is_finite(changed.tensors[leaf.id])) for leaf in came)

    def clip(self, recording: Recording, grads: Sequence[Tensor]) -> Hit | None:
        """All gradients are exactly 0: were they, or did a clip divide them by an infinite norm?"""
        if self._norm_overflowed():
            site = self.tape.clipping.site()
            seen = overflowing_norm(self._deeper(recording), site) or overflowing_norm(self._as_recorded(recording), site)
            seen = seen or infinite_norm(site)  # that of all ranks, or of a model which cannot be run again
        else:
            seen = next((found for grad in grads[:CLIPPED] if (found := overflowing_clip(self.tape, grad)) is not None), None)
        if seen is None:
            return None
        return Hit(recording, Reached(recording.value, len(grads), 0, scaled=recording.scaled), look=NOTHING, seen=seen)

    def _as_recorded(self, recording: Recording) -> Look | None:
        """Return the recorded loss with the gradients that it gives, None if it cannot be run."""
        if recording.program is None:
            return None
        try:
            return Look(Trace.of(recording.program, recording.tensors), None)
        except ProgramError:
            return None

    def snapshot(self, hit: Hit, blank: Snapshot) -> Snapshot:
        """Return a hit as a snapshot; one that cannot be explained is still one."""
        snapshot = replace(blank, observation=hit.seen, found=hit.seen)
        try:
            look = hit.look
            if look is None and hit.recording.handed is not None and hit.seen is not UNSEEN:
                look = self._handed(hit.recording.handed)
                snapshot = snapshot if look is NOTHING else blank
            elif look is None:
                look = look_closely(hit.recording, functools.partial(self._deeper, hit.recording, backward=not hit.loss_bad))
                look = self._of_weights(hit.recording, self._from_another_rank(hit.recording, look))
                look = self._differentiated(hit.recording, self._changed_by_hooks(hit.recording, look))
            return self.described(snapshot, hit.recording, look, hit.loss_bad)
        except Exception as error:  # noqa: BLE001 - whatever fails in here, the step is reported with what it reached
            log.warning("nanscope [not-explained]: step %d: %s", snapshot.step, words_of(error))
            return self._unexplained(snapshot, hit, words_of(error))

    def _unexplained(self, snapshot: Snapshot, hit: Hit, error: str) -> Snapshot:
        """A step as it was recorded: a newer reader may find in the file what was not found here."""
        snapshot = replace(snapshot, notes=(*snapshot.notes, ("not_looked_into", f"looking for where it went bad failed: {error}")))
        recording = hit.recording
        if recording.program is None or hit.look is not None:
            return snapshot
        try:
            recorded = replace(snapshot, program=recording.program, tensors=recording.tensors, grads=recording.own_grads())
            return to_save(recorded, NOTHING, self.save_tokens)
        except Exception:  # noqa: BLE001 - nor can it be cut down to what a file may hold
            return snapshot

    def _of_weights(self, recording: Recording, look: Look) -> Look:
        """Where data is bad and what the model gives of it as well, and a weight is: old values were computed with it, too."""
        found = look.seen or look.location
        if found is None or found.phase is not Phase.INPUT or recording.program is None:
            return look
        if look.location is not None and look.seen is None and (own := self._of_the_model(look, look.location)) is not None:
            return own
        fed = (recording.tensors[leaf.id] for leaf in recording.program.leaves if leaf.diff)
        weight = weight_look(recording, self.modules) if not all(bool(is_finite(tensor)) for tensor in fed) else None
        return look if weight is None else replace(weight, notes=look.notes)

    def _of_the_model(self, look: Look, location: Location) -> Look | None:
        """What the loss itself reads may be a weight, or a buffer, of a model: it lies there."""
        origin = location.origin
        value = self.tape.values.get(origin.value_id) if not look.second else None
        tensor = look.tensors.get(origin.value_id) if value is None or value.tensor is None else value.tensor
        if tensor is None:
            return None
        place = place_of(tensor) if value is None else value.key[:4]
        kind, name = "parameter", self.modules.weight_there(place)
        if name is None and any(place_of(one) == place for one in self.optimizers.parameters()):  # of no model: a temperature
            name = origin.variable or "a weight"
        if name is None:
            kind, name = "buffer", self.modules.buffer_there(place)
        if name is None:
            return None
        seen = observe_made(kind, tensor, origin.flat, origin.site, "", Phase.WEIGHTS, name)
        return replace(look, location=None, seen=seen, second=True)

    def _from_another_rank(self, recording: Recording, look: Look) -> Look:
        """What came in bad is not the batch's where another rank has sent it: the stage before, in a pipeline."""
        found = look.seen or look.location
        if found is None or found.phase is not Phase.INPUT:
            return look
        sent = (tensor for call in recording.calls for tensor in tensors_in([call.args, call.kwargs]) if self.tape.agreed.was_sent(tensor))
        bad = next((tensor for tensor in sent if not bool(is_finite(tensor))), None)
        return look if bad is None else replace(NOTHING, notes=look.notes, seen=received(bad))

    def _changed_by_hooks(self, recording: Recording, look: Look) -> Look:
        """A gradient came out bad that the loss program makes fine, and nothing else has shown why: somebody has changed it on its way."""
        if look.location is not None or look.seen is not None or recording.program is None or not bool(is_finite(recording.loss)):
            return look  # a loss that was bad was bad before its gradients
        bad = ((leaf, grad) for leaf in recording.program.leaves if (grad := recording.grads.get(leaf.id)) is not None)
        leaf, grad = next((pair for pair in bad if not bool(is_finite(pair[1]))), (None, None))
        if leaf is None or grad is None or look.trace is None or not bool(is_finite(look.trace.values[look.program.output])):
            return look
        return replace(
            look,
            seen=hooked(
                leaf.name or "what a model gives", grad, recording, [hook.function for hooks in recording.others.values() for hook in hooks]
            ),
        )

    def _differentiated(self, recording: Recording, look: Look) -> Look:
        """A gradient came in bad that the trainer's code took itself: go on in what it differentiated for that."""
        leaf = look.location.origin.leaf if look.location is not None else None
        part = recording.behind.get(leaf.id) if leaf is not None else None
        inner = self._look_into(part, recording.calls, recording.frozen) if part is not None else None
        return look if inner is None else replace(inner, notes=(*look.notes, *inner.notes))

    def _before_functions(self, recording: Recording) -> Look | None:
        """Nothing is bad that a loss reads, nor any gradient of it: go on before its custom functions, with what these gave back."""
        for leaf, parts in recording.led.items():
            for part, gradient in zip(parts, recording.returned.get(leaf, ()), strict=False):
                if part is not None and gradient is not None and bool(is_finite(gradient)):
                    look = self._look_into(weighted(part, gradient), recording.calls, recording.frozen)
                    if look is not None:
                        return look
        return None

    def _handed(self, made: Recording) -> Look:
        """Backward was given a bad gradient to begin with: go on in what made that."""
        look = self._differentiated(made, look_closely(made, lambda: None))
        return replace(look, aside=True) if look.location is not None and look.location.origin.leaf is None else NOTHING

    def _look_into(self, part: Part, calls: list[ModuleCall], frozen: list[ModuleCall]) -> Look | None:
        program, tensors = part
        inner = Recording(program, tensors, next(iter(tensors.values())), calls, None, frozen=frozen)
        inner.glue = glue_before(self.tape, inner.all_calls())
        look = look_closely(inner, functools.partial(self._deeper, inner, backward=True))
        if look.seen is None and (look.location is None or not is_settled(look.location)):
            return None
        own = self._of_the_model(look, look.location) if look.location is not None and look.location.phase is Phase.INPUT else None
        return replace(own or look, aside=True, second=True)

    def taken(self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> Callable[[Snapshot], Snapshot]:
        """Return what describes gradients that no backward pass of the block has put there: where the trainer's code took them itself, what
        it differentiated tells why they are bad."""
        seen = self.unmade(parameters, grads)
        spoilt = next(grad for grad in grads if not bool(is_finite(grad)))
        part = self.tape.behind_gradient(spoilt)
        look = None if part is None else self._look_into(part, *self.modules.so_far())
        if part is None or look is None:
            made = written_look(self.tape, spoilt, Computes.UPDATE)
            if made is not None and made.location is not None and made.location.origin.born:  # of no loss: evolution strategies, say
                return functools.partial(self._updated, made, Observation(optimizer=BY_HAND, weight=seen.origin.variable or "a weight"))
            return lambda blank: replace(blank, observation=seen, found=seen)
        inner = Recording(*part, next(iter(part[1].values())), [], None)
        return lambda blank: self.described(blank, inner, look, False)

    def asked(self, recording: Recording, blank: Snapshot) -> Snapshot | None:
        """Return a step that nothing is wrong with as a snapshot, None if its loss was not recorded."""
        if recording.program is None:
            return None
        look = Look(Trace.of(recording.program, recording.tensors), None)
        return self.described(replace(blank, asked=True), recording, look, False)

    def update(
        self, optimizer: torch.optim.Optimizer, first: bool, calls: int, was_fine: Callable[[Tensor], bool], blank: Snapshot
    ) -> Snapshot:
        """Loss and gradients were finite, the update was not. first: the optimizer had no state before it. calls: seen before the update.
        was_fine: is a weight known to have been finite when the step began?

        What was recorded of it, where that takes gradients itself, tells more than making it once more.
        """
        named = self.modules.parameters()
        parameter = next(weight for weight in updated_by(optimizer) if not bool(is_finite(weight)))
        name = name_of(parameter, named)
        if is_left_alone(optimizer, parameter):  # the loop has written to it before this update, or after the last one
            seen = observe_made("parameter", parameter, first_nonfinite(parameter) or 0, None, "", Phase.WEIGHTS, name)
            return replace(blank, observation=seen, found=seen)
        recorded = written_look(self.tape, parameter, Computes.UPDATE) if self.tape.storages.was_written(parameter, calls) else None
        fine = was_fine(parameter) or _took_part(parameter)
        look = recorded or update_look(optimizer, parameter, name or "weight", self.tape.budget, first, fine, self.tape)
        blank, unfit = replace(blank, notes=(*blank.notes, *look.notes)), unusable(optimizer)
        infinite = settings_in_words(unfit)
        look = self._setting_look(unfit) or look
        if look.trace is None and look.seen is None:
            look = replace(look, seen=replace(update_seen(optimizer, parameter, name), settings=infinite))
            if not (is_torchs(optimizer) or look.notes or infinite):
                blank = replace(blank, notes=(*blank.notes, ("not_run_again", LEFT_BEHIND.format(type(optimizer).__name__))))
        if look.seen is not None:
            seen = in_its_weight(look.seen, parameter, named)
            return replace(blank, observation=seen, found=seen)
        return self._updated(look, Observation(optimizer=type(optimizer).__name__, weight=name or "a weight", settings=infinite), blank)

    def _setting_look(self, unfit: Mapping[str, float | Tensor]) -> Look | None:
        """Return where the loop has worked out a setting of the optimizer that is not finite, None if that was not seen."""
        kept = (written_look(self.tape, setting, Computes.UPDATE) for setting in unfit.values() if isinstance(setting, Tensor))
        looks = (*kept, number_look(tuple(self.tape.numbers), Computes.UPDATE) if unfit else None)
        return next((look for look in looks if look is not None and look.location is not None and look.location.origin.born), None)

    def buffer(self, seen: Observation, owner: nn.Module, name: str, recordings: Sequence[Recording], blank: Snapshot) -> Snapshot:
        """A buffer is bad that was finite, and nothing else is. owner, name: the part of a model, and its attribute."""
        look = buffer_look(recordings, self.modules, self.tape.budget * 4, owner, name)
        if look is None:
            return replace(blank, observation=seen, found=seen)
        kept = Observation(weight=f"the buffer {seen.origin.variable}")
        if look.seen is None:
            return self._updated(look, kept, blank)
        return replace(blank, observation=look.seen.joined(kept), found=look.seen.joined(kept))

    def own_update(self) -> Callable[[Snapshot], Snapshot] | None:
        """Return what describes that an update of the loop's own made a weight non-finite; None if it was something else that wrote it."""
        name, weight = next(known for known in self.modules.parameters().values() if not bool(is_finite(known[1])))
        look = written_look(self.tape, weight, Computes.UPDATE)
        if look is None or look.location is None or not look.location.origin.born:
            return None
        own = {memory_of(parameter) for _, parameter in self.modules.parameters().values()}
        read = (value for leaf in look.program.leaves if (value := self.tape.values.get(leaf.id)) is not None)
        if all(value.storage in own or not value.shape for value in read):
            return None  # it read no gradient
        return functools.partial(self._updated, look, Observation(optimizer=BY_HAND, weight=name))

    def edited(self, snapshot: Snapshot) -> Snapshot | None:
        """Return a step whose weight is bad as what the trainer's own lines have made of it; None if that was not seen, or if what they
        wrote was bad before."""
        seen = snapshot.found
        untrained = (seen.origin.variable or "").endswith(FROZEN)  # nobody looks at it in each step
        may_be_ours = seen.past.fine_at is not None or seen.past.found == AT_END or untrained  # else it came so
        if seen.phase is not Phase.WEIGHTS or not may_be_ours:
            return None
        bad = (weight for name, weight in self.modules.weights() if name == seen.origin.variable)
        weight = next((weight for weight in bad if not bool(is_finite(weight))), None)
        look = None if weight is None else written_look(self.tape, weight, Computes.UPDATE)
        if look is None or look.location is None or not look.location.origin.born:
            return None
        notes = tuple(note for note in snapshot.notes if note[0] != "left_behind")
        return self._updated(look, Observation(optimizer=BY_HAND, weight=seen.origin.variable or ""), replace(snapshot, notes=notes))

    def update_by_hook(self) -> Callable[[Snapshot], Snapshot]:
        """Return what describes that a hook on a gradient has made its weight non-finite: calls within backward are not recorded."""
        name, weight = next(known for known in self.modules.parameters().values() if not bool(is_finite(known[1])))
        seen = in_its_weight(by_hook(name, weight, BY_HAND), weight, self.modules.parameters())
        return lambda blank: replace(blank, observation=seen, found=seen)

    def _updated(self, look: Look, seen: Observation, blank: Snapshot) -> Snapshot:
        updated = replace(blank, program=look.program, tensors=look.tensors, observation=seen, found=_found(look, seen))
        return to_save(updated, look, self.save_tokens)

    def described(self, snapshot: Snapshot, recording: Recording, look: Look, loss_bad: bool) -> Snapshot:
        """Put into a snapshot what a look at the step has shown, and what is known around it."""
        trainer = find_trainer(self.targets)
        objective = objective_of(recording.glimpses)
        framework = recognise({site.file for site in look.program.sites} | {f"/{objective.get('site', '')}"})
        notes = [("left_out", recording.left_out)] if recording.left_out else []
        if not (recording.left_out or snapshot.observation.suspect):  # of a suspect step the gradients are finite, too
            notes += logged_loss(trainer, snapshot.reached.loss, loss_bad)
        notes += look.notes
        if look.location is not None and look.location.phase is Phase.WEIGHTS and (tokens := sampled(framework)) is not None:
            notes += [("repeated_tokens", words) for words in [repeated_tokens(*tokens)] if words]
        if look.location is not None and look.location.phase in (Phase.FORWARD, Phase.BACKWARD):
            notes += [("huge_weights", words) for words in [huge_weights(self.modules.weights(), self.optimizers)] if words]
            notes += [("rate_jumped", words) for words in [self.optimizers.rates.in_words(snapshot.step)] if words]
        was_cut = look.location is not None and look.location.origin.op == "cut"
        if was_cut or (not look.program.calls and self.tape.account.short):
            notes.append(("not_kept", self._too_large()))
        since, kept = self.carried.since(snapshot.step, look) or (None, "")
        notes += [("carried_on", f"{kept}: to leave steps out does not mend it")] if kept else []
        described = replace(
            snapshot,
            consequence_of=since,
            program=look.program,
            tensors=look.tensors,
            loss=None if look.kernel or look.aside else snapshot.loss,  # a kernel adds in another order: its sum is not the loss
            grads={} if look.second else recording.own_grads(),
            environment=environment(recording.loss, framework.package if framework else None),
            settings=settings(trainer, framework.settings if framework else ()),
            objective=objective,
            opaque=tuple(sorted({leaf.made_by for leaf in look.program.leaves if leaf.origin == "opaque"})),
            notes=tuple(notes),
            found=_found(look, snapshot.observation),
            observation=snapshot.observation if look.seen is None else look.seen.joined(snapshot.observation),
        )
        beside = {**recording.beside, **picked_ids(look)} if self.save_tokens else recording.beside
        return with_beside(to_save(described, look, self.save_tokens), beside, self.save_tokens)

    def _too_large(self) -> str:
        single, wide = (f"{size / 1e6:.3g} MB" for size in self.tape.limits)
        budget = f"{self.tape.budget / 1e6:.3g} MB"
        return (
            f"what it was made of was not kept: together no more than budget= ({budget}) and {self.tape.budget >> SHARE} calls without "
            f"gradient, and no tensor larger than {single} ({wide} with three dimensions); watch(budget=…), 8 (32) times the largest, may "
            f"keep it"
        )

    def worded(self, snapshot: Snapshot) -> Snapshot:
        """Return a bad step with the text of the token ids in it, where these were asked for."""
        return with_texts(snapshot, self.targets) if self.save_tokens else snapshot

    def _deeper(self, recording: Recording, backward: bool = False) -> Look | None:
        return deeper_look(recording, self.tape.budget * 4, self.modules, backward)

    def _norm_overflowed(self) -> bool:
        """Was a norm of this step's gradients, taken to clip them, not finite?"""
        return any(not bool(torch.isfinite(norm).all()) for norm in self.tape.clipping.norms)

    def _ruined_by_its_norm(self, look: Look) -> bool:
        """Did a clip by norm ruin gradients that backward had made without a NaN?"""
        if look.trace is None or not self._norm_overflowed():
            return False
        grads = look.trace.run.grads
        raw = [grads[leaf.id] for leaf in look.program.leaves if leaf.origin == "parameter" and leaf.id in grads]
        return bool(raw) and not any(bool(torch.isnan(grad).any()) for grad in raw)  # a program that ends at the model cannot tell


def _took_part(weight: Tensor) -> bool:
    """Had a weight a gradient, of a loss that is finite, where it is bad by now? Then it was not when the loss was computed."""
    part, gradient = local(weight), None if weight.grad is None else local(weight.grad)
    if part is None or gradient is None or gradient.shape != part.shape or gradient.layout is not torch.strided:
        return False
    bad = gradient.detach()[~torch.isfinite(part.detach())]
    return bad.numel() > 0 and bool((torch.isfinite(bad) & (bad != 0)).all())


def _found(look: Look, seen: Observation) -> Observation:
    """What a look located, in words and numbers. seen: what else is known."""
    beside = seen if look.seen is None else look.seen.joined(seen)
    if look.location is not None and look.trace is not None and (look.seen is None or look.seen.phase is None):
        return observe(look.location, look.trace).joined(beside)
    return beside


def _counted(gradients: int, bad: int) -> tuple[int | None, int | None]:
    """Nothing is known of gradients where none is left: hooks may have taken them."""
    return (gradients, bad) if gradients else (None, None)
