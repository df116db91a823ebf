"""torchtitan: rows checked against torchtitan 0.3.0 (`experiments/rl/losses/dapo.py`).

Notable: masked log-ratios are selected away and the rest clamped to ±10, both before exp: of all losses the hardest to break.
"""

from nanscope.frameworks.rows import Framework, LossSite, Remedy, roles

_LOSS = "torchtitan/experiments/rl/losses/dapo.py"

TORCHTITAN = Framework(
    name="torchtitan",
    package="torchtitan",
    version="0.3.0",
    files=("torchtitan/experiments/rl/",),
    options=(_LOSS,),
    remedies=(
        Remedy(
            ("bad_input", "exp_overflow", "inf_minus_inf", "where_grad_trap"),
            "log-ratios are masked, and clamped to ±10, before exp: what is left are logits that are not finite",
        ),
    ),
    guards=(
        "drops tokens whose generator log-prob is not finite",
        "the controller stops the run when the mean loss is not finite",
    ),
    sites=(
        LossSite(
            _LOSS,
            "DAPOLoss.__call__",
            roles(
                log_probs="trainer_logprobs",
                old_log_probs="generator_logprobs",
                advantages="advantages",
                mask="loss_mask effective_loss_mask",
                log_ratio="raw_log_ratio masked_log_ratio log_ratio diff_for_metrics",
                ratio="ratio clipped_ratio masked_ratio",
                entropy="token_entropy",
                logits="logits",
                loss="token_loss masked_loss loss",
            ),
            "torchtitan.dapo",
            ("self",),
            (("global_valid_tokens", "global_valid_tokens"),),
        ),
    ),
)
