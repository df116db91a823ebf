"""What no loss shows: weights and buffers that went bad although every step was fine; and since when a weight is bad.

Statistics of a BatchNorm are read in evaluation only, and a weight may be written to when nobody steps any more. A buffer that was not
finite from the beginning is meant to be so: masks are made of infinities. A weight is not, unless infinities are all that is bad in it, and
stay as they were: nobody has written to it, or somebody has loaded it so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nanscope.capture.modules import ModuleWatch, version_of
from nanscope.capture.raw import NONE, SoFar
from nanscope.capture.tape import Tape
from nanscope.capture.weighing import graph_of
from nanscope.locate.observe import observe_made
from nanscope.program.calls import Site
from nanscope.program.local import local
from nanscope.program.numbers import count_bad, first_nonfinite, is_finite
from nanscope.snapshot.observation import Observation, Past, Phase
from nanscope.snapshot.step import Snapshot
from nanscope.text import count
from nanscope.torch_inside import buffer_of
from nanscope.watching.optimizers import Optimizers
from nanscope.watching.states import is_fresh

AT_END = "when the block ended"
Owner = tuple[weakref.ref[nn.Module], str, str]  # of a buffer: module, attribute, full name
MOST = 64  # sets of weights, each updated by itself, of which it is known when they were finite


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A buffer that is not finite any more, in words and numbers. owner, name: the part of a model, and its attribute."""

    seen: Observation
    owner: nn.Module
    name: str


@dataclass(frozen=True, slots=True)
class AsItCame:
    """A weight as it was when its model was first seen. fine_at: the step, where it was finite. unwritten: did it hold what had been in its
    memory before? infinite: so many of its elements were infinite, where none was NaN."""

    weight: weakref.ref[Tensor]
    fine_at: int | None
    unwritten: bool = False
    infinite: int = 0


class Remains:
    """Asked when a model is seen for the first time, after each update for the buffers, and when the block ends."""

    def __init__(self, modules: ModuleWatch, tape: Tape, optimizers: Optimizers) -> None:
        self._modules, self._tape, self.optimizers = modules, tape, optimizers
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._aside: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._owners: list[Owner] = []  # of buffers that were finite
        self._were_fine: set[str] = set()  # their names, for good
        self._came: dict[int, AsItCame] = {}  # weights by identity
        self._fine: list[tuple[int, SoFar, frozenset[int]]] = []  # the last step after which these were finite, and calls until then
        self._writers: dict[int, Site | None] = {}  # weight → where it was written to since
        self._told: dict[int, weakref.ref[Tensor]] = {}  # weights that were told to be bad before a step, and are since
        self._buffers_fine: tuple[int | None, SoFar] = (None, NONE)  # as `_fine`, of all buffers
        self._met: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # buffer → was it finite when its model was called first?
        self._met_at: dict[int, int] = {}  # and calls until then
        modules.spoilt, modules.meets = self.spoilt, self.meet

    def meet(self, model: nn.Module) -> None:
        """A model is called for the first time: look at its buffers, before it writes to them, and read nothing back."""
        for buffer in model.buffers():
            if (part := _floating(local(buffer))) is not None:
                self._met[id(buffer)], self._met_at[id(buffer)] = (weakref.ref(buffer), is_finite(part)), self._tape.log.count

    def _was_fine(self, owner: Owner) -> bool:
        module = owner[0]()
        buffer = None if module is None else buffer_of(module, owner[1])
        met = self._met.pop(id(buffer), None)
        return met is not None and met[0]() is buffer and bool(met[1])

    def begin(self, step: int) -> list[str]:
        """Look at the weights and buffers of the models that were not seen before, in one transfer for each. Returns of which weights some
        elements are infinite, in words."""
        infinite = list[str]()
        models = list(self._modules.seen)
        if any(model not in self._known for model in models):
            parts_of_all = (part for model in models for weight in model.parameters() if (part := local(weight)) is not None)
            self._tape.notes.graph = graph_of(sum(part.numel() * part.element_size() for part in parts_of_all))
        for model in self._modules.outermost():
            if model not in self._aside and model not in self._modules.seen:
                self._look_aside(model, step)
        for model in models:
            if model not in self._known:
                self._known.add(model)
                found = [
                    (weakref.ref(module), name, f"{path}.{name}" if path else name)
                    for path, module in model.named_modules()
                    for name, _ in module.named_buffers(recurse=False)
                ]
                own = [(owner, tensor) for owner in found if (tensor := _readable(owner)) is not None]
                weights = [
                    (name, weight, part) for name, weight in model.named_parameters() if (part := _floating(local(weight))) is not None
                ]
                parts = [*(tensor for _, tensor in own), *(part for *_, part in weights)]
                fine = _are_finite(parts)
                self._owners += [owner for (owner, _), flag in zip(own, fine, strict=False) if flag or self._was_fine(owner)]
                self._were_fine |= {path for _, _, path in self._owners}
                self._met.clear()
                for (name, weight, part), flag in zip(weights, fine[len(own) :], strict=True):
                    this: weakref.ref[Tensor] = weakref.ref(weight)
                    came = AsItCame(this, step) if flag else AsItCame(this, None, self._is_unwritten(weight), _infinite(part))
                    self._came[id(weight)] = came
                    if came.infinite:
                        of = count(part.numel(), "element")
                        infinite.append(f"{came.infinite:,} of {of} of the weight {name} were infinite when it came, and it stays so")
        return infinite

    def _look_aside(self, model: nn.Module, step: int) -> None:
        """A model that nobody trains, as an average of another one: were its weights finite when it came?"""
        self._aside.add(model)
        weights = [(weight, part) for weight in model.parameters() if (part := _floating(local(weight))) is not None]
        for (weight, _), flag in zip(weights, _are_finite([part for _, part in weights]), strict=True):
            if flag:
                self._came.setdefault(id(weight), AsItCame(weakref.ref(weight), step))

    def but_masks(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Leave out those that hold as many infinities as when they were first seen, and no NaN: a bias of −inf forbids a token. And what
        an optimizer was given, and nobody trains, if it did not come finite."""
        return [one for one in weights if not (self._is_mask(one) or self._came_so(one))]

    def _came_so(self, weight: Tensor) -> bool:
        return not (weight.requires_grad or self._came_finite(weight)) and weight.grad is None

    def _is_mask(self, weight: Tensor) -> bool:
        came = self._as_it_came(weight)
        part = local(weight) if came is not None and came.infinite else None
        return came is not None and part is not None and _infinite(part) == came.infinite

    def _as_it_came(self, weight: Tensor) -> AsItCame | None:
        came = self._came.get(id(weight))
        return came if came is not None and came.weight() is weight else None

    def _came_finite(self, weight: Tensor) -> bool:
        came = self._as_it_came(weight)
        return came is not None and came.fine_at is not None

    def _is_unwritten(self, weight: Tensor) -> bool:
        return is_fresh(self._tape, weight)

    def was_fine(self, weight: Tensor) -> bool:
        """Is a weight known to have been finite, and was nobody but an optimizer seen to write to it since?"""
        step, calls = self._last_fine(weight)
        known = step is not None or self._came_finite(weight)
        spoilt = self._is_told(weight) or self._writers.get(id(weight)) is not None
        return known and not spoilt and not self._tape.storages.was_written(weight, calls)

    def _is_told(self, weight: Tensor) -> bool:
        told = self._told.get(id(weight))
        return told is not None and told() is weight

    def learn(self, other: Remains) -> None:
        """Know of the weights what was known of them in another thread. Who wrote to them there, its own tape knows."""
        self._known |= other._known
        self._owners = list({(id(owner()), name): (owner, name, path) for owner, name, path in (*self._owners, *other._owners)}.values())
        self._came = {**self._came, **other._came}
        self._fine = [(step, NONE, weights) for step, _, weights in other._fine if all(weights != known for *_, known in self._fine)] + [
            (max([step, *(found for found, _, known in other._fine if known == weights)]), calls, weights)
            for step, calls, weights in self._fine
        ]

    def let_go(self) -> None:
        """Refer to no weight and no buffer any more: since when each was finite is not known from here on."""
        self._came, self._met, self._told = {}, {}, {}

    def fine(self, step: int, weights: Iterable[Tensor]) -> None:
        """After the update of a step these were finite."""
        these = frozenset(map(id, weights))
        others = [known for known in self._fine if these.isdisjoint(known[2])]
        self._fine = [*others[-MOST:], (step, self._tape.mark(), these)]
        self._writers = {weight: site for weight, site in self._writers.items() if weight not in these}
        self._told = {weight: one for weight, one in self._told.items() if weight not in these}

    def updated(self) -> list[Tensor]:
        """Return what is trained: by optimizers, where some were seen, or else by the loop itself."""
        return self.but_masks(self.optimizers.parameters() or [one for _, one in self._modules.parameters().values() if one.requires_grad])

    def look_back(self) -> None:
        """Something is bad: note who has written to the weights that are, before the tape forgets it."""
        for tensor in (*self.updated(), *self.buffers()):
            if not bool(is_finite(tensor)):
                self._writers.setdefault(id(tensor), self._written_at(tensor, self._last_fine(tensor)[1]))

    def _written_at(self, tensor: Tensor, since: int) -> Site | None:
        # a model goes on with its buffers unseen
        return self._tape.storages.written_at(tensor, since, last=isinstance(tensor, nn.Parameter))

    def _last_fine(self, weight: Tensor) -> tuple[int | None, int]:
        """The last step after which a weight is known to have been finite, and calls until then."""
        if any(one is weight for one in self.buffers()):
            step, calls = self._buffers_fine
            return step, max(calls.calls, self._met_at.get(id(weight), 0))
        found = [(step, calls) for step, calls, weights in self._fine if id(weight) in weights]
        return (found[-1][0], found[-1][1].calls) if found and any(one is weight for one in self.updated()) else (None, 0)

    def told(self, snapshot: Snapshot) -> Snapshot:
        """Return a bad step with what is known of its bad weight from before."""
        seen = snapshot.found
        if seen.phase is not Phase.WEIGHTS:
            return snapshot
        buffers = ((path, one) for (_, _, path), one in self._readable() if seen.origin.op == "buffer")
        named = buffers if seen.origin.op == "buffer" else self._modules.parameters().values()
        weight = next((one for name, one in named if name == seen.origin.variable and not bool(is_finite(one))), None)
        if weight is None:
            return self._found_so(snapshot) if seen.origin.op == "buffer" and not seen.past.found else snapshot
        known = self._as_it_came(weight)
        came = known or AsItCame(weakref.ref(weight), None)
        known_fine, calls = self._last_fine(weight)
        fine_at = came.fine_at if known_fine is None else known_fine
        site = self._writers.get(id(weight)) or self._written_at(weight, calls)
        site = site or self._tape.storages.written_within(weight, calls)  # an update came after that, which is not to blame
        past = Past(fine_at, site.expression if site else "", site.file if site else None, site.line if site else None, came.unwritten)
        past = replace(past, found=seen.past.found, came=self._is_told(weight) or (known is not None and fine_at is None))
        if not past.found:
            self._told[id(weight)] = weakref.ref(weight)
        observation = replace(snapshot.observation, past=past)
        return replace(snapshot, observation=observation, found=replace(seen, past=past))

    def _found_so(self, snapshot: Snapshot) -> Snapshot:
        """A buffer that never was finite, and that nobody has written to, is memory as it was found."""
        name = snapshot.found.origin.variable
        named = (one for path, one in self._modules.buffers() if path == name and name not in self._were_fine)
        unwritten = any(version_of(one) == 0 and self._is_unwritten(one) for one in named)
        past = replace(snapshot.found.past, unwritten=unwritten)
        return replace(snapshot, observation=replace(snapshot.observation, past=past), found=replace(snapshot.found, past=past))

    def buffers(self) -> list[Tensor]:
        """Return the buffers that were finite when they were first seen, as they are now."""
        return [tensor for _, tensor in self._readable()]

    def has_bad_buffers(self) -> bool:
        """Is one not finite any more, or NaN, which no mask is? The first forward pass may have spoilt them before they were first seen."""
        every = (part for _, buffer in self._modules.buffers() if (part := _floating(local(buffer))) is not None)
        return count_bad(self.buffers()) > 0 or any(bool(torch.isnan(part).any()) for part in every)

    def buffers_are_fine(self, step: int) -> None:
        """After the update of a step all of them were finite."""
        self._buffers_fine = step, self._tape.mark()

    def spoilt(self) -> list[Tensor]:
        """Return those that are not finite any more, and that nobody outside of the models was seen to write to since they were."""
        bad = (tensor for _, tensor in self._bad_buffers())
        return [one for one in bad if (self._writers.get(id(one)) or self._written_at(one, self._last_fine(one)[1])) is None]

    def bad_buffer(self, found: str = "after the update") -> Spoilt | None:
        """Return the first of them that is not finite any more. found: when."""
        for (owner, name, path), tensor in self._bad_buffers():
            seen = observe_made("buffer", tensor, first_nonfinite(tensor) or 0, None, "", Phase.WEIGHTS, path)
            if (module := owner()) is not None:
                return Spoilt(replace(seen, past=Past(found=found)), module, name)
        return None

    def buffers_are_told(self) -> None:
        """Whoever is bad by now is not told again."""
        bad = [owner for owner, _ in self._bad_buffers()]
        self._owners = [owner for owner in self._owners if all(owner is not known for known in bad)]

    def _readable(self) -> list[tuple[Owner, Tensor]]:
        return [(owner, tensor) for owner in self._owners if (tensor := _readable(owner)) is not None]

    def _bad_buffers(self) -> list[tuple[Owner, Tensor]]:
        return [(owner, tensor) for owner, tensor in self._readable() if not bool(is_finite(tensor))]

    def bad(self) -> Observation | None:
        """Return the first weight or buffer that is bad when the block ends, and that no update is known to have made so; None if none is.

        What optimizers update may be in no model. Of what nobody trains (a frozen adapter, an average) that counts which came finite, and
        does more than to forbid something.
        """
        known = {id(one): (name, one) for name, one in self._modules.weights()}
        all_known = self.but_masks([*(one for _, one in known.values()), *self.optimizers.parameters()])
        mine = (one for one in all_known if one.requires_grad or self._came_finite(one))
        weights = [one for one in {id(one): one for one in mine}.values() if id(one) not in self.optimizers.spoilt]
        found = (one for one in weights if not bool(is_finite(one)) and (one.requires_grad or not _forbids(one)))
        if count_bad(weights) and (bad := next(found, None)) is not None:
            name = known[id(bad)][0] if id(bad) in known else "weight"
            seen = observe_made("parameter", bad, first_nonfinite(bad) or 0, None, "", Phase.WEIGHTS, name)
            return replace(seen, past=Past(found=AT_END))
        buffer = self.bad_buffer(AT_END)
        return None if buffer is None else buffer.seen


def _readable(owner: Owner) -> Tensor | None:
    """The buffer, where it is still there, can be read, and may be bad."""
    module = owner[0]()
    buffer = None if module is None else buffer_of(module, owner[1])
    return _floating(None if buffer is None else local(buffer))


def _floating(part: Tensor | None) -> Tensor | None:
    return part if part is not None and part.is_floating_point() and part.numel() else None


def _are_finite(parts: Sequence[Tensor]) -> list[bool]:
    """Is each of them finite?"""
    flags: list[bool] = torch.stack([is_finite(part).cpu() for part in parts]).tolist() if parts else []
    return flags


def _forbids(weight: Tensor) -> bool:
    """Is all that is not finite of a weight −inf, as of a bias that forbids a token?"""
    part = local(weight)
    return part is None or bool((torch.isfinite(part) | torch.isneginf(part)).all())


def _infinite(part: Tensor) -> int:
    """How many of its elements are infinite, if none is NaN?"""
    return 0 if bool(torch.isnan(part).any()) else int(torch.isinf(part).sum())
