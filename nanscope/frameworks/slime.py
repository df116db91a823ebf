"""slime: rows checked against commit 624b824 (`backends/megatron_utils/loss.py`, `utils/ppo_utils.py`).

Notable: the formulas are compiled and opaque; what goes in and what comes out is seen in `policy_loss_function`. Tokens lie in one line.
"""

from nanscope.frameworks.rows import Framework, LossSite, Remedy, roles

_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap")
_UTILS = "slime/utils/ppo_utils.py"

SLIME = Framework(
    name="slime",
    package="slime",
    version="624b824",
    files=("slime/backends/", "slime/utils/ppo_utils.py"),
    options=("slime/utils/arguments.py",),
    remedies=(
        Remedy(
            (*_EXP, "bad_input"),
            "k3 shows an overflow in the loss; low_var_kl clamps after exp, which leaves a finite loss and a NaN gradient",
            "--kl-loss-type k3",
        ),
        Remedy(_EXP, "leaves the KL term out of the loss", "--kl-loss-coef 0"),
        Remedy(_EXP, "no option clamps the log-ratio before exp; the line itself has to be patched"),
    ),
    guards=("check_for_nan_in_loss_and_grad skips the optimizer step when grad_norm is not finite",),
    sites=(
        LossSite(
            "slime/backends/megatron_utils/loss.py",
            "policy_loss_function",
            roles(
                log_probs="log_probs full_log_probs",
                old_log_probs="old_log_probs full_old_log_probs",
                ref_log_probs="ref_log_probs",
                rollout_log_probs="rollout_log_probs",
                advantages="advantages",
                mask="loss_masks opsm_mask modified_response_masks",
                log_ratio="ppo_kl",
                ratio="importance_ratio",
                is_weight="ois",
                kl="kl kl_loss",
                entropy="entropy entropy_loss",
                loss="pg_loss loss",
            ),
            "slime.policy",
            ("args",),
        ),
        LossSite(
            _UTILS,
            "compute_policy_loss",
            roles(
                log_ratio="ppo_kl",
                ratio="ratio",
                advantages="advantages",
                loss="pg_losses pg_losses1 pg_losses2 pg_losses3 clip_pg_losses1 clip_pg_losses2",
            ),
        ),
        LossSite(_UTILS, "compute_approx_kl", roles(log_probs="log_probs", ref_log_probs="log_probs_base", log_ratio="log_ratio", kl="kl")),
        LossSite(
            _UTILS, "compute_gspo_kl", roles(log_probs="log_prob", old_log_probs="old_logprob", mask="loss_mask", log_ratio="ppo_kl kl")
        ),
    ),
)
