"""Liger-Kernel: rows checked against Liger-Kernel 0.8.5 (`chunked_loss/grpo_loss.py`, `ops/grpo_loss.py`).

Notable: both losses compute their gradient inside forward, where nothing can be recorded as a program: the chunked one row by row (and
compiled by default), the other one in Triton. What they are called with is taken at their door; of the chunked one the formula is plain
Python, which is run again on a hit, uncompiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanscope.frameworks.rows import ALL_CLAMPS, Framework, Kernel, Loss, LossSite, Remedy, Settings, Term, roles
from nanscope.frameworks.trl import SEQUENCE, TO_CISPO, TO_TOKENS, TO_VESPO, TYPES, VESPO, Family
from nanscope.objective.reduction import Over, Reduction
from nanscope.objective.settings import LossSettings
from nanscope.roles import Role

_VERSION = "0.8.5"
_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap", "seq_ratio_overflow")
_CHUNKED = "liger_kernel/chunked_loss/grpo_loss.py"
_PPO = "liger_kernel/chunked_loss/fused_linear_ppo.py"
_TRITON = "liger_kernel/ops/grpo_loss.py"

_BATCH = (
    ("attention_mask", Role.MASK),
    ("advantages", Role.ADVANTAGES),
    ("old_per_token_logps", Role.OLD_LOG_PROBS),
    ("ref_per_token_logps", Role.REF_LOG_PROBS),
    ("vllm_is_ratio", Role.IS_WEIGHT),
)
_OPTIONS = (
    "epsilon_low", "epsilon_high", "beta", "loss_type", "max_completion_length", "importance_sampling_level", "sapo_temperature_pos",
    "sapo_temperature_neg", "delta", "use_bias_correction_kl", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
    "num_items_in_batch",
)  # fmt: skip
_SAME = tuple((name, name) for name in _OPTIONS)
_ROLES = roles(
    log_probs="per_token_logps",
    old_log_probs="old_per_token_logps",
    ref_log_probs="ref_per_token_logps",
    log_ratio="log_ratio log_importance_weights",
    ratio="coef_1 coef_2",
    is_weight="vllm_is_ratio",
    kl="kl_div",
    advantages="advantages advantages_expanded",
    mask="attention_mask full_attention_mask positive_advantages_mask",
    loss="per_token_loss per_token_loss1 per_token_loss2 loss weighted",
)


@dataclass(frozen=True, slots=True)
class Liger(Family):
    """`LigerFusedLinearGRPOFunction.ppo_loss_fn`. use_vllm stands for passing `vllm_is_ratio`, computed as TRL does."""

    beta: float = 0.04
    epsilon_low: float = 0.2
    epsilon_high: float | None = 0.2
    use_bias_correction_kl: bool = False
    max_completion_length: int | None = None

    def settings(self) -> LossSettings:
        settings = self.objective(self.epsilon_low, longest=self.max_completion_length)
        return replace(settings, reduction=Reduction(Over.LONG_ROWS)) if self.loss_type == "luspo" else settings


_LUSPO = "luspo sums padding and divides by T: the mask is not applied per token; disagrees with TRL 1.16"
_FLAWS = {"luspo": (_LUSPO,), "vespo": (VESPO,)}

_NO_KL: Settings = {"beta": 0.0}
_WALKED: dict[str, tuple[Settings, ...]] = {
    **dict.fromkeys(("bnpo", "sapo", "vespo"), (_NO_KL,)),
    "grpo": (_NO_KL, {**_NO_KL, **SEQUENCE}, {**_NO_KL, "delta": 4.0}, {**_NO_KL, "use_vllm": True}),
    "dapo": (_NO_KL, {"use_bias_correction_kl": True}, ALL_CLAMPS),
    "luspo": (_NO_KL, {**_NO_KL, **SEQUENCE}),
    "cispo": (_NO_KL, {**_NO_KL, "epsilon_high": 5.0}),
}

FRAMEWORK = Framework(
    name="Liger-Kernel",
    package="liger_kernel",
    host="TRL",
    version=_VERSION,
    files=("liger_kernel/chunked_loss/", "liger_kernel/ops/grpo_loss.py", "liger_kernel/transformers/grpo_loss.py"),
    options=(_CHUNKED,),
    remedies=(
        TO_CISPO,
        TO_VESPO,
        Remedy(_EXP, "no option of Liger 0.8 clamps a log-ratio or a KL before exp; mask the log-probs before they are passed in"),
        Remedy(
            ("exp_overflow", "inf_times_zero_mask", "nan_times_zero_mask", "inf_minus_inf"),
            "leaves the KL term out (it is on by default, at 0.04)",
            "beta=0.0",
            Term.KL,
        ),
        TO_TOKENS,
        Remedy(("bad_input", "nan_times_zero_mask", "unknown"), "plain Python that a debugger can step through", "compiled=False"),
    ),
    sites=(
        LossSite(
            _PPO,
            "LigerFusedLinearPPOBase.forward",
            (*_BATCH, ("per_token_logps", Role.LOG_PROBS)),
            "liger.{loss_type}",
            (),
            _SAME,
            kernel=Kernel(
                hidden="_input",
                weight="weight",
                bias="bias",
                ids="selected_token_ids",
                temperature="temperature",
                tensors=_BATCH,
                formula="cls.ppo_loss_fn",
                arguments=(
                    ("full_attention_mask", "attention_mask"),
                    *((name, name) for name, _ in _BATCH),
                    *_SAME,
                ),
            ),
        ),
        LossSite(
            _TRITON,
            "GrpoLossFunction.forward",
            roles(
                old_log_probs="old_logp",
                ref_log_probs="ref_logp",
                advantages="advantages",
                mask="completion_mask mask",
                is_weight="vllm_is_ratio",
                log_probs="per_token_logps",
                logits="logits",
                log_ratio="log_ratio seq_log_importance",
                ratio="coef_1 coef_2",
                loss="loss loss_out reduced_loss",
            ),
            "liger.{loss_type}",
            (),
            (("epsilon_low", "eps_low"), ("epsilon_high", "eps_high"), *(pair for pair in _SAME[2:] if "vespo" not in pair[0])),
            kernel=Kernel(
                hidden="logits",
                ids="completion_ids",
                temperature="temperature",
                drops_nan=True,
                tensors=(
                    ("completion_mask", Role.MASK),
                    ("advantages", Role.ADVANTAGES),
                    ("old_logp", Role.OLD_LOG_PROBS),
                    ("ref_logp", Role.REF_LOG_PROBS),
                    ("vllm_is_ratio", Role.IS_WEIGHT),
                ),
            ),
        ),
        LossSite(_CHUNKED, "LigerFusedLinearGRPOFunction.ppo_loss_fn", _ROLES),
        LossSite(_CHUNKED, "k3_loss_fn", roles(log_probs="log_q", ref_log_probs="log_p")),
        LossSite(_CHUNKED, "clip_coef_fn", roles(ratio="coef clipped_coef")),
        LossSite(_CHUNKED, "sapo_loss_fn", roles(ratio="importance_ratio")),
        LossSite(
            _CHUNKED,
            "get_gamma_weights",
            roles(
                log_ratio="log_ratio_per_token log_ratio_clamped seq_log_ratio log_w_seq log_is_ratio",
                ratio="w_seq phi_seq",
                is_weight="importance_sampling_ratio",
                advantages="advantages",
                mask="mask is_nonneg_adv",
            ),
        ),
        LossSite("liger_kernel/transformers/grpo_loss.py", "_reduce_grpo_loss", roles(loss="per_token_loss", mask="completion_mask mask")),
    ),
    losses=tuple(
        Loss(f"liger.{kind}", Liger, f"{_CHUNKED}:97", _VERSION, (("loss_type", kind),), _FLAWS.get(kind, ()), _WALKED.get(kind, ()))
        for kind in TYPES
    ),
)
