"""prime-rl: rows checked against commit 559b447 (`trainer/rl/loss.py`).

Notable: one flat sequence at a time; nothing is clamped, and a mask of bools multiplies after exp. A term that anchors the graph,
`trainer_logprobs[0].sum() * 0.0`, makes a NaN anywhere in the first sequence one of the loss.
"""

from nanscope.frameworks.rows import Framework, LossSite, Remedy, roles

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

PRIME_RL = Framework(
    name="prime-rl",
    package="prime-rl",
    version="559b447",
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
)
