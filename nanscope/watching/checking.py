"""`nanscope.check`: the hazards of a saved step, or of a loss that is called once under the tape.

nanscope.check("step-000004.rank0.safetensors")
nanscope.check(my_loss, {"log_probs": log_probs, "old_log_probs": old, "advantages": advantages, "mask": mask})
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanscope.atlas.batch import healthy
from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.errors import NanscopeError
from nanscope.foresight.hazard import Check
from nanscope.foresight.search import check as search
from nanscope.given import an, refused, several, spelled
from nanscope.objective.settings import LossInputs
from nanscope.replay.batch import loss_inputs
from nanscope.replay.own_loss import on_batch, own_objective
from nanscope.snapshot.anywhere import loaded
from nanscope.snapshot.step import Reached, Snapshot


def check(
    what: Snapshot | str | os.PathLike[str] | Callable[..., Tensor],
    inputs: Mapping[str, Any] | None = None,
    *,
    dtypes: torch.dtype | Sequence[torch.dtype] = (),
) -> Check:
    """Return what would kill a loss, although it has not happened yet.

    what:   a saved step, its path or address, or a function that returns a loss (a tensor with one number).
    inputs: what that function is called with, by name; without them a batch of ours, by the roles that its parameters are called.
    dtypes: torch.bfloat16, torch.float16: in which it is checked, too.
    Raises NanscopeError for an argument that is not one of these, and if there is nothing to check: no program, no gradient, or a step
    that no ordinary numbers heal.
    """
    dtypes = [_dtype(one) for one in ([dtypes] if isinstance(dtypes, torch.dtype) else several("dtypes", dtypes, DTYPES))]
    if callable(what) and not isinstance(what, Snapshot):
        if inputs is None:
            return search(_on_ours(what), dtypes)
        return search(recorded(what, an("inputs", inputs, Mapping, "a mapping of names to what the loss is called with")), dtypes)
    if inputs is not None:
        raise refused("inputs", "nothing beside a saved step: they are what a function is called with", inputs)
    if not isinstance(what, (Snapshot, str, os.PathLike)):
        raise refused("check(…)", "a saved step, its path or address, or a function that returns a loss", what)
    if isinstance(what, str) and re.fullmatch(r"[\w.]+:\w+", what) and not os.path.exists(what):  # noqa: PTH110 - an address is no Path
        raise refused("check(…)", "a function itself, and not its name", what, "import it")
    return search(loaded(what, "check(…)"), dtypes)


DTYPES = "floating-point dtypes, as torch.bfloat16"


def _dtype(given: object) -> torch.dtype:
    if not isinstance(given, torch.dtype) or not given.is_floating_point:
        raise refused("dtypes", DTYPES, given)
    return given


def recorded(function: Callable[..., Tensor], inputs: Mapping[str, Any]) -> Snapshot:
    """Call a loss once under the tape and return its step. Raises NanscopeError if it returns no loss that can be differentiated."""
    name = getattr(function, "__qualname__", str(function))
    _check_inputs(function, name, inputs)
    tape = Tape(patience=sys.maxsize)  # what is called once is kept whole
    with torch.enable_grad(), TapeMode(tape):
        loss = function(**inputs)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise NanscopeError(f"{name} returned no loss: one number that a gradient flows back from", slug="bad-loss")
    try:
        program, tensors = tape.program(tape.value_of(loss))
    except LookupError as error:
        raise NanscopeError(f"what {name} computes could not be recorded: {error}", slug="nothing-to-check") from error
    return Snapshot(0, 0, program, tensors, loss.detach().clone(), {}, Reached(float(loss.detach())))


def _check_inputs(function: Callable[..., Tensor], name: str, inputs: Mapping[str, Any]) -> None:
    """Raise NanscopeError if a function cannot be called with these; what has no signature is called all the same."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    known = signature.parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        for one in inputs:
            if one not in known:
                raise NanscopeError(f"{name} takes no {one!r}{spelled(one, known)}: it takes {', '.join(known)}", slug="bad-loss")
    try:
        signature.bind(**inputs)
    except TypeError as error:
        raise NanscopeError(f"{name} cannot be called with these inputs: {error}", slug="bad-loss") from None


def check_own(spec: str, of: Snapshot | None = None, dtypes: Sequence[torch.dtype] = ()) -> Check:
    """Check the function that "module:function" names, as `replay --loss` takes it. of: whose batch it is given, None for one of ours.

    Raises NanscopeError as `own_objective` does, and if the step has no batch.
    """
    return search(_by_roles(own_objective(spec).loss, loss_inputs(of) if of is not None else healthy()), dtypes)


def _on_ours(function: Callable[..., Tensor]) -> Snapshot:
    return _by_roles(on_batch(function, getattr(function, "__qualname__", str(function))), healthy())


def _by_roles(loss: Callable[[LossInputs], Tensor], inputs: LossInputs) -> Snapshot:
    return recorded(loss, {"inputs": inputs})
