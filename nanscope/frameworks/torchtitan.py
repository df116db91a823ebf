"""torchtitan: rows checked against torchtitan 0.3.0 (`experiments/rl/losses/dapo.py`).

Notable: masked log-ratios are selected away and the rest clamped to ±10, both before exp: of all losses the hardest to break. It counts
nothing itself: a token that it drops for its generator's log-prob is out of the sum, and in what is divided by if who calls it has counted
it, as `loss_mask` does. The batcher of 0.3.0 leaves such tokens out of `global_valid_tokens`; give that number to have it so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanscope.frameworks.rows import TOKEN_MEAN, Framework, Loss, LossSite, Remedy, clip, roles
from nanscope.objective.bounds import Bounds
from nanscope.objective.reduction import Masking
from nanscope.objective.settings import LossSettings, Ratio
from nanscope.objective.surrogates import Ppo

_VERSION = "0.3.0"
_LOSS = "torchtitan/experiments/rl/losses/dapo.py"


@dataclass(frozen=True, slots=True)
class DAPO:
    """`DAPOLoss.Config`. Its old policy is the generator: pass the generator's log-probs as old_log_probs.

    global_valid_tokens: what the sum is divided by, None for the number of tokens in the mask.
    """

    ratio_clip_low: float = 0.2
    ratio_clip_high: float = 0.2
    global_valid_tokens: float | None = None

    def settings(self) -> LossSettings:
        return LossSettings(
            surrogate=Ppo(clip(self.ratio_clip_low, self.ratio_clip_high)),
            ratio=Ratio(mask_log_ratio=Masking.WHERE, clamp=Bounds(-10.0, 10.0)),
            reduction=replace(TOKEN_MEAN, count=self.global_valid_tokens),
            mask_advantages=Masking.MULTIPLY,
            drop_unscored=True,
        )


FRAMEWORK = Framework(
    name="torchtitan",
    package="torchtitan",
    version=_VERSION,
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
    losses=(Loss("torchtitan.dapo", DAPO, f"{_LOSS}:57", _VERSION),),
)
