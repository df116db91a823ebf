"""Only on a hit: the update that an optimizer made to a weight, made once more on copies of everything it reads and writes."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nanscope.capture.copies import Copies, cloned
from nanscope.capture.mode import TapeMode
from nanscope.capture.seal import Seal, sealed
from nanscope.capture.tape import Tape
from nanscope.program.calls import Computes
from nanscope.program.numbers import at, first_nonfinite
from nanscope.program.program import Program

USUAL = 0.02  # an element of a weight of which none is finite any more
SMALL_GROUP = 64 << 20  # bytes of the weights of a group that are copied to make their update once more

# What the last step of each was given beside a closure: an update that depends on that is another one without it.
_GIVEN: WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[Any, ...], dict[str, Any]]] = WeakKeyDictionary()
_PLAIN = (bool, int, float, str, type(None))


def remember(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """An optimizer is about to step, with these numbers and words."""
    if all(isinstance(one, _PLAIN) for one in (*args, *kwargs.values())):
        _GIVEN[optimizer] = (args, dict(kwargs))


LEFT_OUT = ("param_groups", "state", "step", "zero_grad")  # attributes: what is copied by parts, and what schedulers put over the methods


def update_again(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, budget: int, first: bool
) -> tuple[Program, dict[int, Tensor]] | None:
    """Return the program of the update that an optimizer made to one parameter, and its leaves; None if it does not come out again.

    The update is made once more on copies, with the state that it left behind: what was non-finite in gradient and state counts as 0, as
    the best that is still known of what was there before; an optimizer may write to gradients, too. For what is non-finite of the weight a
    usual element of it stands, of the sign that comes out as it did. first: it was the optimizer's first step, before which there was no
    state. The whole group is copied if it is small: an optimizer may stack its weights. Raises LookupError if the optimizer cannot be
    copied.
    """
    found: tuple[Program, dict[int, Tensor]] | None = None
    for instead in _stand_ins(parameter):
        made = _made_again(optimizer, parameter, name, budget, first, instead)
        if made is None:
            continue
        program, tensors, after = made
        if _comes_out_so(after, parameter):
            return program, tensors
        found = found or (program, tensors)
    return found


def _stand_ins(parameter: nn.Parameter) -> tuple[float, ...]:
    """What may have been where a weight is not finite: about as much as elsewhere in it."""
    fine = parameter.detach()[torch.isfinite(parameter.detach())].abs()
    begins_at_0 = parameter.dim() < 2  # as biases do
    usual = float(fine.float().median()) if fine.numel() else 0.0 if begins_at_0 else USUAL
    return (usual, -usual, 0.0) if usual else (0.0,)


def _comes_out_so(after: Tensor, parameter: nn.Parameter) -> bool:
    """Is a weight not finite after an update that was made again in the way in which it is?"""
    flat = first_nonfinite(parameter)
    if flat is None:
        return True
    made, meant = at(after.detach(), flat), at(parameter.detach(), flat)
    return made == meant or (math.isnan(made) and math.isnan(meant))


def _made_again(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, budget: int, first: bool, instead: float
) -> tuple[Program, dict[int, Tensor], Tensor] | None:
    """Make the update once more. instead: of what is not finite in the weight. Returns its program, the leaves, and the weight after it."""
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    members = group["params"] if sum(p.numel() * p.element_size() for p in group["params"]) <= SMALL_GROUP else [parameter]
    plain: dict[str, Any] = {key: False for key in ("foreach", "fused", "capturable") if key in group}
    copied: Any = object.__new__(type(optimizer))
    copies = Copies(budget, partial(_twin, instead=instead), _finite)
    copies.stand_in(optimizer, copied)
    rest = {key: value for key, value in vars(optimizer).items() if key not in LEFT_OUT and not key.endswith("_hooks")}
    states = [] if first else [(member, optimizer.state.get(member, {})) for member in members]
    rest, own_group, own_states = copies.of((rest, {**group, **plain, "params": members}, states))
    copied.__dict__.update(rest, param_groups=[own_group], state=defaultdict(dict, own_states))
    copied.__dict__.update({key: OrderedDict() for key in vars(optimizer) if key.endswith("_hooks")})
    twin = own_group["params"][next(place for place, member in enumerate(members) if member is parameter)]
    tape = Tape(budget)
    tape.leaves.is_parameter = lambda tensor: name if tensor is twin else None
    for key, value in (("gradient", twin.grad), *copied.state[twin].items()):
        if isinstance(value, Tensor):
            tape.tag(key, value)
    step = type(optimizer).step
    grads = [copy.grad for _, copy in copies.pairs() if copy.grad is not None]
    with sealed(Seal([*copies.own(), *grads]), [type(optimizer), *copies.code]), TapeMode(tape):
        args, kwargs = _GIVEN.get(optimizer, ((), {}))
        getattr(step, "__wrapped__", step)(copied, *args, **kwargs)  # without the hooks that people have put on the real one
    value = tape.find(twin)
    if value is None:
        return None
    program, tensors = tape.program(value)
    return replace(program, computes=Computes.UPDATE), tensors, twin


def _twin(parameter: nn.Parameter, instead: float) -> Tensor:
    twin = nn.Parameter(_finite(parameter, instead), requires_grad=False)
    twin.grad = None if parameter.grad is None else _finite(parameter.grad)
    return twin


def _finite(tensor: Tensor, instead: float = 0.0) -> Tensor:
    content = cloned(tensor.detach())
    return content.nan_to_num_(nan=instead, posinf=instead, neginf=instead) if content.is_floating_point() else content
