"""NeMo-RL 7ea279ab, `algorithms/loss/loss_functions.py`: one class with many switches.

Notable: the policy ratio is not clamped; the KL is, before and after its exp, and both clamps can be switched off. Every mean divides
by its count + 1e-8. A weight against the generation policy that is not finite becomes 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanscope.errors import NanscopeError
from nanscope.frameworks.options import Loss, clip, pick
from nanscope.objective.bounds import OPEN, Bounds
from nanscope.objective.reduction import Guard, Masking, Over, Reduction
from nanscope.objective.settings import PER_SEQUENCE, Anchor, Correction, Estimator, Gate, Kl, KlWeight, Level, LossSettings, Ratio
from nanscope.objective.surrogates import Cispo, ImportanceSampling, Ppo, Reinforce, Surrogate

_ESTIMATOR = {"k1": Estimator.K1, "k2": Estimator.K2, "k3": Estimator.K3}


@dataclass(frozen=True, slots=True)
class ClippedPG:
    """`ClippedPGLossConfig`; global_valid_toks and global_valid_seqs are arguments of the call, None counts what is here."""

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    disable_ppo_ratio: bool = False
    force_on_policy_ratio: bool = False
    use_cispo: bool = False
    sequence_level_importance_ratios: bool = False
    token_level_loss: bool = True
    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: str = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_kl_in_reward: bool = False
    use_on_policy_kl_approximation: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    global_valid_toks: float | None = None
    global_valid_seqs: float | None = None

    def settings(self) -> LossSettings:
        tokens = Reduction(Over.TOKENS, guard=Guard.EPSILON, count=self.global_valid_toks)
        rows = Reduction(Over.ROW_MEANS, guard=Guard.EPSILON, row_guard=Guard.EPSILON, count=self.global_valid_seqs)
        return LossSettings(
            surrogate=self.surrogate(),
            ratio=self.ratio(),
            correction=self.correction() if self.use_importance_sampling_correction else None,
            kl=self.kl() if self.reference_policy_kl_penalty and not self.use_kl_in_reward else None,
            reduction=tokens if self.token_level_loss else rows,
        )

    def surrogate(self) -> Surrogate:
        """Return the policy term: the switches in the order in which the framework reads them."""
        if self.force_on_policy_ratio:
            return ImportanceSampling()
        if self.disable_ppo_ratio:
            return Reinforce(twofold=True)
        band = clip(self.ratio_clip_min, self.ratio_clip_max)
        return Cispo(band) if self.use_cispo else Ppo(band, dual=self.ratio_clip_c)

    def ratio(self) -> Ratio:
        """Return the ratio; a sequence ratio needs sequence means."""
        if self.sequence_level_importance_ratios and self.token_level_loss:
            message = "sequence_level_importance_ratios=True needs token_level_loss=False, as NeMo-RL asserts"
            raise NanscopeError(message, slug="unknown-setting-value")
        if self.force_on_policy_ratio:
            return Ratio(against=Anchor.SELF)
        return replace(PER_SEQUENCE, guard=Guard.EPSILON) if self.sequence_level_importance_ratios else Ratio()

    def kl(self) -> Kl:
        """Return the KL term, algorithms/utils.py:42 (`calculate_kl`)."""

        def around(value: float | None) -> Bounds:
            return OPEN if value is None else Bounds(-value, value)

        return Kl(
            coef=self.reference_policy_kl_penalty,
            estimator=pick("reference_policy_kl_type", self.reference_policy_kl_type, _ESTIMATOR),
            clamp=around(self.kl_input_clamp_value),
            cap=around(self.kl_output_clamp_value),
            weight=KlWeight.ROLLOUT if self.use_on_policy_kl_approximation else KlWeight.SELF,
            finite=True,
        )

    def correction(self) -> Correction:
        """Return the weight against the generation policy, loss_functions.py:567-665."""
        whole = self.sequence_level_importance_ratios
        weight = Correction(
            against=Anchor.SELF if self.force_on_policy_ratio else Anchor.OLD,
            level=Level.SEQUENCE_SUM if whole else Level.TOKEN,
            mask_log_weight=Masking.MULTIPLY if whole else Masking.NONE,
            finite=True,
        )
        if self.truncated_importance_sampling_type is None or self.truncated_importance_sampling_ratio is None:
            return weight
        band = Bounds(self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio)
        geometric = Gate(band, level=Level.SEQUENCE_MEAN, guard=Guard.EPSILON, finite_first=True)
        kinds = {
            "tis": replace(weight, bounds=replace(band, low=band.low or 0.0)),
            "icepop": replace(weight, bounds=band, drop=True),
            "seq-mask-tis": replace(weight, gates=(geometric,)),
        }
        return pick("truncated_importance_sampling_type", self.truncated_importance_sampling_type, kinds)


_DROPS = "a weight of NaN or ±Inf becomes 0: with use_importance_sampling_correction the token leaves the loss without a word"

ROWS = (Loss("nemo_rl.clipped_pg", ClippedPG, "nemo_rl/algorithms/loss/loss_functions.py:372", "7ea279ab", flaws=(_DROPS,)),)
