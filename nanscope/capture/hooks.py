"""Hooks that the trainer has put on gradients: a recorded backward pass once more with them, and the one that makes a gradient bad op by op.

    loss.register_hook(lambda grad: grad / scale)      the engine calls it, and what it does comes past the tape

What a recorded program makes again is the backward of its calls alone. So it is run with the hooks of its values in their places, each on
copies and sealed: what a hook counts, keeps and writes does not come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from nanscope.program.calls import Computes
from nanscope.program.numbers import first_nonfinite, is_finite
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.torch_inside import accumulation_hooks, hooks_on

MOST = 256  # hooks of one backward pass that are called again


@dataclass(frozen=True, slots=True)
class Hook:
    """One of them. function: as it was registered. weight: that it is given once the gradient has arrived in it; None where it is given
    the gradient itself."""

    function: Any
    weight: nn.Parameter | None = None


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A hook that has made a bad gradient out of a finite one. value: whose gradient it is, by its id in the program."""

    hook: Hook
    value: int
    received: Tensor


def hooks_of(tensor: Tensor) -> list[Hook]:
    """Return those on a tensor, in the order in which they are called."""
    found = [Hook(function) for function in hooks_on(tensor)]
    if isinstance(tensor, nn.Parameter):
        found += [Hook(function, tensor) for function in accumulation_hooks(tensor)]
    return found


Hooks = Mapping[int, Sequence[Hook]]  # by the id of the value on whose gradient they are


def run_with(program: Program, tensors: Mapping[int, Tensor], hooks: Hooks, budget: int) -> tuple[Run, Spoilt | None]:
    """Run a program and its backward with hooks; return the run, and the first hook in there that made a bad gradient of a finite one.

    Those that are given a weight are called when the pass is over, for weights whose own gradient is bad. Raises what a hook raises, and
    NotIsolated if one cannot be called again.
    """
    if sum(map(len, hooks.values())) > MOST:
        raise NotIsolated(f"there are more than {MOST} hooks on gradients")
    found: list[Spoilt] = []

    def through(value: int, gradient: Tensor) -> Tensor:
        for hook in hooks[value]:
            if found or hook.weight is not None:
                continue
            made = _called(hook, gradient, budget)[0]
            if bool(is_finite(gradient)) and not bool(is_finite(made)):
                found.append(Spoilt(hook, value, gradient.detach()))
            gradient = made
        return gradient

    run = program.execute(tensors, trace=True, hooks={value: partial(through, value) for value in hooks})
    for value, there in hooks.items():
        gradient = run.grads.get(value)
        for hook in there if gradient is not None and not found else ():
            bad = hook.weight is not None and hook.weight.grad is not None and not bool(is_finite(hook.weight.grad))
            if bad and gradient is not None and bool(is_finite(gradient)):
                gradient = _called(hook, gradient, budget)[0]
                found += [] if bool(is_finite(gradient)) else [Spoilt(hook, value, run.grads[value])]
    return run, next(iter(found), None)


def run_again(found: Spoilt, budget: int) -> Repeated | None:
    """Return what a hook makes of a gradient as a program; None if it comes out finite now."""
    tape = Tape(budget)
    made, received, copies = _called(found.hook, found.received, budget, tape)
    flat = first_nonfinite(made)
    if flat is None:
        return None
    value = tape.find(made)
    if value is None:
        return Repeated(None, {}, None, made, flat, is_marked(made))
    program, tensors = tape.program(value)
    places = {leaf: place_of(copies.original(tensor)) for leaf, tensor in tensors.items()}
    own = (received,) if received is not None else ()
    return Repeated(replace(program, computes=Computes.GRADIENT), tensors, None, made, flat, is_marked(made), places, own)


def _called(hook: Hook, gradient: Tensor, budget: int, tape: Tape | None = None) -> tuple[Tensor, int | None, Copies]:
    """What a hook makes of a gradient, and the id of that on the tape."""
    names = Reach([hook.function]).names  # a method belongs to a trainer, of which it reads little
    copies = Copies(budget, lent, names=names)
    function, weight, received = copies.of((hook.function, hook.weight, gradient.detach()))
    id_ = None
    if tape is not None:
        tape.tag("grad", received)
        id_ = tape.value_of(received).id
    with torch.no_grad(), sealed(Seal(copies.own(), marks=tape is not None), [function, *copies.code]):
        if tape is None:
            result = _result(function, weight, received)
        else:
            with TapeMode(tape):
                result = _result(function, weight, received)
    return result, id_, copies


def _result(function: Callable[[Tensor], object], weight: Tensor | None, received: Tensor) -> Tensor:
    if weight is None:
        result = function(received)
        return result if isinstance(result, Tensor) else received
    weight.grad = received
    function(weight)
    return received if weight.grad is None else weight.grad
