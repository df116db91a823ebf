"""Every framework's own loss by its name, with settings in the framework's own words.

    trace = framework_loss("verl.vanilla", inputs, loss_agg_mode="seq-mean-token-mean", clip_ratio_high=0.28)
    trace.loss

A row says which settings a loss has and what they mean as an objective; the rows stand in the files of the frameworks, beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import get_args, get_origin, get_type_hints

from nanscope.errors import NanscopeError
from nanscope.frameworks.clamps import NAMES, clamped
from nanscope.frameworks.rows import Loss, Options, Setting
from nanscope.frameworks.table import FRAMEWORKS
from nanscope.given import an, spelled
from nanscope.objective.evaluate import LossTrace, objective
from nanscope.objective.settings import LossInputs, LossSettings

LOSSES: dict[str, Loss] = {loss.key: loss for framework in FRAMEWORKS for loss in framework.losses}


def framework_loss(key: str, inputs: LossInputs, **settings: Setting) -> LossTrace:
    """Evaluate the loss `key` of a framework on one batch, with its defaults where `settings` say nothing.

    Raises NanscopeError for a key, a setting or a value that is not known, and for a batch that lacks what the loss reads.
    """
    return objective(inputs, framework_settings(key, **settings))  # settings first: what is misspelt is told before what is missing


def framework_settings(key: str, **settings: Setting) -> LossSettings:
    """Return the objective that a framework's loss is under these settings; errors as in `framework_loss`.

    Beside its own settings every loss takes the clamps of `clamps.NAMES`.
    """
    row = _row(key)
    known = row.names()
    for name in settings:
        if name not in (*known, *NAMES):
            every = (*known, *NAMES)
            raise NanscopeError(f"{key} has no setting {name!r}{spelled(name, every)}: it has {', '.join(every)}", slug="unknown-setting")
    own = {name: value for name, value in settings.items() if name in known}
    added = {name: value for name, value in settings.items() if name not in known}
    for name, value in own.items():
        _check(key, name, value, row.options)
    try:
        intended = row.options(**dict(row.fixed), **own).settings()
    except (ArithmeticError, TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in own.items())
        raise NanscopeError(f"{key} cannot be computed with {given}: {error}", slug="unknown-setting-value") from None
    return clamped(intended, added)


def _check(key: str, name: str, value: Setting, options: type[Options]) -> None:
    """Raise NanscopeError for a text where the row declares a number, and for NaN. None is what a live config says of what is not set."""
    declared = _declared(options)[name]
    kinds = get_args(declared) if isinstance(declared, UnionType) else (declared,)
    several = isinstance(value, (list, tuple)) and not {list, tuple, Sequence} & {get_origin(kind) or kind for kind in kinds}
    text = isinstance(value, str) and str not in kinds
    if several or text or not isinstance(value, Setting) or (isinstance(value, float) and math.isnan(value)):
        words = " or ".join("None" if kind is NoneType else getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise NanscopeError(f"{key}: {name}={value!r} is not known: it is {words}", slug="unknown-setting-value")


@cache
def _declared(options: type[Options]) -> dict[str, object]:
    return get_type_hints(options)


def live_options(key: str, *configs: object) -> dict[str, Setting]:
    """Return the settings of a loss that live config objects hold, under the loss's own names; errors as in `framework_loss`.

    configs: objects or mappings, searched in this order, each with what lies one level inside it (`actor.policy_loss`, `algorithm.cispo`).
    """
    found: dict[str, Setting] = {}
    for name in _row(key).names():
        for config in configs:
            held = next((value for value in _held(config, name) if isinstance(value, Setting)), NOWHERE)
            if isinstance(held, Setting):
                found[name] = held
                break
    return found


NOWHERE = object()  # what no holder has


def option(holder: object, name: str) -> object:
    """Return what a mapping or an object holds under a name, `NOWHERE` if nothing."""
    return holder.get(name, NOWHERE) if isinstance(holder, Mapping) else getattr(holder, name, NOWHERE)


def _held(config: object, name: str) -> Iterator[object]:
    """Yield what a config holds under a name: itself first, then the parts inside it."""
    parts = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    for holder in (config, *parts.values()):
        if not isinstance(holder, Setting):
            yield option(holder, name)


def _row(key: str) -> Loss:
    an("framework_loss(…)", key, str, "the name of a loss, as trl.grpo, then a batch")
    if key not in LOSSES:
        framework = key.split(".")[0] + "."
        near = [known for known in LOSSES if known.startswith(framework)]
        raise NanscopeError(f"no loss is called {key!r}{spelled(key, LOSSES)}: there are {', '.join(near or LOSSES)}", slug="unknown-loss")
    return LOSSES[key]
