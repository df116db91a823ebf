"""NeMo-RL: rows checked against commit 7ea279ab (`algorithms/loss/loss_functions.py`, `algorithms/utils.py`); it is not on PyPI.

Notable: the policy ratio is not clamped, the KL is, before and after its exp. The batch still has its prompt columns, with token_mask 0.
"""

from nanscope.frameworks.rows import Framework, LossSite, Remedy, roles

_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap")
_LOSS = "nemo_rl/algorithms/loss/loss_functions.py"

NEMO_RL = Framework(
    name="NeMo-RL",
    package="nemo_rl",
    version="7ea279ab",
    files=("nemo_rl/algorithms/",),
    options=(_LOSS, "nemo_rl/algorithms/grpo.py"),
    remedies=(
        Remedy(_EXP, "takes the ratio out of the graph and clips it, so its exp cannot overflow into the loss", "loss_fn.use_cispo=true"),
        Remedy(_EXP, "ratio 1, for one update per batch of rollouts", "loss_fn.force_on_policy_ratio=true"),
        Remedy(
            (*_EXP, "nan_times_zero_mask"),
            "clamps the log-ratio of the KL before exp (null switches it off)",
            "loss_fn.kl_input_clamp_value=20",
        ),
        Remedy(
            (*_EXP, "magnitude_overflow"),
            "clamps the KL after exp; the clamp before exp alone keeps its gradient finite",
            "loss_fn.kl_output_clamp_value=10",
        ),
        Remedy(
            ("seq_ratio_overflow",),
            "ratios of single tokens overflow later than those of sequences",
            "loss_fn.sequence_level_importance_ratios=false",
        ),
        Remedy(
            ("exp_overflow", "bad_input"),
            "leaves sequences out that trainer and generation disagree on",
            "loss_fn.truncated_importance_sampling_type=seq-mask-tis",
        ),
        Remedy(
            ("exp_overflow", "inf_times_zero_mask", "bad_input"),
            "leaves sequences out whose log-probs differ by more than this",
            "grpo.seq_logprob_error_threshold=2",
        ),
    ),
    guards=("Megatron's rerun state machine checks loss and gradients for NaN; the DTensor path has no such check",),
    sites=(
        LossSite(
            _LOSS,
            "ClippedPGLossFn.__call__",
            roles(
                log_probs="next_token_logprobs curr_logprobs curr_logprobs_unfiltered",
                old_log_probs="prev_logprobs",
                rollout_log_probs="generation_logprobs",
                ref_log_probs="reference_policy_logprobs",
                advantages="advantages",
                mask="mask token_mask sample_mask",
                log_ratio="log_ratios seq_log_ratio_mean seq_lp_diff lp_error log_is_ratio",
                ratio="ratios ratios_clamped seq_ratio",
                kl="kl",
                is_weight="actor_importance_weights actor_importance_weights_expanded importance_weights_to_use kl_importance_weights",
                loss="loss1 loss2 loss3 clip_loss actor_loss nll_loss loss",
            ),
            "nemo_rl.clipped_pg",
            ("self",),
            (
                ("token_level_loss", "self.loss_type.value==token_level"),
                ("global_valid_toks", "global_valid_toks"),
                ("global_valid_seqs", "global_valid_seqs"),
            ),
        ),
        LossSite(
            "nemo_rl/algorithms/utils.py",
            "calculate_kl",
            roles(
                log_probs="logprobs",
                ref_log_probs="logprobs_reference",
                log_ratio="logr logr_clamped",
                kl="kl",
                is_weight="importance_sampling_weights",
            ),
        ),
        LossSite("nemo_rl/algorithms/utils.py", "masked_mean", roles(mask="mask")),
    ),
)
