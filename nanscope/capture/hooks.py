"""Hooks that the trainer has put on gradients: a recorded backward pass once more with them, and the one that spoils it op by op.

    loss.register_hook(lambda grad: grad / scale)      the engine calls it, and what it does comes past the tape

What a recorded program makes again is the backward of its calls alone. So it is run with the hooks of its values in their places, each on
copies and sealed: what a hook counts, keeps and writes does not come out. One that can only look, as to log a norm, is not called: it may
tell somebody.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from nanscope.capture.alone import NotIsolated
from nanscope.capture.copies import Copies, lent
from nanscope.capture.custom import Repeated
from nanscope.capture.mode import TapeMode
from nanscope.capture.modules import place_of
from nanscope.capture.reach import Reach
from nanscope.capture.seal import Seal, is_marked, sealed
from nanscope.capture.tape import Tape
from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Computes, Ref, substitute
from nanscope.program.numbers import first_nonfinite, is_finite
from nanscope.program.program import Program
from nanscope.torch_inside import accumulation_hooks, hooks_on, module_hooks

MOST = 256  # hooks of one backward pass that are called again
OF_RANKS = "torch.distributed."  # where torch's own hooks come from that gather weights and ask other ranks, and hand gradients on


@dataclass(frozen=True, slots=True)
class Hook:
    """One of them. function: as it was registered. weight: that it is given once the gradient has arrived in it. module: that it is given,
    with gradients. into: of one that is called when the module has been gone through, what the module made. inside: what was made between.
    """

    function: Any
    weight: nn.Parameter | None = None
    module: nn.Module | None = None
    into: int | None = None
    inside: frozenset[int] = frozenset()


Hooks = Mapping[int, Sequence[Hook]]  # by the id of the value on whose gradient they are
Given = tuple[Tensor, ...]  # the gradient that a hook may change, and the one that came into its module


@dataclass(frozen=True, slots=True)
class Ruined:
    """A hook that has made a bad gradient out of a finite one. value: whose gradient it is, by its id in the program."""

    hook: Hook
    value: int
    given: Given


def hooks_of(tensor: Tensor) -> list[Hook]:
    """Return those on a tensor, in the order in which they are called."""
    found = [Hook(function) for function in hooks_on(tensor)]
    if isinstance(tensor, nn.Parameter):
        found += [Hook(function, weight=tensor) for function in accumulation_hooks(tensor)]
    return found


def hooks_of_module(module: nn.Module, given: int, made: int, inside: frozenset[int]) -> Iterator[tuple[int, Hook]]:
    """Yield those on a module that was given one value and has made one, each with the value on whose gradient it is."""
    before, after = module_hooks(module)
    yield from ((made, Hook(function, module=module)) for function in before)
    yield from ((given, Hook(function, module=module, into=made, inside=inside)) for function in after)


def run_with(program: Program, tensors: Mapping[int, Tensor], hooks: Hooks, budget: int) -> tuple[Trace, Ruined | None]:
    """Run a program and its backward with hooks; return what it gave, and the first hook that made a bad gradient of a finite one.

    Those that are given a weight are called when the pass is over, for weights whose own gradient is bad. Raises what a hook raises, and
    NotIsolated if one cannot be called again.
    """
    if sum(map(len, hooks.values())) > MOST:
        raise NotIsolated(f"there are more than {MOST} hooks on gradients")
    program, hooks = _apart(program, {value: acting for value, own in hooks.items() if (acting := [hook for hook in own if acts(hook)])})
    passed: dict[int, Tensor] = {}  # what came into modules
    found: list[Ruined] = []

    def through(value: int, gradient: Tensor) -> Tensor:
        for hook in hooks[value]:
            if found or hook.weight is not None:
                continue
            given = (gradient,) if hook.into is None else (gradient, passed[hook.into])
            made = _called(hook, given, budget)[0]
            if bool(is_finite(gradient)) and not bool(is_finite(made)):
                found.append(Ruined(hook, value, tuple(one.detach() for one in given)))
            gradient = made
        passed[value] = gradient
        return gradient

    run = program.execute(tensors, trace=True, hooks={value: partial(through, value) for value in hooks})
    for value, there in hooks.items():
        gradient = run.grads.get(value)
        for hook in there if gradient is not None and not found else ():
            bad = hook.weight is not None and hook.weight.grad is not None and not bool(is_finite(hook.weight.grad))
            if bad and gradient is not None and bool(is_finite(gradient)):
                given = (gradient,)
                gradient = _called(hook, given, budget)[0]
                found += [] if bool(is_finite(gradient)) else [Ruined(hook, value, given)]
    return Trace(program, run), next(iter(found), None)


def acts(hook: Hook) -> bool:
    """May a hook change a gradient? One that never returns anything does so only where it is given a weight, or writes in place; one that
    torch has put there for its ranks does not."""
    function = hook.function.func if isinstance(hook.function, partial) else hook.function
    function = getattr(function, "__func__", function)
    if f"{getattr(function, '__module__', '')}.".startswith(OF_RANKS):
        return False
    code = getattr(function, "__code__", None) or getattr(vars(type(function)).get("__call__"), "__code__", None)
    if hook.weight is not None or not isinstance(code, CodeType):
        return True
    steps = list(dis.get_instructions(code))
    returned = [before for before, step in pairwise(steps) if step.opname == "RETURN_VALUE"]
    returned += [step for step in steps if step.opname == "RETURN_CONST"]
    writes = any(name.endswith("_") and not name.endswith("__") for name in code.co_names) or "STORE_SUBSCR" in {s.opname for s in steps}
    return writes or any(step.argval is not None or not step.opname.endswith("CONST") for step in returned)


def _apart(program: Program, hooks: Hooks) -> tuple[Program, Hooks]:
    """Let each module that has a hook behind it read a double of what it is given: others may read that, too, past the hook."""
    calls, own = list(program.calls), dict[int, list[Hook]]()
    fresh = program.new_id()
    for value, there in hooks.items():
        for hook in there:
            if hook.into is None:
                own.setdefault(value, []).append(hook)
                continue
            readers = [at for at, call in enumerate(calls) if not hook.inside.isdisjoint(call.outs) and value in call.inputs()]
            if not readers:
                continue
            swap = {value: fresh}
            for at in readers:
                kwargs = tuple((name, substitute(arg, swap)) for name, arg in calls[at].kwargs)
                calls[at] = replace(calls[at], args=tuple(substitute(arg, swap) for arg in calls[at].args), kwargs=kwargs)
            calls.insert(readers[0], Call("aten.clone.default", (Ref(value),), (), (fresh,)))
            own[fresh] = [hook]
            own.setdefault(hook.into, [])
            fresh += 1
    return replace(program, calls=tuple(calls)), own


def run_again(found: Ruined, budget: int) -> Repeated | None:
    """Return what a hook makes of a gradient as a program; None if it comes out finite now."""
    tape = Tape(budget)
    made, received, copies = _called(found.hook, found.given, budget, tape)
    flat = first_nonfinite(made)
    if flat is None:
        return None
    value = tape.find(made)
    if value is None:
        return Repeated(None, {}, None, made, flat, is_marked(made))
    program, tensors = tape.program(value)
    places = {leaf: place_of(copies.original(tensor)) for leaf, tensor in tensors.items()}
    return Repeated(replace(program, computes=Computes.GRADIENT), tensors, None, made, flat, is_marked(made), places, received)


def _called(hook: Hook, given: Given, budget: int, tape: Tape | None = None) -> tuple[Tensor, tuple[int, ...], Copies]:
    """What a hook makes of a gradient, and the ids of what it was given on the tape."""
    names = Reach([hook.function]).names  # a method belongs to a trainer, of which it reads little
    copies = Copies(budget, lent, names=names)
    function, weight, module, received = copies.of((hook.function, hook.weight, hook.module, given))
    ids: list[int] = []
    if tape is not None:
        for tensor in received:
            tape.tag("grad", tensor)
            ids.append(tape.value_of(tensor).id)
    seal = Seal(copies.own(), marks=tape is not None)
    with torch.no_grad(), sealed(seal, [function, *copies.code]), nullcontext() if tape is None else TapeMode(tape):
        if weight is not None:
            weight.grad = received[0]
            function(weight)
            made: object = weight.grad
        elif module is not None:
            made = function(module, *((one,) for one in received))
        else:
            made = function(received[0])
    made = made[0] if isinstance(made, tuple) else made
    return made if isinstance(made, Tensor) else received[0], tuple(ids), copies
