"""tinker: the documented semantics of tinker 0.38.0.

Notable: tinker computes on its servers, where nothing can be watched: no sites, no remedies, and losses that were compared with no figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanscope.errors import NanscopeError
from nanscope.frameworks.rows import Framework, Loss, pick
from nanscope.objective.bounds import Bounds
from nanscope.objective.reduction import Over, Reduction
from nanscope.objective.settings import LossSettings
from nanscope.objective.surrogates import Cispo, CrossEntropy, Dro, ImportanceSampling, Ppo


@dataclass(frozen=True, slots=True)
class Tinker:
    """A loss function of the tinker API: a sum over tokens, never a mean. Its old policy is the sampler."""

    loss_fn: str = "importance_sampling"
    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    beta: float | None = None

    def settings(self) -> LossSettings:
        return replace(pick("loss_fn", self.loss_fn, _LOSSES)(self), reduction=Reduction(Over.TOTAL))


def _dro(o: Tinker) -> LossSettings:
    if o.beta is None:
        raise NanscopeError("tinker's dro needs beta", slug="unknown-setting-value")
    return LossSettings(Dro(o.beta))


_LOSSES: dict[str, Callable[[Tinker], LossSettings]] = {
    "cross_entropy": lambda o: LossSettings(CrossEntropy()),
    "importance_sampling": lambda o: LossSettings(ImportanceSampling()),
    "ppo": lambda o: LossSettings(Ppo(Bounds(o.clip_low_threshold, o.clip_high_threshold))),
    "cispo": lambda o: LossSettings(Cispo(Bounds(o.clip_low_threshold, o.clip_high_threshold))),
    "dro": _dro,
}

FRAMEWORK = Framework(
    name="tinker",
    package="tinker",
    version="0.38.0",
    files=(),
    losses=tuple(
        Loss(
            f"tinker.{kind}",
            Tinker,
            "tinker-docs.thinkingmachines.ai/losses",
            "0.38.0",
            (("loss_fn", kind),),
            needs=(("beta", 0.1),) if kind == "dro" else (),
        )
        for kind in _LOSSES
    ),
)
