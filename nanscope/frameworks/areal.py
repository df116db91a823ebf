"""AReaL: rows checked against commit 4aef98d (`areal/utils/functional/functional.py`).

Notable: the mask is a `where` after exp. The loss is clean of a masked overflow, its gradient is not.
"""

from nanscope.frameworks.rows import Framework, LossSite, Remedy, roles

_EXP = ("exp_overflow", "where_grad_trap", "inf_times_zero_coef", "inf_times_zero_mask")
_LOSS = "areal/utils/functional/functional.py"
_LIVE = tuple((name, name) for name in ("eps_clip", "eps_clip_higher", "c_clip", "importance_sampling_level"))

AREAL = Framework(
    name="AReaL",
    package="areal",
    version="4aef98d",
    files=("areal/utils/functional/", "areal/trainer/ppo/"),
    options=("areal/api/cli_args.py",),
    remedies=(
        Remedy(_EXP, "takes means of log-ratios over sequences, masked before exp", "actor.importance_sampling_level=sequence"),
        Remedy(_EXP, "no option clamps the log-ratio before exp, or masks it there; the line itself has to be patched"),
        Remedy(
            ("seq_ratio_overflow",),
            "ratios of single tokens overflow later than those of sequences",
            "actor.importance_sampling_level=token",
        ),
    ),
    guards=("a step with a non-finite grad_norm is reported as unsuccessful", "warns when proximal log-probs are not finite"),
    sites=(
        LossSite(
            _LOSS,
            "ppo_actor_loss_fn",
            roles(
                log_probs="logprobs",
                old_log_probs="proximal_logprobs",
                rollout_log_probs="old_logprobs",
                advantages="advantages",
                mask="loss_mask clip_mask dual_clip_mask behave_mask",
                log_ratio="log_ratio behave_approx_kl",
                ratio="ratio clipped_ratio",
                is_weight="behave_imp_weight",
                loss="pg_loss pg_loss1 pg_loss2 pg_loss3 logging_loss",
            ),
            "areal.ppo_actor",
            (),
            _LIVE,
        ),
        LossSite(
            _LOSS,
            "sapo_loss_fn",
            roles(
                log_probs="logprobs",
                old_log_probs="old_logprobs",
                advantages="advantages",
                mask="loss_mask is_positive",
                log_ratio="log_ratio",
                ratio="ratio soft_gate",
                loss="pg_loss logging_loss",
            ),
            "areal.sapo",
            (),
            tuple((name, name) for name in ("tau_pos", "tau_neg", "importance_sampling_level")),
        ),
    ),
)
