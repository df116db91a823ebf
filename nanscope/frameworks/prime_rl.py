"""prime-rl: rows checked against commit 559b447 (`trainer/rl/loss.py`).

Notable: one flat sequence at a time; nothing is clamped, and a mask of bools multiplies after exp. A term that anchors the graph,
`trainer_logprobs[0].sum() * 0.0`, makes a NaN anywhere in the first sequence one of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanscope.frameworks.rows import TOKEN_MEAN, Framework, Loss, LossSite, Remedy, roles
from nanscope.objective.reduction import Over, Reduction
from nanscope.objective.settings import Anchor, Estimator, Kl, LossSettings, TrustRegion
from nanscope.objective.surrogates import ImportanceSampling

_VERSION = "559b447"
_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap", "nan_times_zero_mask")
_LOSS = "prime_rl/trainer/rl/loss.py"
_ROLES = roles(
    log_probs="trainer_logprobs",
    rollout_log_probs="inference_logprobs",
    advantages="advantages",
    mask="loss_mask keep_mask drop_mask is_masked",
    log_ratio="log_importance_ratio",
    ratio="importance_ratio",
    kl="mismatch_kl kl_loss",
    loss="pg_loss per_token_loss loss",
)


@dataclass(frozen=True, slots=True)
class Default:
    """`DefaultLossConfig`; rl_scale divides the sum over sequences, None counts the mask. Its old policy is the inference engine."""

    dppo_mask_low: float = 0.2
    dppo_mask_high: float = 0.2
    adv_tau: float = 1.0
    kl_tau: float = 1e-3
    rl_scale: float | None = None

    def settings(self) -> LossSettings:
        return LossSettings(
            surrogate=ImportanceSampling(),
            trust=TrustRegion(low=self.dppo_mask_low, high=self.dppo_mask_high, nan_passes=True),
            kl=Kl(2 * self.kl_tau, Estimator.K2, against=Anchor.OLD),  # kl_tau · Δ²
            reduction=replace(TOKEN_MEAN, count=self.rl_scale),
            scale_advantages=Reduction(Over.TOKENS, count=1.0, factor=self.adv_tau),
        )


FRAMEWORK = Framework(
    name="prime-rl",
    package="prime-rl",
    version=_VERSION,
    files=("prime_rl/trainer/rl/",),
    options=("prime_rl/configs/trainer.py",),
    remedies=(Remedy(_EXP, "no option clamps the log-ratio before exp, or masks it there; the line itself has to be patched"),),
    sites=(
        LossSite(_LOSS, "default_loss_fn", _ROLES, "prime_rl.default", ("loss_config",)),
        LossSite(
            _LOSS,
            "compute_loss",
            roles(
                log_probs="trainer_logprobs t_logp",
                rollout_log_probs="inference_logprobs i_logp",
                ref_log_probs="ref_logprobs ref_logp",
                advantages="advantages adv",
                mask="loss_mask mask rl_mask ce_mask ref_kl_mask",
                loss="rl_loss ce_loss ref_kl_loss scaled_loss",
            ),
        ),
        LossSite(
            _LOSS,
            "ipo_loss_fn",
            roles(
                log_probs="trainer_logprobs",
                rollout_log_probs="inference_logprobs",
                advantages="advantages",
                mask="loss_mask keep_mask is_masked",
                log_ratio="log_importance_ratio",
                ratio="importance_ratio",
                kl="mismatch_kl kl_loss",
                loss="pg_loss per_token_loss loss",
            ),
        ),
        LossSite(
            _LOSS,
            "compute_importance_ratio_and_mismatch_kl",
            roles(
                log_probs="trainer_logprobs",
                rollout_log_probs="inference_logprobs",
                log_ratio="log_importance_ratio",
                ratio="importance_ratio",
                kl="mismatch_kl",
            ),
        ),
    ),
    losses=(Loss("prime_rl.default", Default, "src/prime_rl/trainer/rl/loss.py:110", _VERSION),),
)
