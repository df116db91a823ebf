"""What was written into a weight or a gradient: by an optimizer, whose update is made again, or by the lines of the loop, as recorded."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanscope.capture.alone import alone
from nanscope.capture.tape import Tape
from nanscope.capture.update import update_again
from nanscope.errors import ProgramError
from nanscope.locate.observe import observe_made
from nanscope.locate.origin import Element
from nanscope.program.calls import Computes
from nanscope.program.local import is_plain
from nanscope.program.numbers import first_nonfinite
from nanscope.program.program import Program
from nanscope.snapshot.observation import STOOD_IN, Phase
from nanscope.watching.look import NOTHING, Look, only_seen, run_again, walked
from nanscope.watching.states import bad_state, impossible_state

WRITES = 8  # to the memory of one weight, that are looked into, the latest first


@alone()
def update_look(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, budget: int, first: bool, fine: bool, tape: Tape
) -> Look:
    """Make the update of one parameter once more and walk through it; what cannot be made again shows nothing. first: the optimizer's
    first step. fine: the weight was finite before it. tape: has seen who made the optimizer's state.

    An update that makes a finite weight out of a finite one was not to blame: the weight was bad before it, or else what the optimizer
    keeps of it was.
    """
    notes: list[tuple[str, str]] = []
    if not is_plain(parameter):
        return NOTHING  # an optimizer may ask for all of a weight that this process holds a part of

    def again() -> Look | None:
        if (state := impossible_state(optimizer, parameter)) is not None:
            return only_seen(replace(state, weight=name))
        made = update_again(optimizer, parameter, name, budget, first)
        if made is None:
            return None
        program, tensors = _stood_in(made[0], name), made[1]
        look = walked(program, tensors, first_in=parameter)
        if look is not None and look.location is not None and _reads_the_weight(look.location.origin, program):
            notes.append(("usual_weight", f"what {name} was before the update is not kept: a usual element of it stands for it"))
        if look is None and first_nonfinite(program.execute(tensors, ends=True).values[program.output]) is None:
            if fine:
                state = bad_state(optimizer, parameter, tape)
                return None if state is None else only_seen(replace(state, weight=name))
            flat = first_nonfinite(parameter) or 0
            return only_seen(observe_made("parameter", parameter, flat, None, "", Phase.WEIGHTS, name))
        return look

    look = run_again(notes, again, f"the update of {type(optimizer).__name__}") or NOTHING
    return replace(look, notes=(*look.notes, *notes))


def _stood_in(program: Program, name: str) -> Program:
    """Call what stands in an update for the weight of that name what it is."""
    return replace(program, leaves=tuple(replace(leaf, name=STOOD_IN) if leaf.name == name else leaf for leaf in program.leaves))


def _reads_the_weight(origin: Element, program: Program) -> bool:
    """Is the weight itself an operand of what went wrong?"""
    own = {leaf.id for leaf in program.leaves if leaf.name == STOOD_IN}
    return origin.born and any(operand.id in own for operand in origin.operands)


def written_look(tape: Tape, tensor: Tensor, computes: Computes = Computes.GRADIENT) -> Look | None:
    """Walk through what the trainer did to a gradient between backward and the optimizer, or to a weight; None if the tape did not see
    it made."""
    found: list[Look] = []
    for value in (tape.value_of(tensor), *tape.storages.made_within(tensor)[:WRITES]):
        with contextlib.suppress(ProgramError, LookupError):
            program, tensors = tape.program(value)
            if program.calls and (look := walked(replace(program, computes=computes), tensors)) is not None:
                found.append(look)
    return next((look for look in found if look.location is not None and look.location.origin.born), next(iter(found), None))
