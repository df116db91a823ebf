"""A loss to try on a recorded batch, and how one's own is called: `nanscope replay FILE --loss mymodule:my_loss`."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.objective.settings import LossInputs
from nanscope.text import line_in


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective to try. id: as it was asked for. label: where it stands. loss: from the batch to a scalar with its gradient.
    without: what it leaves out of a batch that lacks something, in words."""

    id: str
    label: str
    loss: Callable[[LossInputs], Tensor]
    without: Callable[[LossInputs], str] = lambda inputs: ""


def own_objective(spec: str) -> Objective:
    """Return the function that "module:function" names, found from the current directory as `python -m` would find it.

    It takes the batch, `f(inputs: LossInputs)`, or any of log_probs, old_log_probs, ref_log_probs, rollout_log_probs, advantages, mask
    and entropy by the names of its parameters, and returns the loss.
    Raises NanscopeError if there is no such function, or if it asks for something else.
    """
    module, _, name = spec.partition(":")
    if not name or not all(part.isidentifier() for part in (*module.split("."), name)):
        raise NanscopeError(f"{spec!r} is no function: write it as module:function, as in --loss mymodule:my_loss", slug="bad-loss")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # a module may raise anything when it is imported
        raise NanscopeError(f"{module} cannot be imported from {here}: {_told(error)}", slug="bad-loss") from error
    if not callable(function):
        raise NanscopeError(f"{module} has no function {name!r}", slug="bad-loss")
    return Objective(spec, f"your own, {module.rsplit('.', 1)[-1]}.{name}", on_batch(function, spec))


def on_batch(function: Callable[..., object], name: str) -> Callable[[LossInputs], Tensor]:
    """Return a function that is called by the names of its parameters, or with the whole batch, as one of the batch.

    Raises NanscopeError if it asks for something else.
    """
    wanted = _parameters(function, name)
    return lambda inputs: _call(function, wanted, name, inputs)


def _parameters(function: Callable[..., object], spec: str) -> dict[str, bool] | None:
    """Part of the batch → whether it has to be there; None if the function takes the whole batch."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    wanted = {p.name: p.default is p.empty for p in named if p.name in LossInputs.__slots__}
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in wanted]
    if not wanted and len(required) == 1 and required[0].kind is not inspect.Parameter.KEYWORD_ONLY:
        return None
    if required or not wanted:
        asks = f"it asks for {required[0].name!r}" if required else "it takes none of them"
        message = f"{spec}: a loss takes the batch (inputs), or any of {', '.join(LossInputs.__slots__)} by name; {asks}"
        raise NanscopeError(message, slug="bad-loss")
    return wanted


def _call(function: Callable[..., object], wanted: Mapping[str, bool] | None, spec: str, inputs: LossInputs) -> Tensor:
    try:
        if wanted is None:
            loss = function(inputs)
        else:
            parts = {name: getattr(inputs, name) for name in wanted}
            lacking = [name for name, needed in wanted.items() if needed and parts[name] is None]
            if lacking:
                raise NanscopeError(f"the batch has no {lacking[0]}", slug="missing-input")
            loss = function(**{name: part for name, part in parts.items() if part is not None})
    except NanscopeError:
        raise
    except (Exception, SystemExit) as error:  # and a function anything when it is called
        raise NanscopeError(f"{spec} failed: {_told(error)}", slug="bad-loss") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise NanscopeError(f"{spec} returned {shape}; a loss is a tensor with one number", slug="bad-loss")
    if not loss.requires_grad:
        raise NanscopeError(f"the loss of {spec} does not depend on log_probs: it has no gradient", slug="bad-loss")
    return loss.reshape(()) if loss.dim() else loss  # a call of ours would be one of the loss


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if f.filename != __file__ and "importlib" not in f.filename), None)
    where = f" ({line_in(last.filename, last.lineno)})" if last is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
