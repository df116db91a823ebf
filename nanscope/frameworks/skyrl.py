"""SkyRL: rows checked against SkyRL 0.3.0 (`backends/skyrl_train/workers/worker.py`, `…/utils/ppo_utils.py`).

Notable: a registry of losses that are all sums; the reduction is applied to the advantages before the loss sees them. Whatever in a loss
is not linear in A is out of scale then: the penalty of kl_cov, the bounds of clip_cov, cross_entropy. KL and entropy are added by the
worker, a Ray actor; the KL term keeps its own mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanscope.frameworks.rows import ROW_MEANS, ROW_SUMS, TOKEN_MEAN, Framework, Loss, LossSite, Remedy, Settings, Term, clip, pick, roles
from nanscope.objective.bounds import OPEN, SAFE, Bounds
from nanscope.objective.reduction import Masking, Over, Reduction
from nanscope.objective.settings import (
    PER_SEQUENCE,
    Anchor,
    Correction,
    Divergence,
    Estimator,
    Gate,
    Kl,
    Level,
    LossSettings,
    Ratio,
    TrustRegion,
)
from nanscope.objective.surrogates import Cispo, ClipCov, CrossEntropy, ImportanceSampling, KlCov, Ppo, Sapo

_VERSION = "0.3.0"
_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap", "seq_ratio_overflow")
_UTILS = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
_CORRECTION = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"

_ARGUMENTS = roles(
    log_probs="log_probs",
    old_log_probs="old_log_probs mu_log_probs",
    rollout_log_probs="rollout_logprobs",
    log_ratio="log_ratio log_importance_weights log_token_importance_weights negative_approx_kl abs_kl",
    ratio="ratio clamped_ratio calibrated_ratio prob_ratio",
    advantages="advantages",
    mask="loss_mask in_range",
    loss="loss surr1 surr2 pg_losses pg_losses1 pg_losses2 pg_losses3 clip_pg_losses1 clip_pg_losses2 pg_losses_kl pg_loss "
    "elementwise_loss",
)
_FUNCTIONS = {
    "ppo_policy_loss": "{policy_loss_type}",
    "sapo_policy_loss": "sapo",
    "gspo_policy_loss": "gspo",
    "compute_policy_loss_cispo": "cispo",
    "rollout_is_policy_loss": "rollout_is",
    "dppo_policy_loss": "dppo",
    "compute_policy_loss_clip_cov": "clip_cov",
    "compute_policy_loss_kl_cov": "kl_cov",
    "cross_entropy_loss": "cross_entropy",
    "importance_sampling_loss": "importance_sampling",
}

_BESIDE = (("rollout_log_probs", "rollout_logprobs"), ("old_log_probs", "old_log_probs"), ("mask", "loss_mask"))

# ppo_utils.py:1095; the last two are token means of one micro-batch and of one prompt, which is what a batch is here
_REDUCTION = {
    "token_mean": TOKEN_MEAN,
    "sequence_mean": ROW_MEANS,
    "seq_mean_token_sum_norm": ROW_SUMS,
    "token_mean_legacy": TOKEN_MEAN,
    "prompt_mean": TOKEN_MEAN,
}

_KL_MEAN = Reduction(Over.ROW_MEANS, mask=Masking.WHERE)
_KL = {
    "k1": Kl(1.0, Estimator.K1, reduction=_KL_MEAN),
    "k2": Kl(1.0, Estimator.K2, reduction=_KL_MEAN),
    "k3": Kl(1.0, Estimator.K3, clamp=SAFE, cap=Bounds(-10.0, 10.0), reduction=_KL_MEAN),
    "abs": Kl(1.0, Estimator.ABS, reduction=_KL_MEAN),
}

_SAFE = Ratio(clamp=SAFE)
_DIVERGENCE = {"binary_tv": Divergence.TV, "binary_kl": Divergence.BINARY_KL}


@dataclass(frozen=True, slots=True)
class SkyrlKlLoss:
    """The KL term of the worker, without coefficient: masked mean of each row, then mean."""

    kl_estimator_type: str = "k3"

    def settings(self) -> LossSettings:
        return LossSettings(surrogate=None, kl=pick("kl_estimator_type", self.kl_estimator_type, _KL))


@dataclass(frozen=True, slots=True)
class SkyrlPolicy:
    """`AlgorithmConfig`, nested options by their last name (`cispo.cispo_eps_clip_low`, `off_policy_correction.tis_ratio_type`).

    Off here and on in SkyRL's configuration: use_kl_loss, since the worker adds it to what a registered loss returns.
    """

    policy_loss_type: str = "regular"
    loss_reduction: str = "token_mean"
    max_seq_len: float | None = None
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    cispo_eps_clip_low: float = 0.0
    cispo_eps_clip_high: float = 5.0
    dppo_type: str = "binary_tv"
    delta_low: float = 0.2
    delta_high: float = 0.2
    clip_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_frac: float = 0.2
    ppo_kl_coef: float = 1.0
    tis_ratio_type: str | None = None
    token_tis_ratio_clip_high: float = 2.0
    sequence_tis_ratio_clip_high: float = 5.0
    sequence_mask_metric: str | None = None
    geo_mask_high: float = 1.01
    geo_mask_low: float = 0.99
    product_mask_high: float = 2.0
    product_mask_low: float = 0.5
    outlier_token_is_threshold_low: float | None = None
    outlier_token_is_threshold_high: float | None = None
    token_mask_is_threshold_low: float | None = None
    token_mask_is_threshold_high: float | None = None
    use_kl_loss: bool = False
    kl_estimator_type: str = "k3"
    kl_loss_coef: float = 0.001

    def settings(self) -> LossSettings:
        scale = pick("loss_reduction", self.loss_reduction, _REDUCTION)
        settings = pick("policy_loss_type", self.policy_loss_type, _LOSSES)(self)
        return replace(
            settings,
            correction=None if self.policy_loss_type in _UNCORRECTED else self.correction(),
            kl=replace(pick("kl_estimator_type", self.kl_estimator_type, _KL), coef=self.kl_loss_coef) if self.use_kl_loss else None,
            reduction=Reduction(Over.TOTAL),
            mask_advantages=Masking.MULTIPLY,  # as SkyRL's estimators return them
            scale_advantages=replace(scale, horizon=self.max_seq_len) if scale is ROW_SUMS else scale,
        )

    def correction(self) -> Correction | None:
        """Return weight and masks between trainer and rollout engine, off_policy_correction_utils.py."""
        gates = self.gates()
        if self.tis_ratio_type is None:
            return Correction(gates=gates, weigh=False) if gates else None
        levels = {
            "token": Correction(clamp=SAFE, bounds=Bounds(high=self.token_tis_ratio_clip_high)),
            "sequence": Correction(
                level=Level.SEQUENCE_SUM,
                mask_log_weight=Masking.MULTIPLY,
                clamp=SAFE,
                bounds=Bounds(high=self.sequence_tis_ratio_clip_high),
            ),
        }
        return replace(pick("tis_ratio_type", self.tis_ratio_type, levels), gates=gates)

    def gates(self) -> tuple[Gate, ...]:
        """Return what removes tokens and rows from the mask, in SkyRL's order. A NaN ratio fails the token band only."""
        gates: list[Gate] = []
        outlier = Bounds(self.outlier_token_is_threshold_low, self.outlier_token_is_threshold_high)
        band = Bounds(self.token_mask_is_threshold_low, self.token_mask_is_threshold_high)
        if outlier != OPEN:
            gates.append(Gate(outlier, clamp=SAFE, whole_row=True, nan_passes=True, from_mask=True))
        if band.low is not None and band.high is not None:
            gates.append(Gate(band, clamp=SAFE, from_mask=True))
        if self.sequence_mask_metric is not None:
            metrics = {
                "geometric": Gate(Bounds(self.geo_mask_low, self.geo_mask_high), level=Level.SEQUENCE_MEAN),
                "product": Gate(Bounds(self.product_mask_low, self.product_mask_high), level=Level.SEQUENCE_SUM),
            }
            row = pick("sequence_mask_metric", self.sequence_mask_metric, metrics)
            gates.append(replace(row, clamp=SAFE, nan_passes=True, from_mask=True))
        return tuple(gates)

    def band(self) -> Bounds:
        """Return the clip of the ratio."""
        return clip(self.eps_clip_low, self.eps_clip_high)


def _cispo(o: SkyrlPolicy) -> LossSettings:
    return LossSettings(Cispo(clip(o.cispo_eps_clip_low, o.cispo_eps_clip_high)), _SAFE)


def _dppo(o: SkyrlPolicy) -> LossSettings:
    region = TrustRegion(pick("dppo_type", o.dppo_type, _DIVERGENCE), o.delta_low, o.delta_high, nan_passes=True)
    return LossSettings(ImportanceSampling(), Ratio(against=Anchor.SAMPLER, clamp=SAFE), region)


def _clip_cov(o: SkyrlPolicy) -> LossSettings:
    return LossSettings(ClipCov(o.band(), o.clip_ratio, o.clip_cov_lb, o.clip_cov_ub, mean=Masking.MULTIPLY))


_GSPO = replace(PER_SEQUENCE, level=Level.SEQUENCE_TOKEN, clamp=Bounds(high=10.0))
_UNCORRECTED = ("clip_cov", "kl_cov", "importance_sampling", "cross_entropy")  # these do not call apply_off_policy_correction

_LOSSES: dict[str, Callable[[SkyrlPolicy], LossSettings]] = {
    "regular": lambda o: LossSettings(Ppo(o.band()), _SAFE),
    "dual_clip": lambda o: LossSettings(Ppo(o.band(), dual=o.clip_ratio_c), _SAFE),
    "sapo": lambda o: LossSettings(Sapo(o.tau_pos, o.tau_neg), _SAFE),
    "gspo": lambda o: LossSettings(Ppo(o.band()), _GSPO),
    "cispo": _cispo,
    "rollout_is": lambda o: LossSettings(Cispo(o.band(), drop=True), Ratio(against=Anchor.ROLLOUT, clamp=SAFE)),
    "dppo": _dppo,
    "clip_cov": _clip_cov,
    "kl_cov": lambda o: LossSettings(KlCov(o.kl_cov_frac, o.ppo_kl_coef)),
    "importance_sampling": lambda o: LossSettings(ImportanceSampling()),
    "cross_entropy": lambda o: LossSettings(CrossEntropy()),
}

_LINES = {
    "regular": 554, "dual_clip": 554, "sapo": 589, "gspo": 662, "cispo": 731, "rollout_is": 767, "dppo": 809,
    "clip_cov": 881, "kl_cov": 944, "importance_sampling": 1038, "cross_entropy": 999,
}  # fmt: skip
_FLAWS = {
    "clip_cov": ("the covariance is of scaled advantages: its bounds 1 and 5 are reached 1/scale times later than in verl",),
    "kl_cov": ("the penalty |Δ| is not scaled by the reduction: ppo_kl_coef acts N times as strongly as in verl",),
    "cross_entropy": ("no advantages, no scale: a sum over tokens whatever loss_reduction says",),
}
_BY_ROW: tuple[Settings, ...] = ({"loss_reduction": "sequence_mean"},)
_WALKED: dict[str, tuple[Settings, ...]] = {
    "regular": (
        *_BY_ROW,
        {"loss_reduction": "seq_mean_token_sum_norm"},
        {"tis_ratio_type": "token"},
        {"tis_ratio_type": "sequence"},
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.5, "geo_mask_high": 2.0},
        {"sequence_mask_metric": "product"},
        {"outlier_token_is_threshold_high": 100.0},
        {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0},
        {"use_kl_loss": True},
    ),
    **dict.fromkeys(("gspo", "sapo"), _BY_ROW),
    "dppo": ({"dppo_type": "binary_kl"},),
}


FRAMEWORK = Framework(
    name="SkyRL",
    package="skyrl",
    version=_VERSION,
    files=("skyrl/backends/skyrl_train/",),
    options=("skyrl/train/config/config.py",),
    remedies=(
        Remedy(
            _EXP,
            "regular and dual_clip clamp the log-ratio to ±20 before exp; clip_cov, kl_cov and importance_sampling do not",
            "trainer.algorithm.policy_loss_type=regular",
            Term.RATIO,
        ),
        Remedy(
            (*_EXP, "nan_times_zero_mask"),
            "k3 clamps its log-ratio to ±20 before exp; k1, k2 and abs are open",
            "trainer.algorithm.kl_estimator_type=k3",
            Term.KL,
            unless=(("use_kl_loss", False),),
        ),
        Remedy(
            ("inf_times_zero_coef", "zero_div_zero", "std_single"),
            "masks prompts whose rewards are all alike",
            "trainer.algorithm.zero_variance_filter=true",
        ),
        Remedy(
            ("zero_div_zero", "cancellation_spike"),
            "leaves the division by a group's deviation out",
            "trainer.algorithm.grpo_norm_by_std=false",
            Term.ADVANTAGES,
        ),
        Remedy(
            ("bad_input", "exp_overflow", "nan_times_zero_mask"),
            "masks tokens that trainer and rollout engine disagree on, NaN among them",
            "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high=5.0",
            Term.ROLLOUT,
        ),
        Remedy(
            ("std_single", "zero_div_zero", "empty_mask_mean"),
            "no second normalisation after that of the estimator",
            "trainer.algorithm.advantage_batch_normalize=false",
            Term.ADVANTAGES,
        ),
    ),
    guards=("the FSDP strategy skips the optimizer step when grad_norm is not finite; a NaN loss with finite gradients passes",),
    sites=(
        LossSite(
            "skyrl/backends/skyrl_train/workers/worker.py",
            "PolicyWorkerBase._forward_backward_micro",
            roles(
                log_probs="action_log_probs",
                old_log_probs="old_action_log_probs",
                ref_log_probs="base_action_log_probs",
                rollout_log_probs="rollout_action_logprobs",
                advantages="advantages",
                mask="loss_mask action_mask",
                entropy="entropy_BS entropy entropy_loss_term",
                kl="kl_loss kl_loss_term",
                loss="policy_loss loss unscaled_loss",
            ),
            "skyrl.{policy_loss_type}",
            ("loss_config", "self.cfg.algorithm"),
        ),
        *(
            LossSite(_UTILS, function, _ARGUMENTS, f"skyrl.{kind}", ("config",), fixed=(("use_kl_loss", False),), beside=_BESIDE)
            for function, kind in _FUNCTIONS.items()
        ),
        LossSite(_UTILS, "sapo_policy_loss.<locals>.gate_function", roles(ratio="x")),
        LossSite(
            _UTILS,
            "compute_approx_kl",
            roles(log_probs="log_probs", ref_log_probs="log_probs_base", mask="loss_mask", log_ratio="kl", kl="ratio kld"),
        ),
        LossSite(_UTILS, "reduce_loss", roles(loss="loss", mask="loss_mask")),
        LossSite(
            _CORRECTION,
            "compute_tis_ratio",
            roles(
                old_log_probs="old_log_probs",
                rollout_log_probs="rollout_logprobs",
                mask="loss_mask",
                log_ratio="token_tis_log_ratio seq_tis_log_ratio",
                is_weight="token_tis_ratio seq_tis_ratio",
            ),
        ),
        LossSite(
            _CORRECTION,
            "apply_off_policy_correction",
            roles(
                loss="loss", old_log_probs="old_log_probs", rollout_log_probs="rollout_logprobs", mask="loss_mask", is_weight="tis_ratio"
            ),
        ),
        LossSite("skyrl/backends/skyrl_train/utils/torch_utils.py", "safe_exp_delta", roles(log_ratio="delta y")),
    ),
    losses=(
        *(
            Loss(
                f"skyrl.{kind}",
                SkyrlPolicy,
                f"{_UTILS}:{line}",
                _VERSION,
                (("policy_loss_type", kind),),
                _FLAWS.get(kind, ()),
                _WALKED.get(kind, ()),
            )
            for kind, line in _LINES.items()
        ),
        Loss(
            "skyrl.kl_loss",
            SkyrlKlLoss,
            f"{_UTILS}:88",
            _VERSION,
            walked=tuple({"kl_estimator_type": kind} for kind in ("k1", "abs", "k2")),
        ),
    ),
)
