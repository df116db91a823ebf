"""TRL: rows checked against TRL 1.16.0 (`trl/trainer/grpo_trainer.py`, `rloo_trainer.py`)."""

from nanscope.frameworks import Framework, Remedy

_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap", "seq_ratio_overflow")

TRL = Framework(
    name="TRL",
    package="trl",
    version="1.16.0",
    files=("trl/trainer/", "trl/experimental/"),
    batch=("inputs", "completion_ids", "completion_mask"),
    settings=(
        "loss_type", "beta", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "scale_rewards", "num_iterations",
        "num_generations", "use_bias_correction_kl", "temperature", "mask_truncated_completions", "off_policy_mask_threshold",
        "top_entropy_quantile", "max_completion_length", "gradient_accumulation_steps", "steps_per_generation", "learning_rate",
        "max_grad_norm", "bf16", "fp16", "logging_nan_inf_filter", "use_vllm", "vllm_importance_sampling_mode",
    ),
    remedies=(
        Remedy(_EXP, "cispo takes the ratio out of the graph and caps it, so its exp cannot overflow into the loss", 'loss_type="cispo"'),
        Remedy(_EXP, "vespo clamps the log-ratio to ±20 before exp", 'loss_type="vespo"'),
        Remedy(_EXP, "no option of TRL 1.16 clamps the log-ratio before exp for the other loss types; the line itself has to be patched"),
    ),
)  # fmt: skip
