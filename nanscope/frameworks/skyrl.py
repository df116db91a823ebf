"""SkyRL: rows checked against SkyRL 0.3.0 (`backends/skyrl_train/workers/worker.py`, `…/utils/ppo_utils.py`).

Notable: the advantages come in scaled by the reduction, and the losses are sums. KL and entropy are added by the worker, a Ray actor.
"""

from nanscope.frameworks.rows import Framework, LossSite, Remedy, roles

_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap", "seq_ratio_overflow")
_UTILS = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
_CORRECTION = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"

_ARGUMENTS = roles(
    log_probs="log_probs",
    old_log_probs="old_log_probs mu_log_probs",
    rollout_log_probs="rollout_logprobs",
    log_ratio="log_ratio log_importance_weights log_token_importance_weights negative_approx_kl abs_kl",
    ratio="ratio clamped_ratio calibrated_ratio prob_ratio",
    advantages="advantages",
    mask="loss_mask in_range",
    loss="loss surr1 surr2 pg_losses pg_losses1 pg_losses2 pg_losses3 clip_pg_losses1 clip_pg_losses2 pg_losses_kl pg_loss "
    "elementwise_loss",
)
_FUNCTIONS = {
    "ppo_policy_loss": "{policy_loss_type}",
    "sapo_policy_loss": "sapo",
    "gspo_policy_loss": "gspo",
    "compute_policy_loss_cispo": "cispo",
    "rollout_is_policy_loss": "rollout_is",
    "dppo_policy_loss": "dppo",
    "compute_policy_loss_clip_cov": "clip_cov",
    "compute_policy_loss_kl_cov": "kl_cov",
    "cross_entropy_loss": "cross_entropy",
    "importance_sampling_loss": "importance_sampling",
}

SKYRL = Framework(
    name="SkyRL",
    package="skyrl",
    version="0.3.0",
    files=("skyrl/backends/skyrl_train/",),
    options=("skyrl/train/config/config.py",),
    remedies=(
        Remedy(
            _EXP,
            "regular and dual_clip clamp the log-ratio to ±20 before exp; clip_cov, kl_cov and importance_sampling do not",
            "trainer.algorithm.policy_loss_type=regular",
        ),
        Remedy(
            (*_EXP, "nan_times_zero_mask"),
            "k3 clamps its log-ratio to ±20 before exp; k1, k2 and abs are open",
            "trainer.algorithm.kl_estimator_type=k3",
        ),
        Remedy(
            ("inf_times_zero_coef", "zero_div_zero", "std_single"),
            "masks prompts whose rewards are all alike",
            "trainer.algorithm.zero_variance_filter=true",
        ),
        Remedy(
            ("zero_div_zero", "cancellation_spike"),
            "leaves the division by a group's deviation out",
            "trainer.algorithm.grpo_norm_by_std=false",
        ),
        Remedy(
            ("bad_input", "exp_overflow", "nan_times_zero_mask"),
            "masks tokens that trainer and rollout engine disagree on, NaN among them",
            "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high=5.0",
        ),
        Remedy(
            ("std_single", "zero_div_zero", "empty_mask_mean"),
            "no second normalisation after that of the estimator",
            "trainer.algorithm.advantage_batch_normalize=false",
        ),
    ),
    guards=("the FSDP strategy skips the optimizer step when grad_norm is not finite; a NaN loss with finite gradients passes",),
    sites=(
        LossSite(
            "skyrl/backends/skyrl_train/workers/worker.py",
            "PolicyWorkerBase._forward_backward_micro",
            roles(
                log_probs="action_log_probs",
                old_log_probs="old_action_log_probs",
                ref_log_probs="base_action_log_probs",
                rollout_log_probs="rollout_action_logprobs",
                advantages="advantages",
                mask="loss_mask action_mask",
                entropy="entropy_BS entropy entropy_loss_term",
                kl="kl_loss kl_loss_term",
                loss="policy_loss loss unscaled_loss",
            ),
            "skyrl.{policy_loss_type}",
            ("loss_config", "self.cfg.algorithm"),
        ),
        *(
            LossSite(_UTILS, function, _ARGUMENTS, f"skyrl.{kind}", ("config",), fixed=(("use_kl_loss", False),))
            for function, kind in _FUNCTIONS.items()
        ),
        LossSite(_UTILS, "sapo_policy_loss.<locals>.gate_function", roles(ratio="x")),
        LossSite(
            _UTILS,
            "compute_approx_kl",
            roles(log_probs="log_probs", ref_log_probs="log_probs_base", mask="loss_mask", log_ratio="kl", kl="ratio kld"),
        ),
        LossSite(_UTILS, "reduce_loss", roles(loss="loss", mask="loss_mask")),
        LossSite(
            _CORRECTION,
            "compute_tis_ratio",
            roles(
                old_log_probs="old_log_probs",
                rollout_log_probs="rollout_logprobs",
                mask="loss_mask",
                log_ratio="token_tis_log_ratio seq_tis_log_ratio",
                is_weight="token_tis_ratio seq_tis_ratio",
            ),
        ),
        LossSite(
            _CORRECTION,
            "apply_off_policy_correction",
            roles(
                loss="loss", old_log_probs="old_log_probs", rollout_log_probs="rollout_logprobs", mask="loss_mask", is_weight="tis_ratio"
            ),
        ),
        LossSite("skyrl/backends/skyrl_train/utils/torch_utils.py", "safe_exp_delta", roles(log_ratio="delta y")),
    ),
)
