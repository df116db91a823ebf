"""TRL: rows checked against TRL 1.16.0 (`trl/trainer/grpo_trainer.py`, `rloo_trainer.py`, and the experimental trainers).

Notable: no ratio and no KL is clamped before exp, and the mask multiplies after it; the options below are what there is instead.
"""

from nanscope.frameworks.rows import Framework, LossSite, Remedy, roles

_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap", "seq_ratio_overflow")
_GRPO = "trl/trainer/grpo_trainer.py"

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

TRL = Framework(
    name="TRL",
    package="trl",
    version="1.16.0",
    files=("trl/trainer/", "trl/experimental/"),
    batch=("inputs", "completion_ids", "completion_mask"),
    settings=(
        "loss_type",
        "beta",
        "epsilon",
        "epsilon_high",
        "delta",
        "importance_sampling_level",
        "scale_rewards",
        "num_iterations",
        "num_generations",
        "use_bias_correction_kl",
        "temperature",
        "mask_truncated_completions",
        "off_policy_mask_threshold",
        "top_entropy_quantile",
        "max_completion_length",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "learning_rate",
        "max_grad_norm",
        "bf16",
        "fp16",
        "logging_nan_inf_filter",
        "use_vllm",
        "vllm_importance_sampling_mode",
    ),
    options=("trl/trainer/grpo_config.py", "trl/trainer/base_config.py"),
    remedies=(
        Remedy(_EXP, "cispo takes the ratio out of the graph and caps it, so its exp cannot overflow into the loss", 'loss_type="cispo"'),
        Remedy(_EXP, "vespo clamps the log-ratio to ±20 before exp", 'loss_type="vespo"'),
        Remedy(_EXP, "no option of TRL 1.16 clamps the log-ratio before exp for the other loss types; the line itself has to be patched"),
        Remedy(
            ("exp_overflow", "inf_times_zero_mask", "nan_times_zero_mask", "inf_minus_inf"),
            "leaves the KL term out altogether, if the origin lies there",
            "beta=0.0",
        ),
        Remedy(
            ("inf_times_zero_mask", "inf_times_zero_coef", "nan_times_zero_mask"),
            "keeps the ratio out of the KL term",
            "use_bias_correction_kl=False",
        ),
        Remedy(
            ("seq_ratio_overflow",), "ratios of single tokens overflow later than those of sequences", 'importance_sampling_level="token"'
        ),
        Remedy(
            ("inf_times_zero_coef", "zero_div_zero"),
            "divides by the deviation of the batch, which is 0 less often than that of a group",
            'scale_rewards="batch"',
        ),
        Remedy(("fp16_overflow", "magnitude_overflow"), "computes the logits in float32", "cast_lm_head_to_fp32=True"),
        Remedy(
            ("exp_overflow", "bad_input"),
            "cuts the weight against vLLM off instead of dropping sequences by it",
            'vllm_importance_sampling_mode="token_truncate"',
        ),
    ),
    guards=("logging_nan_inf_filter (on by default) replaces a non-finite loss in the log; it skips no step",),
    sites=(
        LossSite(_GRPO, "GRPOTrainer._compute_loss", _TOKENS, "trl.{loss_type}", ("self.args",), _LIVE),
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
            "trl/trainer/rloo_trainer.py",
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
            "trl/experimental/gmpo/gmpo_trainer.py",
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
)
