"""Steps that are ruined with finite numbers: spikes, clips by an infinite norm, completions of one token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanscope.capture.tape import Tape
from nanscope.errors import ProgramError
from nanscope.locate.location import spotted
from nanscope.locate.observe import observe, observe_gradient
from nanscope.locate.spike import spike
from nanscope.locate.trace import Trace
from nanscope.program.calls import Site
from nanscope.program.local import local
from nanscope.program.numbers import at, norms
from nanscope.snapshot.observation import Kind, Observation, Phase
from nanscope.watching.look import Look, is_settled
from nanscope.watching.recording import Recording

SPIKE = 1e3  # times the largest that a run has seen: more than any healthy change of scale

SETTLED = 3  # steps before a run's own scale is known


@dataclass(slots=True)
class Usual:
    """The largest that a number has been in the healthy steps so far, at least 1. count: of these steps."""

    largest: float = 1.0
    count: int = 0

    def add(self, size: float) -> None:
        """Take a healthy step into account."""
        self.largest, self.count = max(self.largest, size), self.count + 1

    def exceeded(self, size: float) -> bool:
        """Is this out of all proportion? Never in the first steps: a large first loss is no finding."""
        return self.count >= SETTLED and size > SPIKE * self.largest


class Sizes:
    """How large loss and gradient norm are in the steps of one optimizer: what it updates, and the loss of that, differ from another's."""

    def __init__(self) -> None:
        self._usual = {"loss": Usual(), "gradient norm": Usual()}

    def out_of_scale(self, loss: float, norm: float) -> str:
        """Return in words which of the two is out of all proportion, "" if none is."""
        for (name, usual), size in zip(self._usual.items(), (loss, norm), strict=True):
            if usual.exceeded(size):
                return f"{size / usual.largest:.2g} times the largest {name} of the {usual.count} steps before"
        return ""

    def add(self, loss: float, norm: float) -> None:
        """Take a healthy step into account."""
        for usual, size in zip(self._usual.values(), (loss, norm), strict=True):
            usual.add(size)


def look_for_spike(recording: Recording, again: Callable[[], Look | None]) -> Look | None:
    """Find what made a step huge, in the loss or, by `again`, in the model; None if nothing stands out."""
    if recording.program is None:
        return None
    look: Look | None = Look(Trace.of(recording.program, recording.tensors), None)
    for _ in range(2):
        if look is None or look.trace is None:
            return None
        location = spike(look.trace)
        if location is not None and is_settled(location):
            return replace(look, location=location)
        look = again()
    return None


def overflowing_norm(look: Look | None, site: Site | None) -> Observation | None:
    """Return the largest element of the gradients whose norm overflowed; None if all of them are 0.

    look: with the gradients that backward made, before they were clipped.
    """
    grads = look.trace.run.grads if look is not None and look.trace is not None else {}
    leaves = [leaf for leaf in look.program.leaves if leaf.origin == "parameter" and leaf.id in grads] if look is not None else []
    if leaves and bool(torch.isfinite(torch.linalg.vector_norm(norms([grads[leaf.id] for leaf in leaves])))):
        return None  # their norm is fine: what the clip saw had gone bad in another way
    largest = max(leaves, key=lambda leaf: float(grads[leaf.id].double().abs().max()), default=None)
    if largest is None:
        return None
    gradient = grads[largest.id].detach()
    flat = int(gradient.double().abs().argmax())
    if not at(gradient, flat):
        return None
    return replace(observe_gradient("linalg_vector_norm", largest.name, gradient, flat, site), kind=Kind.CLIP)


def infinite_norm(site: Site | None) -> Observation:
    """Return that the norm by which a clip divides was infinite, where no gradient of this rank tells why."""
    norm = observe_gradient("linalg_vector_norm", "the norm of all gradients", torch.tensor(torch.inf), 0, site)
    return replace(norm, origin=replace(norm.origin, operands=()), kind=Kind.CLIP)


def overflowing_clip(tape: Tape, gradient: Tensor) -> Observation | None:
    """Return what overflowed while the trainer's own code turned a gradient into zeros; None if nothing did."""
    try:
        program, tensors = tape.program(tape.value_of(gradient))
        trace = Trace.of(program, tensors)
    except (ProgramError, LookupError):
        return None
    location = spotted(trace)
    if location is None or not any(bool(tensor.any()) for tensor in tensors.values()):
        return None
    return replace(observe(location, trace), kind=Kind.CLIP, phase=Phase.BACKWARD, outside=True)


REPEATED = 4  # counted tokens of a completion that are all the same


def repeated_tokens(ids: Tensor, mask: Tensor | None = None) -> str:
    """Return what to say if most completions are one token over and over, "" otherwise.

    ids: token ids, [B, T]. mask: [B, T], which tokens count; by default all. A model whose weights are NaN emits token id 0 for ever.
    """
    here, mask = local(ids), None if mask is None else local(mask)
    if here is None:
        return ""
    ids = here
    if ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        return ""
    counted = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.shape != ids.shape else mask.bool()
    low = torch.where(counted, ids, ids.max()).amin(1)
    high = torch.where(counted, ids, ids.min()).amax(1)
    same = (low == high) & (counted.sum(1) >= REPEATED)
    rows = int(same.sum())
    if 2 * rows <= len(ids):
        return ""
    tokens = ", ".join(str(token) for token in sorted(set(low[same].tolist()))[:3])
    return f"{rows} of {len(ids)} completions are one token over and over (id {tokens}): what a model with NaN weights generates"
