"""OpenRLHF: rows checked against OpenRLHF 0.11.2 (`trainer/ray/ppo_actor.py`, `models/loss.py`, `models/utils.py`).

Notable: `PolicyLoss` holds its options itself; KL and entropy are added by the training step, a Ray actor under DeepSpeed.
"""

from nanscope.frameworks.rows import Framework, LossSite, Remedy, roles

_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap")
_LOSS = "openrlhf/models/loss.py"
_COUNTS = tuple((name, name) for name in ("dp_size", "batch_num_tokens", "global_batch_size"))

OPENRLHF = Framework(
    name="OpenRLHF",
    package="openrlhf",
    version="0.11.2",
    files=("openrlhf/models/", "openrlhf/trainer/"),
    options=("openrlhf/cli/train_ppo_ray.py",),
    remedies=(
        Remedy((*_EXP, "seq_ratio_overflow"), "ppo clamps the log-ratio to ±20 before exp, gspo does not", "--actor.policy_loss_type ppo"),
        Remedy(
            (*_EXP, "inf_minus_inf", "magnitude_overflow"),
            "k3 bounds its exponent; k2 of an infinite log-ratio is finite with a NaN gradient",
            "--algo.kl.estimator k3",
        ),
        Remedy(
            ("exp_overflow", "bad_input"),
            "drops tokens outside the band; the weight exp(ℓ_old − ℓ_rollout) has no clamp before exp",
            "--algo.advantage.is_correction_mode mask",
        ),
        Remedy(
            ("exp_overflow", "seq_ratio_overflow"),
            "leaves the weight against the rollout engine out",
            "--algo.advantage.is_correction_level off",
        ),
        Remedy(
            ("zero_div_zero", "std_single", "cancellation_spike"),
            "leaves the division by a group's deviation out",
            "--algo.advantage.no_std_norm",
        ),
        Remedy(
            ("empty_mask_mean", "zero_div_zero", "zero_denominator"),
            "no option keeps the token count from 0: drop the step's batch if it has no valid token",
        ),
        Remedy(
            ("inf_times_zero_mask", "nan_times_zero_mask"),
            "Actor.forward multiplies log-probs by the mask: fill the logits or the log-probs before it",
        ),
    ),
    guards=("DeepSpeed's bf16 optimizer checks gradients for overflow and skips the step",),
    sites=(
        LossSite(
            "openrlhf/trainer/ray/ppo_actor.py",
            "ActorPPOTrainer.training_step",
            roles(
                log_probs="action_log_probs",
                old_log_probs="old_action_log_probs",
                ref_log_probs="base_action_log_probs",
                advantages="advantages",
                mask="action_mask",
                kl="kl",
                log_ratio="logprobs_diff",
                loss="actor_loss kl_loss entropy_loss loss aux_loss",
            ),
        ),
        LossSite(
            _LOSS,
            "PolicyLoss.forward",
            roles(
                log_probs="log_probs",
                old_log_probs="old_log_probs",
                rollout_log_probs="rollout_log_probs",
                advantages="advantages",
                mask="action_mask keep filtered",
                log_ratio="raw_policy_log_ratio policy_log_ratio log_ratio is_log_ratio vllm_kl ppo_kl",
                ratio="ratio",
                is_weight="token_is coef",
                loss="surr1 surr2 clip1 clip2 loss",
            ),
            "openrlhf.{policy_loss_type}",
            ("self",),
            _COUNTS,
        ),
        LossSite(_LOSS, "aggregate_loss", roles(loss="loss seq_loss", mask="loss_mask seq_mask")),
        LossSite(
            "openrlhf/models/utils.py",
            "compute_approx_kl",
            roles(
                log_probs="log_probs",
                ref_log_probs="log_probs_base",
                old_log_probs="log_probs_old",
                log_ratio="log_ratio k3_log_ratio",
                kl="value grad_surrogate",
                ratio="w",
            ),
        ),
        LossSite("openrlhf/models/utils.py", "masked_mean", roles(mask="mask")),
    ),
)
