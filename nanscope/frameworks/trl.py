"""TRL: rows checked against TRL 1.16.0 (`trl/trainer/grpo_trainer.py`, `rloo_trainer.py`, and the experimental trainers).

Notable: no ratio and no KL is clamped before exp, and the mask multiplies after it; the options below are what there is instead. Liger and
unsloth compute the same family of formulas, with other defaults and guards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nanscope.frameworks.rows import (
    ALL_CLAMPS,
    CLAMPED,
    ROW_MEANS,
    ROW_SUMS,
    ROW_VALUES,
    TOKEN_MEAN,
    Framework,
    Loss,
    LossSite,
    Remedy,
    Settings,
    Term,
    clip,
    pick,
    roles,
)
from nanscope.objective.bounds import Bounds
from nanscope.objective.reduction import Masking, Reduction
from nanscope.objective.settings import PER_SEQUENCE, Correction, Entropy, Kl, KlWeight, Level, LossSettings, Ratio
from nanscope.objective.surrogates import Cispo, ImportanceSampling, Ppo, Sapo, Surrogate, Vespo

_VERSION = "1.16.0"
_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap", "seq_ratio_overflow")

# what whoever computes TRL's losses can switch to
TO_CISPO = Remedy(
    _EXP,
    "cispo takes the ratio out of the graph and caps it, so its exp cannot overflow into the loss",
    'loss_type="cispo"',
    Term.RATIO,
    needs="importance_sampling_level",
)
TO_VESPO = Remedy(_EXP, "vespo clamps the log-ratio to ±20 before exp", 'loss_type="vespo"', Term.RATIO, needs="importance_sampling_level")
TO_TOKENS = Remedy(
    ("seq_ratio_overflow",),
    "ratios of single tokens overflow later than those of sequences",
    'importance_sampling_level="token"',
    Term.RATIO,
)
_GRPO = "trl/trainer/grpo_trainer.py"
_RLOO = "trl/trainer/rloo_trainer.py"
_GMPO = "trl/experimental/gmpo/gmpo_trainer.py"

_OPTIONS = (
    "loss_type", "beta", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "scale_rewards", "num_iterations",
    "num_generations", "use_bias_correction_kl", "temperature", "mask_truncated_completions", "off_policy_mask_threshold",
    "top_entropy_quantile", "max_completion_length", "gradient_accumulation_steps", "steps_per_generation", "learning_rate",
    "max_grad_norm", "bf16", "fp16", "logging_nan_inf_filter", "use_vllm", "vllm_importance_sampling_mode",
)  # fmt: skip

# What all of these trainers call things.
_TOKENS = roles(
    log_probs="per_token_logps",
    old_log_probs="old_per_token_logps",
    ref_log_probs="ref_per_token_logps",
    rollout_log_probs="sampling_per_token_logps",
    log_ratio="log_ratio log_importance_weights",
    ratio="coef_1 coef_2 clamped_ratios soft_coef_1",
    is_weight="importance_sampling_ratio",
    kl="per_token_kl",
    entropy="entropies",
    advantages="advantages",
    mask="mask completion_mask tool_mask entropy_mask off_policy_mask",
    loss="per_token_loss per_token_loss1 per_token_loss2 loss policy_loss",
)
_LIVE = (
    ("num_items_in_batch", "inputs.num_items_in_batch"),
    ("num_processes", "self.accelerator.num_processes"),
    ("gradient_accumulation_steps", "self.current_gradient_accumulation_steps"),
)

# What the trainer takes its weight against the sampler from; the loss itself reads the weight alone.
_BESIDE = (
    ("rollout_log_probs", "inputs.sampling_per_token_logps"),
    ("old_log_probs", "inputs.old_per_token_logps"),
    ("mask", "inputs.completion_mask"),
    ("response_ids", "inputs.completion_ids"),
)

_LEVEL = {"token": Ratio(), "sequence": PER_SEQUENCE}

# The level of exp((ℓ_old − ℓ_rollout)·m), and whether what leaves the bounds is dropped or truncated; grpo_trainer.py:2660-2704.
CORRECTIONS = {
    "token_truncate": (Level.TOKEN, False),
    "token_mask": (Level.TOKEN, True),
    "sequence_truncate": (Level.SEQUENCE_SUM, False),
    "sequence_mask": (Level.SEQUENCE_SUM, True),
}
TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")


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

    def objective(
        self, low: float, accumulated: int = 1, longest: int | None = None, corrections: Mapping[str, tuple[Level, bool]] = CORRECTIONS
    ) -> LossSettings:
        """Return what the options mean.

        low: ε below 1. accumulated: micro-batches per optimizer step. longest: `max_completion_length`, None for the width of the batch.
        """
        high = low if self.epsilon_high is None else self.epsilon_high
        surrogates: dict[str, Surrogate] = {
            "cispo": Cispo(Bounds(high=high)),  # absolute, not 1 + ε
            "sapo": Sapo(self.sapo_temperature_pos, self.sapo_temperature_neg),
            "vespo": Vespo(self.vespo_k_pos, self.vespo_lambda_pos, self.vespo_k_neg, self.vespo_lambda_neg),
        }
        return LossSettings(
            surrogate=surrogates.get(self.loss_type, Ppo(clip(low, high), cap=self.delta)),
            ratio=pick("importance_sampling_level", self.importance_sampling_level, _LEVEL),
            correction=self._correction(corrections) if self.use_vllm and self.vllm_importance_sampling_correction else None,
            kl=Kl(self.beta, weight=KlWeight.RATIO if self.use_bias_correction_kl else KlWeight.NONE) if self.beta else None,
            reduction=self._reduction(accumulated, longest),
        )

    def _reduction(self, accumulated: int, longest: int | None) -> Reduction:
        # num_items_in_batch spans the generation batch: N / ranks · accumulation / steps per generation; grpo_trainer.py:3174
        steps = accumulated if self.steps_per_generation is None else self.steps_per_generation
        whole = replace(TOKEN_MEAN, count=self.num_items_in_batch, factor=self.num_processes * steps / accumulated)
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
        found = pick("loss_type", self.loss_type, reductions)
        # the other means are per micro-batch and rank: accumulation and DDP make means of means out of them
        return found if found is whole else replace(found, factor=1 / accumulated)

    def _correction(self, modes: Mapping[str, tuple[Level, bool]]) -> Correction:
        """Return the weight against vLLM's log-probs; a token that vLLM did not score has weight 1."""
        level, drop = pick("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, modes)
        bounds = Bounds(self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max)
        return Correction(level=level, mask_log_weight=Masking.MULTIPLY, unscored=True, bounds=bounds, drop=drop)


@dataclass(frozen=True, slots=True)
class GRPO(Family):
    """`GRPOConfig`. Its trainer asks for no KL term and no entropy at a coefficient of 0."""

    epsilon: float = 0.2
    entropy_coef: float = 0.0
    max_completion_length: int = 512
    gradient_accumulation_steps: int = 1

    def settings(self) -> LossSettings:
        settings = self.objective(self.epsilon, self.gradient_accumulation_steps, self.max_completion_length)
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


_CAP = "epsilon_high is the absolute bound of the ratio; left out it is epsilon, and every weight is cut to 0.2"
VESPO = "a NaN log-ratio makes φ 0: the sequence leaves the loss without a word"
_FLAWS = {"cispo": (_CAP,), "vespo": (VESPO,)}

SEQUENCE: Settings = {"importance_sampling_level": "sequence"}
_KL: tuple[Settings, ...] = ({"beta": 0.04}, {"beta": 0.04, "use_bias_correction_kl": False})
_VLLM: tuple[Settings, ...] = tuple({"use_vllm": True, "vllm_importance_sampling_mode": mode} for mode in CORRECTIONS)
_WALKED: dict[str, tuple[Settings, ...]] = {
    "grpo": (*_KL, SEQUENCE, {"delta": 4.0}, *_VLLM, {"entropy_coef": 0.01}, *CLAMPED),
    "bnpo": _KL,
    "dapo": ({"beta": 0.04, **ALL_CLAMPS},),
    "luspo": (SEQUENCE,),
    "cispo": ({"epsilon_high": 5.0}, {"epsilon_high": 5.0, "beta": 0.04}),
    "vespo": ({"beta": 0.04}, _VLLM[0]),
}

FRAMEWORK = Framework(
    name="TRL",
    package="trl",
    version=_VERSION,
    files=("trl/trainer/", "trl/experimental/"),
    batch=("inputs", "completion_ids", "completion_mask"),
    settings=_OPTIONS,
    options=("trl/trainer/grpo_config.py", "trl/trainer/base_config.py"),
    remedies=(
        TO_CISPO,
        TO_VESPO,
        Remedy(
            _EXP,
            "no option of TRL 1.16 clamps the log-ratio before exp for the other loss types; the line itself has to be patched",
            needs="importance_sampling_level",
        ),
        Remedy(
            ("exp_overflow", "inf_times_zero_mask", "nan_times_zero_mask", "inf_minus_inf"),
            "leaves the KL term out altogether",
            "beta=0.0",
            Term.KL,
            needs="num_generations",
        ),
        Remedy(
            ("inf_times_zero_mask", "inf_times_zero_coef", "nan_times_zero_mask"),
            "keeps the ratio out of the KL term",
            "use_bias_correction_kl=False",
            Term.KL,
            unless=(("beta", 0.0),),
        ),
        TO_TOKENS,
        Remedy(
            ("inf_times_zero_coef", "zero_div_zero"),
            "divides by the deviation of the batch, which is 0 less often than that of a group",
            'scale_rewards="batch"',
            Term.ADVANTAGES,
        ),
        Remedy(
            ("fp16_overflow", "magnitude_overflow"),
            "computes the logits in float32",
            "cast_lm_head_to_fp32=True",
            Term.HEAD,
            needs="num_generations",
        ),
        Remedy(
            ("exp_overflow", "bad_input"),
            "cuts the weight against vLLM off instead of dropping sequences by it",
            'vllm_importance_sampling_mode="token_truncate"',
            Term.ROLLOUT,
            unless=(("use_vllm", False),),
        ),
    ),
    guards=("logging_nan_inf_filter (on by default) replaces a non-finite loss in the log; it skips no step",),
    sites=(
        LossSite(_GRPO, "GRPOTrainer._compute_loss", _TOKENS, "trl.{loss_type}", ("self.args",), _LIVE, beside=_BESIDE),
        LossSite(
            _GRPO,
            "GRPOTrainer.get_gamma_weights",
            roles(
                log_ratio="log_ratio_per_token log_ratio_clamped seq_log_ratio log_w_seq log_is_ratio",
                ratio="w_seq phi_seq",
                is_weight="importance_sampling_ratio",
                advantages="advantages",
                mask="mask is_nonneg_adv",
            ),
        ),
        LossSite(
            _GRPO,
            "GRPOTrainer.get_off_policy_mask",
            roles(
                log_probs="per_token_logps",
                rollout_log_probs="sampling_per_token_logps",
                advantages="advantages",
                mask="mask is_pos_adv is_low_kl",
                kl="kl_div seq_kl_sum avg_seq_kl",
            ),
        ),
        LossSite(
            _RLOO,
            "RLOOTrainer._compute_loss",
            roles(
                log_probs="per_token_logps logps",
                old_log_probs="old_logps",
                log_ratio="log_ratio",
                ratio="coef_1 coef_2",
                entropy="entropies",
                advantages="advantages",
                mask="completion_mask",
                loss="per_sequence_loss per_sequence_loss1 per_sequence_loss2 loss",
            ),
            "trl.rloo",
            ("self.args",),
        ),
        LossSite(
            _GMPO,
            "GMPOTrainer._compute_loss",
            roles(
                log_probs="per_token_logps",
                old_log_probs="old_per_token_logps",
                ref_log_probs="ref_per_token_logps",
                log_ratio="log_ratio clamped_log_ratio clipped_log_ratio log_importance_weights",
                ratio="coef",
                kl="per_token_kl seq_kl",
                entropy="entropies",
                advantages="advantages advantages_col",
                mask="mask completion_mask tool_mask entropy_mask seq_mask",
                loss="per_sequence_loss loss",
            ),
            "trl.gmpo",
            ("self.args",),
            (("gradient_accumulation_steps", "self.current_gradient_accumulation_steps"),),
            beside=_BESIDE,
        ),
        LossSite(
            "trl/experimental/async_grpo/async_grpo_trainer.py",
            "AsyncGRPOTrainer.compute_loss",
            roles(
                log_probs="log_probs",
                old_log_probs="old_log_probs",
                log_ratio="log_ratio",
                ratio="coef_1 coef_2",
                entropy="entropy",
                advantages="advantages",
                mask="mask_bool",
                loss="per_token_loss per_token_loss1 per_token_loss2 loss",
            ),
            "trl.dapo",
            ("self.args",),
            (("num_items_in_batch", "inputs.global_n_tokens"), *_LIVE[1:]),
            (("beta", 0.0), ("steps_per_generation", 1)),
        ),
        LossSite(
            "trl/experimental/sdpo/sdpo_trainer.py",
            "SDPOTrainer._compute_policy_loss",
            roles(
                log_probs="per_token_logps",
                old_log_probs="old_per_token_logps",
                log_ratio="log_ratio",
                ratio="coef_1 coef_2",
                advantages="advantages",
                mask="completion_mask",
                loss="per_token_loss loss",
            ),
        ),
    ),
    losses=(
        *(
            Loss(f"trl.{kind}", GRPO, f"{_GRPO}:3020", _VERSION, (("loss_type", kind),), _FLAWS.get(kind, ()), _WALKED.get(kind, ()))
            for kind in TYPES
        ),
        Loss("trl.gmpo", GMPO, f"{_GMPO}:43", _VERSION, walked=({"epsilon": 0.2}, {"epsilon": 0.2, "beta": 0.04})),
        Loss("trl.rloo", RLOO, f"{_RLOO}:1794", _VERSION),
    ),
)
