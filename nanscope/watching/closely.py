"""Looking closer at the loss of a bad step while it is still in memory, and at the calls that what came into it was made by."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanscope.capture.differentiated import Part
from nanscope.capture.glue import Behind
from nanscope.capture.recomputing import is_checkpoint
from nanscope.capture.source import site_of
from nanscope.errors import ProgramError
from nanscope.locate.forward import bad_sources, walk_back
from nanscope.locate.location import is_masked, locate
from nanscope.locate.observe import observe_made
from nanscope.locate.origin import Element, Location
from nanscope.locate.trace import Trace
from nanscope.program.calls import Computes, Leaf, Site, writes_no_number
from nanscope.program.numbers import first_nonfinite
from nanscope.program.program import Program
from nanscope.snapshot.observation import Kind, Observation, Phase
from nanscope.watching.look import HIDING, NOTHING, Look, given_look, is_settled, only_seen, told, walked
from nanscope.watching.recording import Recording

FUNCTIONS = 8  # custom functions, one behind the other, that are looked into


def look_closely(recording: Recording, again: Callable[[], Look | None]) -> Look:
    """Locate the origin in the recorded loss, and inside the model, by `again`, where it does not lie in the loss."""
    if recording.program is None:
        return again() or NOTHING
    anew = _computed_anew(recording)
    if anew is not None:
        return anew
    trace = Trace.of(recording.program, recording.tensors, lean=True)
    first = Look(trace, locate(trace))
    for _ in range(FUNCTIONS):
        found = _leaves(trace, first.location) if first.location is not None else []
        if not any(leaf.origin in ("opaque", "data") and recording.opened(leaf.id) for leaf, _ in found):
            break
        trace = Trace.of(recording.program, recording.tensors, lean=True)
        first = Look(trace, locate(trace), second=True)
    if first.location is not None and is_settled(first.location):
        return (
            _of_number(recording, trace, first.location)
            or _made_inside(trace, first.location, again)
            or _made_behind(recording, trace, first.location)
            or first
        )
    behind = _behind(recording, first)
    if behind is not None:
        return behind
    deeper = again()
    if deeper is None or deeper.location is not None or deeper.seen is not None:
        return first if deeper is None else _as_counted(deeper, trace, first.location)
    return replace(first, notes=deeper.notes, again=not deeper.kernel and deeper.knows_the_backward)


def _computed_anew(recording: Recording) -> Look | None:
    """A gradient that went bad in what a checkpoint computes once more: where it does in the same calls, and their own backward. None if it
    does not, since that function does something else, too, or if there is none."""
    spoilt = [found.leaf for found in recording.backwards if is_checkpoint(found.node) and found.spoilt()]
    trial = replace(recording) if spoilt else recording
    opened = [leaf for leaf in spoilt if trial.opened(leaf)]
    if not opened or trial.program is None:
        return None
    trace = Trace.of(trial.program, trial.tensors, lean=True)
    location = locate(trace)
    return Look(trace, location, second=True) if location is not None and location.origin.born else None


def _made_inside(trace: Trace, location: Location, again: Callable[[], Look | None]) -> Look | None:
    """Where an infinity that a model gave did its harm in the loss: was it a mask of the model's, or made in there? Then the call that made
    it. None if it is a mask, or if nobody knows."""
    if location.origin.leaf is not None:
        return None
    deeper = again() if any(leaf.origin in HIDING for leaf, _ in _leaves(trace, location)) else None
    if deeper is None or deeper.location is None or not deeper.location.origin.born or deeper.location.phase is not location.phase:
        return None
    return None if deeper.location.origin.site == location.origin.site else deeper


def _leaves(trace: Trace, location: Location) -> list[tuple[Leaf, int]]:
    """Return the leaf that an origin is, or those that the infinities came in by of which a call of the loss made a NaN, and which element
    it was."""
    origin = location.origin
    if origin.leaf is not None:
        return [(origin.leaf, origin.flat)]
    if location.phase is not Phase.FORWARD or origin.call is None or not origin.born:
        return []
    roots = (walk_back(trace, *spot) for spot in bad_sources(trace, trace.program.calls[origin.call], origin.value_id, origin.flat))
    found = ((trace.program.leaf(root.value), root.flat) for root in roots)
    return [(leaf, flat) for leaf, flat in found if leaf is not None]


def _made_behind(recording: Recording, trace: Trace, location: Location) -> Look | None:
    """Where an infinity did its harm that came out of a call which cannot be made again: what made it, or that it came of another rank.
    None if that is not known."""
    origin = location.origin
    for leaf, flat in _leaves(trace, location) if origin.leaf is None else ():
        behind = recording.opaque.get(leaf.id)
        element = replace(origin, leaf=leaf, value_id=leaf.id, flat=flat, variable=leaf.name or None)
        look = _through(behind, element, trace.values[leaf.id]) if behind is not None else None
        if behind is not None and look is not None and (look.location.origin.born if look.location is not None else behind.call.exchange):
            return look
    return None


def _behind(recording: Recording, first: Look) -> Look | None:
    """Of what came bad out of a call that cannot be made again: what was bad of its arguments, and where that came from, or that none was,
    and the call itself has made it, or another rank. None if they are not known, or come out of a model."""
    origin = first.location.origin if first.location is not None else None
    behind = recording.opaque.get(origin.leaf.id) if origin is not None and origin.leaf is not None else None
    return None if origin is None or behind is None else _through(behind, origin, recording.tensors[origin.value_id])


def _through(behind: Behind, origin: Element, tensor: Tensor) -> Look | None:
    """origin: what came out of the call, a tensor."""
    code, lasti = behind.call.place
    site = None if code is None else site_of(code, lasti)
    for glue in behind.given:
        own = glue.program.leaf(glue.value)
        if own is not None and (flat := first_nonfinite(glue.tensors[own.id])) is not None:
            if own.id in behind.deeper:
                return _through(behind.deeper[own.id], replace(origin, flat=flat, variable=None), glue.tensors[own.id])
            if own.origin == "module":
                return None
            came = given_look(glue.tensors[own.id], site, "", "" if own.origin == "data" else own.origin)
            words = site.args[1] if behind.call.exchange and site is not None and len(site.args) == 2 else ""
            return _called(came, words) if words.isidentifier() else came
        look = walked(replace(glue.program, computes=Computes.ACTIVATION), dict(glue.tensors)) if own is None else None
        if look is not None and look.location is not None:
            inner = look.location.origin
            if inner.leaf is not None and inner.leaf.id in behind.deeper:
                return _through(behind.deeper[inner.leaf.id], inner, glue.tensors[inner.leaf.id])
            return told(_read_at(look, look.location, site)) if is_settled(look.location) else None
    exchange = behind.call.exchange
    if not (behind.given or exchange) or (exchange and not behind.whole):
        return None
    if exchange and (before := _handed_before(behind, origin)) is not None:
        return before
    name = (origin.variable or (site.args[0] if site is not None and site.args else None)) if exchange else None
    seen = observe_made(behind.call.op, tensor, origin.flat, site, "", Phase.INPUT if exchange else Phase.FORWARD, name)
    seen = replace(seen, kind=Kind.ARRIVED) if exchange else seen
    return only_seen(replace(seen, origin=replace(seen.origin, role=origin.role, masked=origin.masked)))


def _handed_before(behind: Behind, origin: Element) -> Look | None:
    """Where this rank has handed finite numbers to the others, and had handed them bad ones on the way there, which may have come back by
    another one: what had made those. None if it had not."""
    for glue in behind.given:
        for leaf in (leaf.id for leaf in glue.program.leaves if leaf.id in behind.deeper):
            flat = first_nonfinite(glue.tensors[leaf])
            element = None if flat is None else replace(origin, flat=flat, variable=None)
            look = _through(behind.deeper[leaf], element, glue.tensors[leaf]) if element is not None else None
            if look is not None and look.location is not None:
                return look
    return None


def _called(look: Look, name: str) -> Look:
    """What was seen, under the name that it has where a collective was given what it writes to, and this."""
    seen = look.seen
    return look if seen is None else only_seen(replace(seen, origin=replace(seen.origin, variable=name)))


def _read_at(look: Look, location: Location, site: Site | None) -> Look:
    """What nobody was seen to read before is read by the call. site: of that."""
    return replace(look, location=replace(location, origin=replace(location.origin, site=location.origin.site or site)))


def _of_number(recording: Recording, trace: Trace, location: Location) -> Look | None:
    """Of a NaN that the code gave as a number, or made a tensor of: what made the last that went to the host; None if it is none, or none
    did."""
    origin = location.origin
    if origin.site is not None and writes_no_number(origin.site):
        return None  # it came from nowhere
    written = origin.leaf is not None and math.isnan(origin.value) and _is_written_out(trace.program, origin)
    return number_look(recording.numbers, Computes.ACTIVATION) if written or origin.given is not None else None


def _is_written_out(program: Program, origin: Element) -> bool:
    """Is it `torch.tensor(number)`?"""
    reader = next(iter(program.readers(origin.value_id)), None)
    return math.prod(origin.shape) == 1 and reader is not None and reader.name == "lift_fresh"


def number_look(numbers: Sequence[Part], computes: Computes) -> Look | None:
    """Return what made the last number that is not finite and went to the host; None if none did."""
    for program, tensors in reversed(numbers):
        with contextlib.suppress(ProgramError):
            look = walked(replace(program, computes=computes), tensors)
            if look is None or look.location is None:
                continue
            came = computes is Computes.ACTIVATION and not look.location.origin.born  # it was bad when the number was made of it
            return replace(look, location=replace(look.location, phase=Phase.INPUT)) if came else look
    return None


def _as_counted(deeper: Look, trace: Trace, location: Location | None) -> Look:
    """What was followed into a model counts if all that is bad of the model's output does."""
    leaf, inner = location.origin.leaf if location is not None else None, deeper.location
    if (
        leaf is None
        or inner is None
        or deeper.seen is not None
        or deeper.program.computes is not Computes.ACTIVATION
        or inner.phase is not Phase.FORWARD
    ):
        return deeper
    bad = (~torch.isfinite(trace.values[leaf.id])).flatten().nonzero().flatten()[:MANY].tolist()
    counts = bool(bad) and all(is_masked(trace, leaf.id, flat) is False for flat in bad)
    return replace(deeper, seen=Observation(masked=False)) if counts else deeper


MANY = 64  # bad elements of an output of which it is asked whether the loss counts them
