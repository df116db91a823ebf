"""OpenRLHF: rows checked against OpenRLHF 0.11.2 (`trainer/ray/ppo_actor.py`, `models/loss.py`, `models/utils.py`).

Notable: `PolicyLoss` holds its options itself; KL and entropy are added by the training step, a Ray actor under DeepSpeed. No denominator
has a floor, so a step without a valid token is 0/0, in the gradients too. The KL bounds d before its exp, and the source names 0 · inf as
the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanscope.errors import NanscopeError
from nanscope.frameworks.rows import Framework, Loss, LossSite, Remedy, Settings, Term, clip, pick, roles
from nanscope.objective.bounds import SAFE, Bounds
from nanscope.objective.reduction import Guard, Masking, Over, Reduction
from nanscope.objective.settings import PER_SEQUENCE, Anchor, Correction, Estimator, Gate, Kl, Level, LossSettings, Ratio, Statistic
from nanscope.objective.surrogates import Ppo

_VERSION = "0.11.2"
_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap")
_LOSS = "openrlhf/models/loss.py"
_COUNTS = tuple((name, name) for name in ("dp_size", "batch_num_tokens", "global_batch_size"))

_TOKENS = Reduction(Over.TOKENS, guard=Guard.RAW)
_ROWS = Reduction(Over.ROW_MEANS, empty=Masking.MULTIPLY, guard=Guard.RAW, row_guard=Guard.EPSILON)

_CAP = Bounds(-10.0, 10.0)
_ESTIMATOR = {
    "k1": Kl(1.0, Estimator.K1, cap=_CAP),
    "k2": Kl(1.0, Estimator.K2, cap=_CAP),
    "k3": Kl(1.0, Estimator.K3, clamp=Bounds(high=10.0), cap=_CAP),
}
_GATING = {"ratio": Statistic.RATIO, "binary_kl": Statistic.BINARY_KL, "tv": Statistic.TV}
_LEVEL = {"token": Level.TOKEN, "seq": Level.SEQUENCE_MEAN}


@dataclass(frozen=True, slots=True)
class OpenRlhfAggregation:
    """`aggregate_loss`: token or row means, with the counts of the whole optimizer step; None counts what is here."""

    token_level_loss: bool = True
    dp_size: int = 1
    batch_num_tokens: float | None = None
    global_batch_size: float | None = None


def _aggregation(o: OpenRlhfAggregation, by_token: bool) -> Reduction:
    if by_token:
        return replace(_TOKENS, count=o.batch_num_tokens, factor=1 if o.batch_num_tokens is None else o.dp_size)
    return replace(_ROWS, count=o.global_batch_size, factor=1 if o.global_batch_size is None else o.dp_size)


@dataclass(frozen=True, slots=True)
class OpenRlhfKlLoss(OpenRlhfAggregation):
    """`compute_approx_kl`, aggregated, without coefficient. unbiased_gradient: the value of the estimator, the gradient of sg w · d²/2."""

    kl_estimator: str = "k1"
    unbiased_gradient: bool = False

    def settings(self) -> LossSettings:
        kl = pick("kl_estimator", self.kl_estimator, _ESTIMATOR)
        unbiased = replace(kl, straight_through=True, importance=10.0)
        return LossSettings(
            surrogate=None, kl=unbiased if self.unbiased_gradient else kl, reduction=_aggregation(self, self.token_level_loss)
        )


@dataclass(frozen=True, slots=True)
class OpenRlhfPolicy(OpenRlhfAggregation):
    """`PolicyLoss`. through_actor: ℓ comes from `Actor.forward`, which multiplies it by the mask."""

    policy_loss_type: str = "ppo"
    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    dual_clip: float | None = None
    is_correction_level: str = "off"
    is_correction_mode: str = "mask"
    is_correction_gating: str = "ratio"
    is_correction_threshold: Sequence[float] = (0.5, 5.0)
    through_actor: bool = False

    def settings(self) -> LossSettings:
        corrected = self.is_correction_level != "off"
        anchor = Anchor.ROLLOUT if corrected else Anchor.OLD
        ratios = {
            "ppo": Ratio(clamp=SAFE),
            "gspo": replace(PER_SEQUENCE, against=anchor, mask_ratio=Masking.MULTIPLY),
        }
        ratio = pick("policy_loss_type", self.policy_loss_type, ratios)
        by_token = self.policy_loss_type == "ppo"  # gspo always takes row means
        return LossSettings(
            surrogate=Ppo(clip(self.clip_eps_low, self.clip_eps_high), dual=self.dual_clip),
            ratio=ratio,
            correction=self.correction() if corrected and by_token else None,
            reduction=_aggregation(self, self.token_level_loss and by_token),
            mask_log_probs=Masking.MULTIPLY if self.through_actor else Masking.NONE,
        )

    def correction(self) -> Correction:
        """Return the weight exp(ℓ_old − ℓ_rollout), clamped, or dropped by a statistic of its token or row; loss.py:215-246."""
        low, high = self.is_correction_threshold
        statistic = pick("is_correction_gating", self.is_correction_gating, _GATING)
        level = pick("is_correction_level", self.is_correction_level, _LEVEL)
        modes = {
            "clip": Correction(bounds=Bounds(low, high)),
            "mask": Correction(gates=(Gate(Bounds(low, high), statistic, level, guard=Guard.RAW),)),
        }
        if self.is_correction_mode == "clip" and (level is not Level.TOKEN or statistic is not Statistic.RATIO):
            message = "is_correction_mode='clip' needs is_correction_level='token' and is_correction_gating='ratio', as OpenRLHF asserts"
            raise NanscopeError(message, slug="unknown-setting-value")
        return pick("is_correction_mode", self.is_correction_mode, modes)


_WALKED: tuple[Settings, ...] = (
    {"token_level_loss": False},
    {"through_actor": True},
    {"dual_clip": 3.0},
    {"is_correction_level": "token"},
    {"is_correction_level": "token", "is_correction_mode": "clip"},
    {"is_correction_level": "seq"},
    {"is_correction_level": "token", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.05)},
    {"is_correction_level": "seq", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.05)},
    {"is_correction_level": "token", "is_correction_gating": "tv", "is_correction_threshold": (0.0, 0.5)},
)
_KL_WALKED: tuple[Settings, ...] = (
    {"unbiased_gradient": True},
    *({"kl_estimator": kind, "unbiased_gradient": unbiased} for kind in ("k2", "k3") for unbiased in (False, True)),
)
_EMPTY = "a step without a valid token is 0/0: NaN loss and NaN gradients"
_ACTOR = "Actor.forward multiplies log-probs by the mask: a masked −Inf is NaN before the loss sees it"
_BARE = "the sequence ratio has no clamp before exp"


FRAMEWORK = Framework(
    name="OpenRLHF",
    package="openrlhf",
    version=_VERSION,
    files=("openrlhf/models/", "openrlhf/trainer/"),
    options=("openrlhf/cli/train_ppo_ray.py",),
    remedies=(
        Remedy(
            (*_EXP, "seq_ratio_overflow"),
            "ppo clamps the log-ratio to ±20 before exp, gspo does not",
            "--actor.policy_loss_type ppo",
            Term.RATIO,
        ),
        Remedy(
            (*_EXP, "inf_minus_inf", "magnitude_overflow"),
            "k3 bounds its exponent; k2 of an infinite log-ratio is finite with a NaN gradient",
            "--algo.kl.estimator k3",
            Term.KL,
            option="kl_estimator",
        ),
        Remedy(
            ("exp_overflow", "bad_input"),
            "drops tokens outside the band; the weight exp(ℓ_old − ℓ_rollout) has no clamp before exp",
            "--algo.advantage.is_correction_mode mask",
            Term.ROLLOUT,
        ),
        Remedy(
            ("exp_overflow", "seq_ratio_overflow"),
            "leaves the weight against the rollout engine out",
            "--algo.advantage.is_correction_level off",
            Term.ROLLOUT,
        ),
        Remedy(
            ("zero_div_zero", "std_single", "cancellation_spike"),
            "leaves the division by a group's deviation out",
            "--algo.advantage.no_std_norm",
            Term.ADVANTAGES,
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
            beside=(("rollout_log_probs", "rollout_log_probs"), ("old_log_probs", "old_log_probs"), ("mask", "action_mask")),
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
    losses=(
        Loss("openrlhf.ppo", OpenRlhfPolicy, f"{_LOSS}:174", _VERSION, (("policy_loss_type", "ppo"),), (_EMPTY, _ACTOR), _WALKED),
        Loss(
            "openrlhf.gspo",
            OpenRlhfPolicy,
            f"{_LOSS}:174",
            _VERSION,
            (("policy_loss_type", "gspo"),),
            (_EMPTY, _ACTOR, _BARE),
            ({"is_correction_level": "token"}, {"through_actor": True}),
        ),
        Loss("openrlhf.kl_loss", OpenRlhfKlLoss, "openrlhf/models/utils.py:68", _VERSION, flaws=(_EMPTY,), walked=_KL_WALKED),
    ),
)
