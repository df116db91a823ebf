"""TRL, Liger-Kernel and unsloth: one family of formulas, three sets of defaults and guards.

Read in TRL 1.16.0, Liger-Kernel 0.8.5, unsloth_zoo 2026.10.9. All of them multiply by the mask after every exp;
unsloth alone zeroes masked log-probs before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nanscope.frameworks.options import ROW_MEANS, ROW_SUMS, ROW_VALUES, TOKEN_MEAN, Loss, clip, pick
from nanscope.objective.bounds import SAFE, Bounds
from nanscope.objective.reduction import Masking, Over, Reduction
from nanscope.objective.settings import PER_SEQUENCE, Correction, Entropy, Kl, KlWeight, Level, LossSettings, Ratio
from nanscope.objective.surrogates import Cispo, ImportanceSampling, Ppo, Sapo, Surrogate, Vespo

_LEVEL = {"token": Ratio(), "sequence": PER_SEQUENCE}

# The level of exp((ℓ_old − ℓ_rollout)·m), and whether what leaves the bounds is dropped or truncated; TRL grpo_trainer.py:2660-2704.
_CORRECTION = {
    "token_truncate": (Level.TOKEN, False),
    "token_mask": (Level.TOKEN, True),
    "sequence_truncate": (Level.SEQUENCE_SUM, False),
    "sequence_mask": (Level.SEQUENCE_SUM, True),
}
_GEOMETRIC = {"geometric_truncate": (Level.SEQUENCE_MEAN, False), "geometric_mask": (Level.SEQUENCE_MEAN, True)}  # unsloth only


@dataclass(frozen=True, slots=True)
class Family:
    """What the three have in common, under TRL's names and with TRL's defaults.

    num_items_in_batch, num_processes: what the trainer counts, tokens of the generation batch and ranks; None counts the mask.
    """

    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str = "token"
    use_bias_correction_kl: bool = True
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    use_vllm: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_clip_max: float | None = 3.0
    num_items_in_batch: float | None = None
    num_processes: int = 1
    steps_per_generation: int | None = None


def _settings(o: Family, low: float, accumulated: int = 1, longest: int | None = None) -> LossSettings:
    """low: ε below 1. accumulated: micro-batches per optimizer step. longest: `max_completion_length`, None for the width of the batch."""
    high = low if o.epsilon_high is None else o.epsilon_high
    surrogates: dict[str, Surrogate] = {
        "cispo": Cispo(Bounds(high=high)),  # absolute, not 1 + ε
        "sapo": Sapo(o.sapo_temperature_pos, o.sapo_temperature_neg),
        "vespo": Vespo(o.vespo_k_pos, o.vespo_lambda_pos, o.vespo_k_neg, o.vespo_lambda_neg),
    }
    # num_items_in_batch spans the generation batch: N / ranks · accumulation / steps per generation; TRL grpo_trainer.py:3174
    steps = accumulated if o.steps_per_generation is None else o.steps_per_generation
    whole = replace(TOKEN_MEAN, count=o.num_items_in_batch, factor=o.num_processes * steps / accumulated)
    reductions = {
        "grpo": ROW_MEANS,
        "sapo": ROW_MEANS,
        "bnpo": TOKEN_MEAN,
        "dr_grpo": replace(ROW_SUMS, horizon=longest),
        "luspo": ROW_SUMS,
        "dapo": whole,
        "cispo": whole,
        "vespo": whole,
    }
    reduction = pick("loss_type", o.loss_type, reductions)
    return LossSettings(
        surrogate=surrogates.get(o.loss_type, Ppo(clip(low, high), cap=o.delta)),
        ratio=pick("importance_sampling_level", o.importance_sampling_level, _LEVEL),
        correction=_correction(o, _CORRECTION),
        kl=Kl(o.beta, weight=KlWeight.RATIO if o.use_bias_correction_kl else KlWeight.NONE) if o.beta else None,
        # the other means are per micro-batch and rank: accumulation and DDP make means of means out of them
        reduction=reduction if reduction is whole else replace(reduction, factor=1 / accumulated),
    )


def _correction(o: Family, modes: Mapping[str, tuple[Level, bool]]) -> Correction | None:
    """Return the weight against vLLM's log-probs; a token that vLLM did not score has weight 1."""
    if not (o.use_vllm and o.vllm_importance_sampling_correction):
        return None
    level, drop = pick("vllm_importance_sampling_mode", o.vllm_importance_sampling_mode, modes)
    bounds = Bounds(o.vllm_importance_sampling_clip_min, o.vllm_importance_sampling_clip_max)
    return Correction(level=level, mask_log_weight=Masking.MULTIPLY, unscored=True, bounds=bounds, drop=drop)


@dataclass(frozen=True, slots=True)
class TRL(Family):
    """`GRPOConfig`. Its trainer asks for no KL term and no entropy at a coefficient of 0."""

    epsilon: float = 0.2
    entropy_coef: float = 0.0
    max_completion_length: int = 512
    gradient_accumulation_steps: int = 1

    def settings(self) -> LossSettings:
        settings = _settings(self, self.epsilon, self.gradient_accumulation_steps, self.max_completion_length)
        mean = replace(TOKEN_MEAN, factor=1 / self.gradient_accumulation_steps)
        return replace(settings, entropy=Entropy(self.entropy_coef, mean) if self.entropy_coef else None)


@dataclass(frozen=True, slots=True)
class GMPO:
    """`GMPOConfig`: epsilon and epsilon_high are in nat, on the log-ratio."""

    epsilon: float = 0.4
    epsilon_high: float | None = None
    beta: float = 0.0
    gradient_accumulation_steps: int = 1

    def settings(self) -> LossSettings:
        factor = 1 / self.gradient_accumulation_steps
        bounds = Bounds(-self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high)
        return LossSettings(
            surrogate=ImportanceSampling(),
            ratio=replace(PER_SEQUENCE, log_clip=bounds),
            kl=Kl(self.beta, reduction=replace(ROW_MEANS, factor=factor)) if self.beta else None,
            reduction=replace(ROW_VALUES, factor=factor),
        )


@dataclass(frozen=True, slots=True)
class RLOO:
    """`RLOOConfig`: the ratio of whole completions. Its KL is part of the reward."""

    epsilon: float = 0.2
    epsilon_high: float | None = None

    def settings(self) -> LossSettings:
        ratio = Ratio(level=Level.SEQUENCE_LOG_PROBS, mask_log_ratio=Masking.MULTIPLY)
        return LossSettings(surrogate=Ppo(clip(self.epsilon, self.epsilon_high)), ratio=ratio, reduction=ROW_VALUES)


@dataclass(frozen=True, slots=True)
class Liger(Family):
    """`LigerFusedLinearGRPOFunction.ppo_loss_fn`. use_vllm stands for passing `vllm_is_ratio`, computed as TRL does."""

    beta: float = 0.04
    epsilon_low: float = 0.2
    epsilon_high: float | None = 0.2
    use_bias_correction_kl: bool = False
    max_completion_length: int | None = None

    def settings(self) -> LossSettings:
        settings = _settings(self, self.epsilon_low, longest=self.max_completion_length)
        return replace(settings, reduction=Reduction(Over.LONG_ROWS)) if self.loss_type == "luspo" else settings


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
        plain = replace(self, use_vllm=False)
        settings = _settings(plain, self.epsilon_low, self.current_gradient_accumulation_steps, self.max_completion_length)
        return replace(
            settings,
            ratio=replace(settings.ratio, clamp=SAFE) if self.rollout_logps_as_old else settings.ratio,
            correction=_correction(self, _CORRECTION | _GEOMETRIC),
            kl=None if settings.kl is None else replace(settings.kl, clamp=SAFE, cap=Bounds(-10.0, 10.0)),
            mask_log_probs=Masking.WHERE,  # ℓ, ℓ_old and ℓ_ref share 0 where masked, so that every ratio is 1 there
            mask_others=Masking.WHERE,
        )


_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
_CAP = "epsilon_high is the absolute bound of the ratio; left out it is epsilon, and every weight is cut to 0.2"
_VESPO = "a NaN log-ratio makes φ 0: the sequence leaves the loss without a word"
_LUSPO = "luspo sums padding and divides by T: the mask is not applied per token; disagrees with TRL 1.16"
_TRL_FLAWS = {"cispo": (_CAP,), "vespo": (_VESPO,)}
_LIGER_FLAWS = {"luspo": (_LUSPO,), "vespo": (_VESPO,)}

ROWS = (
    *(
        Loss(f"trl.{kind}", TRL, "trl/trainer/grpo_trainer.py:3020", "1.16.0", (("loss_type", kind),), _TRL_FLAWS.get(kind, ()))
        for kind in _TYPES
    ),
    Loss("trl.gmpo", GMPO, "trl/experimental/gmpo/gmpo_trainer.py:43", "1.16.0"),
    Loss("trl.rloo", RLOO, "trl/trainer/rloo_trainer.py:1794", "1.16.0"),
    *(
        Loss(
            f"liger.{kind}", Liger, "liger_kernel/chunked_loss/grpo_loss.py:97", "0.8.5", (("loss_type", kind),), _LIGER_FLAWS.get(kind, ())
        )
        for kind in _TYPES
    ),
    *(Loss(f"unsloth.{kind}", Unsloth, "unsloth_zoo/rl_replacements.py:936", "2026.10.9", (("loss_type", kind),)) for kind in _TYPES),
)
