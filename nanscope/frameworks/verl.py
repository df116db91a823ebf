"""verl: rows checked against verl 0.9.1 (`workers/utils/losses.py`, `trainer/ppo/core_algos.py`).

Notable: the losses are ordinary functions in a registry, called by `ppo_loss`, which adds entropy and KL. They run in a Ray worker.
"""

from nanscope.frameworks.rows import Framework, LossSite, Remedy, roles

_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap", "seq_ratio_overflow")
_ALGOS = "verl/trainer/ppo/core_algos.py"

_ARGUMENTS = roles(
    log_probs="log_prob",
    old_log_probs="old_log_prob",
    advantages="advantages advantage",
    mask="response_mask valid_mask valid_positive_mask valid_negative_mask",
    is_weight="rollout_is_weights seq_is_weights",
    log_ratio="negative_approx_kl negative_approx_kl_seq log_seq_importance_ratio negative_approx_kl_clamp negative_approx_kl_min "
    "log_ratio ppo_kl abs_kl",
    ratio="ratio seq_importance_ratio truncated_ratio clipped_ratio clipped_ratio_sg",
    loss="pg_losses pg_losses1 pg_losses2 pg_losses3 clip_pg_losses1 clip_pg_losses2 pg_losses_kl pg_loss",
)
_MODES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo")
_CORRECTION = "config.policy_loss.rollout_correction"
_LIVE = (
    ("loss_agg_mode", "loss_agg_mode"),
    ("rollout_is", f"rollout_is_weights?{_CORRECTION}.rollout_is"),
    ("rollout_is_threshold", f"rollout_is_weights?{_CORRECTION}.rollout_is_threshold"),
)

VERL = Framework(
    name="verl",
    package="verl",
    version="0.9.1",
    files=("verl/trainer/", "verl/workers/"),
    options=(
        "verl/workers/config/actor.py",
        "verl/trainer/config/algorithm.py",
        "verl/workers/config/rollout.py",
        "verl/utils/torch_functional.py",
        "verl/trainer/config/actor/actor.yaml",
        "verl/utils/kernel/kernels.py",
    ),
    remedies=(
        Remedy(
            _EXP,
            "vanilla clamps the log-ratio to ±20 before exp; clip_cov, kl_cov and geo_mean do not",
            "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
        ),
        Remedy(
            (*_EXP, "nan_times_zero_mask", "inf_minus_inf"),
            "low_var_kl clamps its log-ratio to ±20 before exp; k2 and the types with a plus are open",
            "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        ),
        Remedy(
            ("nan_times_zero_mask", "inf_times_zero_mask", "bad_input"),
            "token-mean selects the tokens that count; the sequence modes multiply by the mask, and 0 · NaN is NaN",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        ),
        Remedy(
            ("empty_mask_mean", "zero_div_zero", "zero_denominator"),
            "sums have no denominator that a fully masked batch makes 0",
            "actor_rollout_ref.actor.loss_agg_mode=token-sum",
        ),
        Remedy(
            ("plogp_zero", "inf_times_zero_coef", "nan_times_zero_mask"),
            "leaves the entropy out; at entropy_coeff=0 it is still formed, and 0 · NaN is NaN",
            "actor_rollout_ref.actor.calculate_entropy=False",
        ),
        Remedy(
            ("bad_input", "exp_overflow"),
            "rejects tokens that trainer and rollout engine disagree on, before they are weighed",
            "algorithm.rollout_correction.rollout_rs=token_k1",
        ),
        Remedy(
            ("zero_div_zero", "inf_times_zero_coef", "cancellation_spike"),
            "leaves the division by a group's deviation out",
            "algorithm.norm_adv_by_std_in_grpo=False",
        ),
    ),
    guards=("the FSDP engines skip the optimizer step when grad_norm is not finite; a NaN loss with finite gradients passes",),
    sites=(
        LossSite(
            "verl/workers/utils/losses.py",
            "ppo_loss",
            roles(
                log_probs="log_prob log_probs",
                old_log_probs="old_log_prob old_log_probs",
                ref_log_probs="ref_log_prob",
                advantages="advantages",
                mask="response_mask",
                entropy="entropy",
                kl="kld",
                is_weight="rollout_is_weights",
                loss="pg_loss kl_loss entropy_loss policy_loss",
            ),
            "verl.ppo_loss",
            ("config",),
            tuple((name, f"data.{path}") for name, path in _LIVE[1:]),
        ),
        *(LossSite(_ALGOS, f"compute_policy_loss_{mode}", _ARGUMENTS, f"verl.{mode}", ("config",), _LIVE) for mode in _MODES),
        LossSite(
            _ALGOS,
            "compute_policy_loss_reinforce",
            roles(
                log_probs="log_prob",
                rollout_log_probs="rollout_log_prob",
                advantages="advantages",
                mask="response_mask",
                is_weight="rollout_is_weights",
                log_ratio="negative_approx_kl",
                kl="kl_divergence",
                loss="pg_losses pg_loss",
            ),
        ),
        LossSite(_ALGOS, "compute_policy_loss_sapo.<locals>.gate_function", roles(ratio="x")),
        LossSite(_ALGOS, "kl_penalty", roles(log_probs="logprob", ref_log_probs="ref_logprob", kl="forward_score backward_score")),
        LossSite(_ALGOS, "kl_penalty_forward", roles(log_probs="logprob", ref_log_probs="ref_logprob", log_ratio="kl", kl="ratio kld")),
        LossSite(_ALGOS, "agg_loss", roles(loss="loss_mat seq_losses loss", mask="loss_mask seq_mask")),
        LossSite("verl/utils/torch_functional.py", "masked_sum", roles(mask="mask")),
        LossSite("verl/utils/torch_functional.py", "masked_mean", roles(mask="mask")),
    ),
)
