"""What an optimizer keeps of a weight, where that is bad: loaded so, or memory that nobody has written to."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from nanscope.capture.tape import Tape
from nanscope.locate.observe import observe_made
from nanscope.program.local import is_plain, local
from nanscope.program.numbers import first_nonfinite
from nanscope.roles import Role
from nanscope.snapshot.observation import Facts, Observation, Phase


def bad_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, tape: Tape) -> Observation | None:
    """Return the first number that is bad of what an optimizer keeps of a weight, None if none is."""
    for key, state in optimizer.state.get(parameter, {}).items():
        flat = first_nonfinite(state) if isinstance(state, Tensor) and state.is_floating_point() and is_plain(state) else None
        if flat is None:
            continue
        fresh = is_fresh(tape, state)
        return replace(_seen(optimizer, key, state, flat, "empty" if fresh else "state"), facts=Facts(unwritten=fresh))
    return None


OF_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")  # means, or sums, of squares of gradients


def impossible_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Observation | None:
    """Return the least of what an optimizer keeps of squares, where that is below 0: no gradient has made it so; None if it is not."""
    for key, state in optimizer.state.get(parameter, {}).items():
        if key in OF_SQUARES and isinstance(state, Tensor) and state.is_floating_point() and is_plain(state) and bool((state < 0).any()):
            return _seen(optimizer, key, state, int(torch.nan_to_num(state, nan=0.0).argmin()), "state")
    return None


def _seen(optimizer: torch.optim.Optimizer, key: object, state: Tensor, flat: int, op: str) -> Observation:
    seen = observe_made(op, state, flat, None, "", Phase.OPTIMIZER)
    origin = replace(seen.origin, variable=str(key), role=str(Role.OPTIMIZER))
    return replace(seen, origin=origin, optimizer=type(optimizer).__name__)


def is_fresh(tape: Tape, tensor: Tensor) -> bool:
    """Was memory seen to be made that nobody has written to since, or does it hold what torch fills such memory with?"""
    filled = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    part = local(tensor)
    return tape.storages.is_unwritten(tensor) or (filled and part is not None and bool(torch.isnan(part).any()))
