"""OpenRLHF 0.11.2, `models/loss.py` and `models/utils.py`.

Notable: no denominator has a floor, so a step without a valid token is 0/0, in the gradients too. The KL bounds d before its exp, and the
source names 0 · inf as the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanscope.errors import NanscopeError
from nanscope.frameworks.options import Loss, clip, pick
from nanscope.objective.bounds import SAFE, Bounds
from nanscope.objective.reduction import Guard, Masking, Over, Reduction
from nanscope.objective.settings import PER_SEQUENCE, Anchor, Correction, Estimator, Gate, Kl, Level, LossSettings, Ratio, Statistic
from nanscope.objective.surrogates import Ppo

_TOKENS = Reduction(Over.TOKENS, guard=Guard.RAW)
_ROWS = Reduction(Over.ROW_MEANS, empty=Masking.MULTIPLY, guard=Guard.RAW, row_guard=Guard.EPSILON)

_CAP = Bounds(-10.0, 10.0)
_ESTIMATOR = {
    "k1": Kl(1.0, Estimator.K1, cap=_CAP),
    "k2": Kl(1.0, Estimator.K2, cap=_CAP),
    "k3": Kl(1.0, Estimator.K3, clamp=Bounds(high=10.0), cap=_CAP),
}
_GATING = {"ratio": Statistic.RATIO, "binary_kl": Statistic.BINARY_KL, "tv": Statistic.TV}
_LEVEL = {"token": Level.TOKEN, "seq": Level.SEQUENCE_MEAN}


@dataclass(frozen=True, slots=True)
class Aggregation:
    """`aggregate_loss`: token or row means, with the counts of the whole optimizer step; None counts what is here."""

    token_level_loss: bool = True
    dp_size: int = 1
    batch_num_tokens: float | None = None
    global_batch_size: float | None = None


def _aggregation(o: Aggregation, by_token: bool) -> Reduction:
    if by_token:
        return replace(_TOKENS, count=o.batch_num_tokens, factor=1 if o.batch_num_tokens is None else o.dp_size)
    return replace(_ROWS, count=o.global_batch_size, factor=1 if o.global_batch_size is None else o.dp_size)


@dataclass(frozen=True, slots=True)
class KlLoss(Aggregation):
    """`compute_approx_kl`, aggregated, without coefficient. unbiased_gradient: the value of the estimator, the gradient of sg w · d²/2."""

    kl_estimator: str = "k1"
    unbiased_gradient: bool = False

    def settings(self) -> LossSettings:
        kl = pick("kl_estimator", self.kl_estimator, _ESTIMATOR)
        unbiased = replace(kl, straight_through=True, importance=10.0)
        return LossSettings(
            surrogate=None, kl=unbiased if self.unbiased_gradient else kl, reduction=_aggregation(self, self.token_level_loss)
        )


@dataclass(frozen=True, slots=True)
class Policy(Aggregation):
    """`PolicyLoss`. through_actor: ℓ comes from `Actor.forward`, which multiplies it by the mask."""

    policy_loss_type: str = "ppo"
    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    dual_clip: float | None = None
    is_correction_level: str = "off"
    is_correction_mode: str = "mask"
    is_correction_gating: str = "ratio"
    is_correction_threshold: Sequence[float] = (0.5, 5.0)
    through_actor: bool = False

    def settings(self) -> LossSettings:
        corrected = self.is_correction_level != "off"
        anchor = Anchor.ROLLOUT if corrected else Anchor.OLD
        ratios = {
            "ppo": Ratio(clamp=SAFE),
            "gspo": replace(PER_SEQUENCE, against=anchor, mask_ratio=Masking.MULTIPLY),
        }
        ratio = pick("policy_loss_type", self.policy_loss_type, ratios)
        by_token = self.policy_loss_type == "ppo"  # gspo always takes row means
        return LossSettings(
            surrogate=Ppo(clip(self.clip_eps_low, self.clip_eps_high), dual=self.dual_clip),
            ratio=ratio,
            correction=self.correction() if corrected and by_token else None,
            reduction=_aggregation(self, self.token_level_loss and by_token),
            mask_log_probs=Masking.MULTIPLY if self.through_actor else Masking.NONE,
        )

    def correction(self) -> Correction:
        """Return the weight exp(ℓ_old − ℓ_rollout), clamped, or dropped by a statistic of its token or row; loss.py:215-246."""
        low, high = self.is_correction_threshold
        statistic = pick("is_correction_gating", self.is_correction_gating, _GATING)
        level = pick("is_correction_level", self.is_correction_level, _LEVEL)
        modes = {
            "clip": Correction(bounds=Bounds(low, high)),
            "mask": Correction(gates=(Gate(Bounds(low, high), statistic, level, guard=Guard.RAW),)),
        }
        if self.is_correction_mode == "clip" and (level is not Level.TOKEN or statistic is not Statistic.RATIO):
            message = "is_correction_mode='clip' needs is_correction_level='token' and is_correction_gating='ratio', as OpenRLHF asserts"
            raise NanscopeError(message, slug="unknown-setting-value")
        return pick("is_correction_mode", self.is_correction_mode, modes)


_SITE = "openrlhf/models/loss.py:174"
_EMPTY = "a step without a valid token is 0/0: NaN loss and NaN gradients"
_ACTOR = "Actor.forward multiplies log-probs by the mask: a masked −Inf is NaN before the loss sees it"
_BARE = "the sequence ratio has no clamp before exp"

ROWS = (
    Loss("openrlhf.ppo", Policy, _SITE, "0.11.2", (("policy_loss_type", "ppo"),), (_EMPTY, _ACTOR)),
    Loss("openrlhf.gspo", Policy, _SITE, "0.11.2", (("policy_loss_type", "gspo"),), (_EMPTY, _ACTOR, _BARE)),
    Loss("openrlhf.kl_loss", KlLoss, "openrlhf/models/utils.py:68", "0.11.2", flaws=(_EMPTY,)),
)
