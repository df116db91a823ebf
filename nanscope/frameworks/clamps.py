"""Three clamps that every loss with a ratio or a KL takes beside its own settings: of Δ before exp, of d before the KL, of the KL.

    framework_loss("trl.grpo", inputs, log_ratio_clamp_value=20.0)
    framework_loss("trl.grpo", inputs, log_ratio_clamp_value=20.0, clamp_after_exp=True)    # the tempting order: NaN gradients

Names, units and the values 20 and 10 are NeMo-RL's (`kl_input_clamp_value`, `kl_output_clamp_value`). What is not given stays as the
framework has it; None switches a clamp off, also one that the framework has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nanscope.errors import NanscopeError
from nanscope.frameworks.rows import Setting
from nanscope.objective.bounds import OPEN, Bounds
from nanscope.objective.settings import Kl, LossSettings
from nanscope.objective.surrogates import CrossEntropy, Reinforce


@dataclass(frozen=True, slots=True)
class Clamp:
    """One clamp. term: which part of a loss it is on. bounds: those of a loss, None without that term. put: the loss with others."""

    term: str
    meaning: str
    bounds: Callable[[LossSettings], Bounds | None]
    put: Callable[[LossSettings, Bounds], LossSettings]


def _kl(settings: LossSettings, change: Callable[[Kl], Kl]) -> LossSettings:
    return settings if settings.kl is None else replace(settings, kl=change(settings.kl))


def _reads_ratio(settings: LossSettings) -> bool:
    return settings.surrogate is not None and not isinstance(settings.surrogate, Reinforce | CrossEntropy)


CLAMPS: dict[str, Clamp] = {
    "log_ratio_clamp_value": Clamp(
        "ratio",
        "nat, on the log-ratio before exp",
        lambda s: s.ratio.clamp if _reads_ratio(s) else None,
        lambda s, b: replace(s, ratio=replace(s.ratio, clamp=b)),
    ),
    "kl_input_clamp_value": Clamp(
        "KL",
        "nat, on ℓ_ref − ℓ before the estimate",
        lambda s: None if s.kl is None else s.kl.clamp,
        lambda s, b: _kl(s, lambda kl: replace(kl, clamp=b)),
    ),
    "kl_output_clamp_value": Clamp(
        "KL",
        "nat, on the estimate",
        lambda s: None if s.kl is None else s.kl.cap,
        lambda s, b: _kl(s, lambda kl: replace(kl, cap=b)),
    ),
}
AFTER = "clamp_after_exp"  # the exponent clamps bound the result of exp instead
NAMES = (*CLAMPS, AFTER)


def around(value: float | None) -> Bounds:
    """Return the interval [−value, value]; None is open."""
    return OPEN if value is None else Bounds(-value, value)


def clamped(settings: LossSettings, given: Mapping[str, Setting]) -> LossSettings:
    """Return the objective with the clamps that are given by name; one of a term that the loss does not have clamps nothing.

    Raises NanscopeError for a value that is no positive number.
    """
    for name, value in given.items():
        if name == AFTER:
            settings = _after(value, settings)
            continue
        clamp, bounds = CLAMPS[name], around(_positive(name, value))
        settings = settings if clamp.bounds(settings) is None else clamp.put(settings, bounds)
    return settings


def own_clamps(settings: LossSettings) -> dict[str, Bounds]:
    """Return the bounds that a loss has by itself, by the name of the clamp; terms that it lacks are left out."""
    found = {name: clamp.bounds(settings) for name, clamp in CLAMPS.items()}
    return {name: bounds for name, bounds in found.items() if bounds is not None}


def _after(value: Setting, settings: LossSettings) -> LossSettings:
    if not isinstance(value, bool):
        raise NanscopeError(f"{AFTER}={value!r} is not known: it is True or False", slug="unknown-setting-value")
    late = replace(settings, ratio=replace(settings.ratio, clamp_after=value))
    return _kl(late, lambda kl: replace(kl, clamp_after=value))


def _positive(name: str, value: Setting) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise NanscopeError(
            f"{name}={value!r} is not known: it is a positive number of nats, or None for no clamp", slug="unknown-setting-value"
        )
    return float(value)
