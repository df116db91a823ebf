"""unsloth: rows checked against unsloth_zoo 2026.10.9 (`rl_replacements.py`).

Notable: the function is copied into a generated trainer and compiled there; the names in it are as short as `new`, `old` and `ref`.
Of TRL's family it alone zeroes masked log-probs before every exp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanscope.frameworks.rows import Framework, Loss, LossSite, Remedy, Settings, Term, roles
from nanscope.frameworks.trl import CORRECTIONS, SEQUENCE, TO_CISPO, TO_VESPO, TYPES, Family
from nanscope.objective.bounds import SAFE, Bounds
from nanscope.objective.reduction import Masking
from nanscope.objective.settings import Level, LossSettings

_VERSION = "2026.10.9"
_EXP = ("exp_overflow", "where_grad_trap", "inf_times_zero_coef", "seq_ratio_overflow")
_LOSS = "unsloth_zoo/rl_replacements.py"
_PASSED = (
    "loss_type", "epsilon_low", "epsilon_high", "max_completion_length", "delta", "importance_sampling_level", "num_items_in_batch",
    "current_gradient_accumulation_steps", "steps_per_generation", "num_processes", "use_vllm", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max", "sapo_temperature_pos",
    "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "use_bias_correction_kl",
    "rollout_logps_as_old",
)  # fmt: skip

_GEOMETRIC = {"geometric_truncate": (Level.SEQUENCE_MEAN, False), "geometric_mask": (Level.SEQUENCE_MEAN, True)}


@dataclass(frozen=True, slots=True)
class Unsloth(Family):
    """`grpo_compute_loss`. rollout_logps_as_old: the rollout's log-probs stand in for the old ones, and Δ is clamped to ±20."""

    loss_type: str = "grpo"
    epsilon_low: float = 0.2
    epsilon_high: float | None = 0.2
    use_bias_correction_kl: bool = False
    vllm_importance_sampling_correction: bool = False
    rollout_logps_as_old: bool = False
    max_completion_length: int = 8192
    current_gradient_accumulation_steps: int = 1

    def settings(self) -> LossSettings:
        corrections = CORRECTIONS | _GEOMETRIC
        settings = self.objective(self.epsilon_low, self.current_gradient_accumulation_steps, self.max_completion_length, corrections)
        return replace(
            settings,
            ratio=replace(settings.ratio, clamp=SAFE) if self.rollout_logps_as_old else settings.ratio,
            kl=None if settings.kl is None else replace(settings.kl, clamp=SAFE, cap=Bounds(-10.0, 10.0)),
            mask_log_probs=Masking.WHERE,  # ℓ, ℓ_old and ℓ_ref share 0 where masked, so that every ratio is 1 there
            mask_others=Masking.WHERE,
        )


_VLLM: Settings = {"use_vllm": True, "vllm_importance_sampling_correction": True}
_KL: Settings = {"beta": 0.04}
_WALKED: dict[str, tuple[Settings, ...]] = {
    "grpo": (
        _KL,
        SEQUENCE,
        {"rollout_logps_as_old": True},
        {**_VLLM, "vllm_importance_sampling_mode": "token_truncate"},
        {**_VLLM, "vllm_importance_sampling_mode": "sequence_mask"},
    ),
    **dict.fromkeys(("dapo", "cispo", "sapo"), (_KL,)),
}

FRAMEWORK = Framework(
    name="unsloth",
    package="unsloth_zoo",
    host="TRL",
    version=_VERSION,
    files=("unsloth_zoo/rl_replacements.py", "unsloth_compiled_cache/"),
    options=(_LOSS,),
    remedies=(
        replace(TO_CISPO, causes=_EXP),
        replace(TO_VESPO, causes=_EXP),
        Remedy(
            _EXP,
            "clamps the log-ratio to ±20 before exp; only where the rollout's log-probs stand in for the old ones",
            "rollout_logps_as_old=True",
            Term.RATIO,
        ),
    ),
    guards=("log-probs of masked tokens are set to 0 before every exp: a masked overflow harms nothing",),
    sites=(
        LossSite(
            _LOSS,
            "grpo_compute_loss",
            roles(
                log_probs="new",
                old_log_probs="old",
                ref_log_probs="ref",
                rollout_log_probs="sampling_per_token_logps",
                advantages="advantages",
                mask="mask _keep rs_keep rs_mask off_policy_mask entropy_mask",
                log_ratio="log_ratio log_importance_weights kl_log_ratio rs_log_ratio",
                ratio="coef_1 coef_2 clamped_ratios soft_coef_1",
                is_weight="importance_sampling_ratio",
                kl="kl_i kl_metric",
                loss="loss_i loss_1 loss_2 loss",
            ),
            "unsloth.{loss_type}",
            ("kwargs",),
            (("beta", "beta"), *((name, f"kwargs.{name}") for name in _PASSED)),
        ),
    ),
    losses=tuple(
        Loss(f"unsloth.{kind}", Unsloth, f"{_LOSS}:936", _VERSION, (("loss_type", kind),), walked=_WALKED.get(kind, ())) for kind in TYPES
    ),
)
