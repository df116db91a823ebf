"""Looking closer at what a bad loss came of, by running it once more: a kernel, the model, a custom function, a hook."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanscope.capture import custom, hooks, kernels
from nanscope.capture.alone import alone
from nanscope.capture.custom import Backward
from nanscope.capture.follow import Made, kinds_of
from nanscope.capture.glue import betweens
from nanscope.capture.modules import ModuleWatch, place_of, tensors_in
from nanscope.capture.rerun import Apart, Reruns
from nanscope.capture.source import site_of
from nanscope.errors import ProgramError, words_of
from nanscope.locate.facts import extent_of
from nanscope.locate.location import came_in, is_masked, left_behind, locate
from nanscope.locate.observe import observe, observe_made, observe_returned
from nanscope.locate.trace import Trace
from nanscope.program.calls import Computes
from nanscope.program.local import local
from nanscope.program.numbers import at, first_nonfinite, is_finite
from nanscope.snapshot.observation import COMPILED, Facts, Observation, Phase
from nanscope.torch_inside import function_of
from nanscope.watching.functions import by_received, counted, function_walked, is_unwritten
from nanscope.watching.laid import in_its_weight
from nanscope.watching.look import NOTHING, Look, given_look, is_settled, made_look, named_there, only_seen, run_again, told, walked
from nanscope.watching.recording import Recording

log = logging.getLogger("nanscope")

HANDED_ON = -2  # stands among the leaves for what one module has made and another one was given


def second_look(recording: Recording, reruns: Reruns) -> Look | None:
    """Run the model's forward once more under a tape and walk through it; None if that is not possible."""
    looked = reruns.second_look(recording.program, recording.tensors)
    if looked is None:
        return None
    trace = Trace.of(*looked, lean=True)
    return Look(trace, locate(trace), second=True)


@alone()
def kernel_look(recording: Recording, reruns: Reruns) -> Look | None:
    """Look into a kernel that computed the loss, by running its formula on what it was given; None if there was none."""
    try:
        opened = kernels.reopen(recording.glimpses, _given(recording, reruns), reruns.budget)
        if opened is None:
            return None
        trace = Trace.of(*opened, lean=True)
        return Look(trace, locate(trace), second=True, kernel=True, notes=(_kernel_note(recording, trace),))
    except Exception as error:  # noqa: BLE001 - the formula is the framework's, and what it needs may not all be here
        log.warning("nanscope [kernel-unopened]: %s", words_of(error))
        reruns.notes.append(("not_run_again", f"the formula of a kernel could not be run: {words_of(error)}"))
        return None


def swallowed_look(recording: Recording, budget: int, watch: ModuleWatch) -> Look | None:
    """Look at a step that stayed finite because a kernel dropped a NaN of its batch; None if it harmed no token that counts."""
    found = kernels.kernel_of(recording.glimpses)
    taken = {name: content for name, taken in recording.taken.items() if (content := taken.content()) is not None}
    if found is None or not kernels.swallowed(found[0], taken):
        return None
    return kernel_look(recording, reruns_of(recording, watch, budget))


def reruns_of(recording: Recording, watch: ModuleWatch, budget: int) -> Reruns:
    """Return the calls of models that a loss may have come of, to be made again. budget: bytes of tensors that are copied, and recorded."""
    glue = recording.all_glue()
    places = {**recording.places, **{value: place for one in betweens(glue) for value, place in one.places.items()}}
    reruns = Reruns(recording.all_calls(), watch, budget, places, glue)
    if all(call.told for call in reruns.calls):
        return reruns
    given = (tensor for call in reruns.calls for tensor in tensors_in([call.args, call.kwargs]))
    loose = [*recording.tensors.values(), *(tensor for one in betweens(glue) for tensor in one.tensors.values()), *given]
    loose = [tensor for tensor in loose if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)]
    try:
        return reruns.found(loose)
    except Exception as error:  # noqa: BLE001 - it is anybody's code, and may not like to be run again
        reruns.note("not_run_again", f"what is compiled could not be run again as it is written: {words_of(error)}")
        return reruns


def _given(recording: Recording, reruns: Reruns) -> dict[str, Tensor]:
    """Return the arguments of a kernel. What was not held, or what its backward has overwritten, is made again by the model."""
    given = {name: content for name, taken in recording.taken.items() if (content := taken.content()) is not None}
    found = kernels.kernel_of(recording.glimpses)
    if found is not None and found[0].hidden in recording.taken and (not found[0].weight or found[0].hidden not in given):
        given.pop(found[0].hidden, None)
        again = reruns.output(recording.taken[found[0].hidden].address)
        given |= {} if again is None else {found[0].hidden: again}
    return given


AGREES = 1e-3  # relative; a kernel adds in another order, and in lower precision


def _kernel_note(recording: Recording, trace: Trace) -> tuple[str, str]:
    """Say what a kernel's loss is beside that of its formula."""
    found = kernels.kernel_of(recording.glimpses)
    name = found[1].site.function.split(".")[0] if found is not None else "a kernel"
    theirs, ours = recording.value, float(trace.values[trace.program.output].double().sum())
    if theirs is None or (math.isfinite(theirs) == math.isfinite(ours) and not abs(theirs - ours) > AGREES * max(abs(ours), 1e-3)):
        return ("kernel_opened", f"{name} computes the loss inside one kernel; its formula was run again on the same batch")
    if math.isfinite(theirs) and not math.isfinite(ours):
        text = f"{name} hides it: its loss is {theirs:.6g}, the same formula gives {ours}; min and max of a Triton kernel drop a NaN"
        return ("kernel_swallows", text)
    return ("kernel_differs", f"{name} gives {theirs:.6g}, its formula on the same batch {ours:.6g}")


@alone()
def deeper_look(recording: Recording, budget: int, watch: ModuleWatch, backward: bool = False) -> Look | None:
    """Look into a kernel, then into the model: by running it as a program, and where that does not reach the origin, by following its
    calls.

    backward: the loss is finite, a gradient is not.
    """
    reruns = reruns_of(recording, watch, budget)
    look = _deeper(recording, reruns, backward)
    if not reruns.notes:
        return look
    return replace(look or NOTHING, notes=(*(look or NOTHING).notes, *reruns.notes))


def _deeper(recording: Recording, reruns: Reruns, backward: bool) -> Look | None:
    opened = kernel_look(recording, reruns)
    if opened is not None and opened.location is not None and is_settled(opened.location):
        return opened
    own = function_look(recording, reruns) if backward else None
    if own is not None:
        return own
    functions = reruns.of_functions()
    for calls in (functions, reruns) if functions is not None else (reruns,):
        look = run_again(reruns.notes, functools.partial(second_look, recording, calls)) or opened
        if look is not None and look.location is not None and is_settled(look.location):
            return look
        if reruns.apart:
            return _apart(reruns.apart[-1])
    changed = run_again(reruns.notes, lambda: _hooked(recording, reruns, look), "a hook on a gradient") if backward else None
    if changed is not None:
        return changed
    follow = _followed_back if backward else _followed
    followed = run_again(reruns.notes, lambda: follow(recording, reruns)) if recording.program is not None else None
    found = followed or _given_bad(recording, reruns) or _kept(recording, reruns)
    if found is None:
        reruns.note_not_held()
    return found or look


def _apart(found: Apart) -> Look:
    """What came bad out of compiled code, and does not where that runs as it is written."""
    code, lasti = found.call.caller
    site, flat = None if code is None else site_of(code, lasti), first_nonfinite(found.recorded) or 0
    seen = observe_made(COMPILED, found.recorded, flat, site, "", Phase.FORWARD)
    origin = replace(seen.origin, operands=((found.call.name, at(found.made, flat)),))
    return only_seen(replace(seen, origin=origin))


def _kept(recording: Recording, reruns: Reruns) -> Look | None:
    """Return what was seen of the model before its backward pass, which may be all there is where it cannot be run again."""
    if recording.within is None:
        if reruns.watch.parts is not None:
            reruns.watch.parts.eager = True
        return None
    seen, note = recording.within
    reruns.note(*note)
    return only_seen(seen)


def _given_bad(recording: Recording, reruns: Reruns) -> Look | None:
    """Return what was bad in a model before it ran, a weight or an argument; None if nothing was. One that cannot be run again needs no
    other reason."""
    weight = weight_look(recording, reruns.watch)
    if weight is not None:
        return weight
    made = {place for call in recording.all_calls() for place in call.outputs}
    for tensor in tensors_in([[call.args, call.kwargs] for call in recording.all_calls()]):
        if place_of(tensor) not in made and kinds_of(tensor).nan:  # infinity is what masks are made of
            look = _between(reruns, tensor)
            if look is None or look.location is None:
                return _called_so(reruns, tensor, given_look(tensor, None, ""))
            if look.location.origin.leaf is None or look.location.origin.leaf.origin != "module":
                return _called_so(reruns, tensor, told(look))
    return None


def weight_look(recording: Recording, watch: ModuleWatch) -> Look | None:
    """Return the first weight that is bad of the models that a loss came of, None if none is. Others may be bad, and have no part in it."""
    named = watch.parameters()
    own = {id(weight) for call in recording.calls for model in call.models for weight in model.parameters()} or named.keys()
    for key, (name, parameter) in named.items():
        if key in own and not bool(is_finite(parameter)):
            seen = observe_made("parameter", parameter, first_nonfinite(parameter) or 0, None, "", Phase.WEIGHTS, name)
            return only_seen(in_its_weight(seen, parameter, named))
    return None


def _between(reruns: Reruns, tensor: Tensor) -> Look | None:
    """Walk through the lines of the trainer that led to an argument of a model; None if none were seen."""
    glue = reruns.glue_of(place_of(tensor))
    with contextlib.suppress(ProgramError):
        return None if glue is None else walked(replace(glue.program, computes=Computes.ACTIVATION), dict(glue.tensors))
    return None


def function_look(recording: Recording, reruns: Reruns) -> Look | None:
    """Run the backward of a custom autograd function once more that made NaN out of finite gradients; None if none did."""
    for found in recording.backwards:
        if not found.spoilt():
            continue
        if not bool(is_finite(recording.tensors[found.leaf])):
            return _of_forward(recording, found)
        inside = _inside_backward(recording, found, reruns)
        leaf = None if recording.program is None else recording.program.leaf(found.leaf)
        if inside is not None or leaf is None or leaf.origin != "module":
            return inside or _named_by(found)
    return None  # of what a module has returned, its forward may tell more


def _inside_backward(recording: Recording, found: Backward, reruns: Reruns, module: str = "") -> Look | None:
    """What went wrong in the backward of a custom function: the call in there, or memory that nobody wrote; None if that is not seen."""
    again = functools.partial(_function_again, recording, found, reruns.budget, module)
    return run_again(reruns.notes, again, f"the backward of {custom.backward_of(found.node)[0]}")


def _named_by(found: Backward, module: str = "") -> Look:
    """A gradient that a custom function has made bad, nobody sees how."""
    name, site = custom.backward_of(found.node)
    gradient = next(grad for grad in found.returned if grad is not None and not bool(is_finite(grad)))
    return only_seen(observe_made(name, gradient, first_nonfinite(gradient) or 0, site, module, Phase.BACKWARD))


def _function_again(recording: Recording, found: Backward, budget: int, module: str) -> Look | None:
    again = custom.run_again(found, budget)
    if again is None:
        return None
    look = Look(*function_walked(recording, again), second=True) if again.program is not None else None
    if look is not None and look.location is not None and (look.location.origin.born or is_unwritten(look.location)):
        return replace(look, seen=counted(recording, found, again, look.location, look.trace))
    name, site = custom.backward_of(found.node)
    if bool(again.unwritten.flatten()[again.flat]):
        seen = observe_made(name, again.gradient, again.flat, site, module, Phase.BACKWARD, again.argument)
        seen = replace(seen, facts=Facts(unwritten=True, extent=extent_of(again.unwritten, seen.origin.index)))
        return only_seen(seen.joined(by_received(found, seen.origin.shape, again.flat)))
    return None


def _hooked(recording: Recording, reruns: Reruns, look: Look | None) -> Look | None:
    """Look into the hooks that autograd calls: into that which makes a bad gradient of a finite one, or to where theirs becomes a bad one.

    look: at the whole program, where that could be run again.
    """
    program, tensors = (
        (look.program, look.tensors) if look is not None and look.trace is not None else (recording.program, recording.tensors)
    )
    values = {leaf.id for leaf in program.leaves} | program.producers.keys() if program is not None else set()
    within = {value: found for value, found in reruns.hooks.items() if value not in recording.tensors}  # there may be ours on those
    there = {value: found for value, found in {**within, **recording.others}.items() if value in values}
    if program is None or not there:
        return None
    trace, found = hooks.run_with(program, tensors, there, reruns.budget)
    if found is None:
        location = locate(trace)
        return None if location is None else only_seen(replace(observe(location, trace), outside=True))
    again = hooks.run_again(found, reruns.budget)
    if again is None or again.program is None:
        return None
    inner, location = function_walked(recording, again)
    if not (location.origin.born or is_unwritten(location)):
        return None
    alike = location.origin.shape == tuple(trace.values[found.value].shape)
    masked = is_masked(trace, found.value, location.origin.flat) if alike else None
    return Look(inner, location, second=True, seen=Observation(masked=masked))


def _of_forward(recording: Recording, found: Backward) -> Look:
    """The result of a function overflowed, the loss dropped it, and the function's own backward multiplied it by a zero gradient."""
    assert recording.program is not None
    result = recording.tensors[found.leaf].detach()
    bad = ~torch.isfinite(result)
    returned = [local(grad) for grad in found.returned if grad is not None]
    alike = [~torch.isfinite(grad) for grad in returned if grad is not None and grad.shape == result.shape]
    both = next((bad & other for other in alike if bool((bad & other).any())), bad)
    trace = Trace.of(recording.program, recording.tensors, backward=False)
    location = came_in(trace, found.leaf, int(both.flatten().int().argmax()))
    location = replace(location, origin=replace(location.origin, op=function_of(found.node).__name__))
    return only_seen(replace(observe(location, trace), outside=True))


def _followed(recording: Recording, reruns: Reruns) -> Look | None:
    made, edge = None, recording.edge()
    for _ in range(1 + len(reruns.calls)):  # from module to module, and through what lies between them
        before, made = made, reruns.follow(edge)
        if made is None:
            return None if before is None else given_look(before.result, before.site, before.module, "module")
        if not made.foreign:
            return made_look(made)
        name = reruns.watch.parameter_name(made.result) or reruns.watch.weight_at(made.result)
        kind, name = ("parameter", name) if name is not None else ("buffer", reruns.watch.buffer_at(made.result))
        if name is not None:
            return only_seen(observe_made(kind, made.result, made.flat, made.site, made.module, Phase.WEIGHTS, name))
        look = _between(reruns, made.result) or NOTHING
        leaf = look.location.origin.leaf if look.location is not None else None
        if leaf is not None and leaf.origin == "module":
            edge = {leaf.id: look.tensors[leaf.id]}
        elif look.program.calls:
            return _called_so(reruns, made.result, told(look))
        elif leaf is None and reruns.maker(place_of(made.result)):
            edge = {HANDED_ON: made.result}
        else:
            return _called_so(reruns, made.result, given_look(made.result, made.site, made.module, "" if leaf is None else leaf.origin))
    return None


def _called_so(reruns: Reruns, tensor: Tensor, look: Look) -> Look:
    """What a model was given bad, and nobody has read before, has its name and its line from where the model was called."""
    seen = look.seen
    if seen is None or seen.phase is not Phase.INPUT or (seen.origin.variable and seen.origin.file):
        return look
    place = place_of(tensor)
    for call in reruns.calls:
        code, lasti = call.caller
        site = None if code is None else site_of(code, lasti)
        position = next((at for at, arg in enumerate(call.args or ()) if isinstance(arg, Tensor) and place_of(arg) == place), None)
        name = next((name for name, arg in call.kwargs.items() if isinstance(arg, Tensor) and place_of(arg) == place), None)
        if site is None or (position is None and name is None):
            continue
        words = site.args[position] if position is not None and position < len(site.args) else name
        return named_there(look, words, site)
    return look


def _followed_back(recording: Recording, reruns: Reruns) -> Look | None:
    assert recording.program is not None
    grads: Mapping[int, Tensor] = recording.grads
    if any(leaf.diff and leaf.id not in grads for leaf in recording.program.leaves):
        grads = recording.program.execute(recording.tensors, ends=True).grads
    try:
        found = reruns.follow_back(recording.edge(), grads)
    except RuntimeError as error:
        if "reentrant" not in str(error):  # by which torch refuses to differentiate such a checkpoint for chosen tensors
            raise
        found = replace(reruns, through=True).follow_back(recording.edge(), grads)
    if found is None:
        return None
    made, module, left = found
    if made.function is not None:
        saved = None if left is None else only_seen(_left_behind(left.made))
        return _inside_backward(recording, made.function, reruns, module) or saved or _named_by(made.function, module)
    if left is None:
        return only_seen(observe_returned(made.op, made.gradient, made.flat, made.site, module))
    seen = _left_behind(left.made)
    if left.dropped:
        origin = replace(seen.origin, masked=True, masked_by="its gradient is 0")
        seen = replace(seen, origin=origin, facts=replace(seen.facts, dropped=True))
    return only_seen(seen)


def _left_behind(left: Made) -> Observation:
    """Return what forward had made bad, with what it was made of where that is known."""
    if left.program is not None:
        with contextlib.suppress(ProgramError):
            trace = Trace.of(left.program, left.tensors, backward=False)
            return replace(observe(left_behind(trace, left.flat), trace), outside=True)
    return observe_made(left.op, left.result, left.flat, left.site, left.module, Phase.BACKWARD)
