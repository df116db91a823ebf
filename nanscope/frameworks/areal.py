"""AReaL: rows checked against commit 4aef98d (`areal/utils/functional/functional.py`).

Notable: the mask is a `where` after exp. The loss is clean of a masked overflow, its gradient is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanscope.frameworks.rows import CLAMPED, Framework, Loss, LossSite, Remedy, Settings, Term, clip, pick, roles
from nanscope.objective.reduction import Guard, Masking, Over, Reduction
from nanscope.objective.settings import PER_SEQUENCE, LossSettings, Ratio
from nanscope.objective.surrogates import Ppo, Sapo

_VERSION = "4aef98d"
_EXP = ("exp_overflow", "where_grad_trap", "inf_times_zero_coef", "inf_times_zero_mask")
_LOSS = "areal/utils/functional/functional.py"
_LIVE = tuple((name, name) for name in ("eps_clip", "eps_clip_higher", "c_clip", "importance_sampling_level"))


@dataclass(frozen=True, slots=True)
class PpoActor:
    """`ppo_actor_loss_fn`. The ratio is against its proximal policy: pass proximal_logprobs as old_log_probs."""

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    importance_sampling_level: str = "token"

    def settings(self) -> LossSettings:
        return _settings(Ppo(clip(self.eps_clip, self.eps_clip_higher), dual=self.c_clip), self.importance_sampling_level, Masking.WHERE)


@dataclass(frozen=True, slots=True)
class SapoLoss:
    """`sapo_loss_fn`."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    importance_sampling_level: str = "token"

    def settings(self) -> LossSettings:
        return _settings(Sapo(self.tau_pos, self.tau_neg), self.importance_sampling_level, Masking.NONE)


def _settings(surrogate: Ppo | Sapo, level: str, mask_token_ratio: Masking) -> LossSettings:
    """The mask is a `where` after exp: the loss is clean, the gradient of an overflow is not."""
    sequence = replace(PER_SEQUENCE, mask_log_ratio=Masking.WHERE, mask_ratio=Masking.WHERE)
    levels = {"token": Ratio(mask_ratio=mask_token_ratio), "sequence": sequence}
    return LossSettings(
        surrogate=surrogate,
        ratio=pick("importance_sampling_level", level, levels),
        reduction=Reduction(Over.TOKENS, mask=Masking.WHERE),
        mask_advantages=Masking.MULTIPLY,
        mean_advantages=Guard.FLOOR if level == "sequence" else None,
    )


_AFTER = "the mask is a `where` after exp: finite loss, NaN gradient at a masked overflow"
_SEQUENCE: Settings = {"importance_sampling_level": "sequence"}

FRAMEWORK = Framework(
    name="AReaL",
    package="areal",
    version=_VERSION,
    files=("areal/utils/functional/", "areal/trainer/ppo/"),
    options=("areal/api/cli_args.py",),
    remedies=(
        Remedy(_EXP, "takes means of log-ratios over sequences, masked before exp", "actor.importance_sampling_level=sequence", Term.RATIO),
        Remedy(_EXP, "no option clamps the log-ratio before exp, or masks it there; the line itself has to be patched"),
        Remedy(
            ("seq_ratio_overflow",),
            "ratios of single tokens overflow later than those of sequences",
            "actor.importance_sampling_level=token",
            Term.RATIO,
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
    losses=(
        Loss("areal.ppo_actor", PpoActor, _LOSS, _VERSION, flaws=(_AFTER,), walked=({"c_clip": 3.0}, _SEQUENCE, *CLAMPED)),
        Loss("areal.sapo", SapoLoss, _LOSS, _VERSION, flaws=(_AFTER,), walked=(_SEQUENCE,)),
    ),
)
