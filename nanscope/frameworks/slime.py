"""slime: rows checked against commit 624b824 (`backends/megatron_utils/loss.py`, `utils/ppo_utils.py`).

Notable: the formulas are compiled, and opaque until a bad step; what goes in and what comes out is seen in `policy_loss_function`. Tokens
lie in one line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanscope.frameworks.rows import CLAMPED, Framework, Loss, LossSite, Remedy, Settings, Term, clip, pick, roles
from nanscope.objective.bounds import Bounds
from nanscope.objective.settings import PER_SEQUENCE, Entropy, Estimator, Kl, LossSettings, Ratio
from nanscope.objective.surrogates import Ppo

_VERSION = "624b824"
_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap")
_UTILS = "slime/utils/ppo_utils.py"


@dataclass(frozen=True, slots=True)
class SlimePolicy:
    """`policy_loss_function`, reduced over tokens. The entropy term is there whenever the batch has an entropy."""

    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    entropy_coef: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    advantage_estimator: str = "grpo"

    def settings(self) -> LossSettings:
        return LossSettings(
            surrogate=Ppo(clip(self.eps_clip, self.eps_clip_high), dual=self.eps_clip_c),
            ratio=PER_SEQUENCE if self.advantage_estimator == "gspo" else Ratio(),
            kl=replace(pick("kl_loss_type", self.kl_loss_type, _KL), coef=self.kl_loss_coef) if self.use_kl_loss else None,
            entropy=Entropy(self.entropy_coef, required=self.entropy_coef != 0),
        )


@dataclass(frozen=True, slots=True)
class SlimeKlLoss:
    """`compute_approx_kl`, without coefficient."""

    kl_loss_type: str = "k1"

    def settings(self) -> LossSettings:
        return LossSettings(surrogate=None, kl=pick("kl_loss_type", self.kl_loss_type, _KL))


_KL = {
    "k1": Kl(1.0, Estimator.K1),
    "k2": Kl(1.0, Estimator.K2),
    "k3": Kl(1.0, Estimator.K3),
    "low_var_kl": Kl(1.0, Estimator.K3, cap=Bounds(-10.0, 10.0)),  # after exp: the value is bounded, its gradient is not
}


_LATE = "low_var_kl clamps after exp only: finite loss, NaN gradient"
_ENTROPY = "the entropy term is formed at entropy_coef=0 as well: 0 · NaN is NaN"

_WALKED: tuple[Settings, ...] = (
    {"eps_clip_c": 3.0},
    {"advantage_estimator": "gspo"},
    {"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"},
    *CLAMPED,
)

FRAMEWORK = Framework(
    name="slime",
    package="slime",
    version=_VERSION,
    files=("slime/backends/", "slime/utils/ppo_utils.py"),
    options=("slime/utils/arguments.py",),
    remedies=(
        Remedy(
            (*_EXP, "bad_input"),
            "k3 shows an overflow in the loss; low_var_kl clamps after exp, which leaves a finite loss and a NaN gradient",
            "--kl-loss-type k3",
            Term.KL,
            unless=(("use_kl_loss", False), ("kl_loss_coef", 0.0)),
        ),
        Remedy(_EXP, "leaves the KL term out of the loss", "--kl-loss-coef 0", Term.KL),
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
            beside=(("rollout_log_probs", "batch.rollout_log_probs"), ("old_log_probs", "batch.log_probs"), ("mask", "batch.loss_masks")),
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
    losses=(
        Loss("slime.policy", SlimePolicy, f"{_UTILS}:124", _VERSION, flaws=(_ENTROPY,), walked=_WALKED),
        Loss(
            "slime.kl_loss",
            SlimeKlLoss,
            f"{_UTILS}:12",
            _VERSION,
            flaws=(_LATE,),
            walked=tuple({"kl_loss_type": kind} for kind in ("k2", "k3", "low_var_kl")),
        ),
    ),
)
