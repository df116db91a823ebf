"""verl 0.9.1, `trainer/ppo/core_algos.py`: a registry of policy losses, one aggregation, and the site that adds entropy and KL.

Notable: Δ is clamped to ±20 before exp in most modes, and not in clip_cov, kl_cov and geo_mean. The token modes of the aggregation
replace masked values (`where`), the sequence modes multiply them. No denominator has a floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanscope.errors import NanscopeError
from nanscope.frameworks.options import ROW_VALUES, Loss, clip, pick
from nanscope.objective.bounds import SAFE, Bounds
from nanscope.objective.reduction import Guard, Masking, Over, Reduction
from nanscope.objective.settings import (
    PER_SEQUENCE,
    Correction,
    Divergence,
    Entropy,
    Estimator,
    Kl,
    Level,
    LossSettings,
    Ratio,
    TrustRegion,
)
from nanscope.objective.surrogates import Cispo, ClipCov, Dro, ImportanceSampling, KlCov, Ppo, Reinforce, Sapo

_ROWS = Reduction(Over.ROW_SUMS, empty=Masking.WHERE, guard=Guard.RAW, row_guard=Guard.EPSILON)

# core_algos.py:1140. A horizon of None is the width of the batch.
_AGGREGATION = {
    "token-mean": Reduction(Over.TOKENS, mask=Masking.WHERE, guard=Guard.RAW),
    "token-sum": Reduction(Over.TOTAL, mask=Masking.WHERE),
    "seq-mean-token-sum": _ROWS,
    "seq-mean-token-sum-norm": replace(_ROWS, horizon=None),
    "seq-mean-token-mean": replace(_ROWS, over=Over.ROW_MEANS),
}

# core_algos.py:2188-2245: value of the estimator; with a plus, the gradient of k2, which no clamp touches
_K3 = Kl(1.0, Estimator.K3, clamp=SAFE, cap=Bounds(-10.0, 10.0))
_KL = {
    **dict.fromkeys(("k1", "kl"), Kl(1.0, Estimator.K1)),
    **dict.fromkeys(("k2", "mse"), Kl(1.0, Estimator.K2)),
    **dict.fromkeys(("k3", "low_var_kl"), _K3),
    "abs": Kl(1.0, Estimator.ABS),
}
_KL_LOSSES = _KL | {f"{name}+": replace(kl, straight_through=True) for name, kl in _KL.items()}


@dataclass(frozen=True, slots=True)
class Aggregation:
    """What `agg_loss` reads: the mode, and the counts over all ranks and micro-batches; None counts what is here."""

    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    dp_size: int = 1
    batch_num_tokens: float | None = None
    global_batch_size: float | None = None


def _aggregation(o: Aggregation, mode: str) -> Reduction:
    how = pick("loss_agg_mode", mode, _AGGREGATION)
    horizon = o.loss_scale_factor if how.horizon is None else how.horizon
    return replace(how, count=o.batch_num_tokens if how.over is Over.TOKENS else o.global_batch_size, horizon=horizon, factor=o.dp_size)


@dataclass(frozen=True, slots=True)
class KlLoss(Aggregation):
    """`agg_loss(kl_penalty(…))`, without coefficient."""

    kl_loss_type: str = "low_var_kl"

    def settings(self) -> LossSettings:
        kl = pick("kl_loss_type", self.kl_loss_type, _KL_LOSSES)
        return LossSettings(surrogate=None, kl=kl, reduction=_aggregation(self, self.loss_agg_mode))


@dataclass(frozen=True, slots=True)
class Policy(Aggregation):
    """`ActorConfig` with its `PolicyLossConfig`, and `algorithm.rollout_correction`.

    clip_ratio_low, clip_ratio_high: clip_ratio counts only where these are None. rollout_is: token or sequence.
    rollout_is_threshold: an upper bound, or "low_high"; verl itself stops with ZeroDivisionError if no weight lies between the two.
    """

    loss_mode: str = "vanilla"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = 0.2
    clip_ratio_high: float | None = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None
    rollout_is: str | None = None
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False

    def settings(self) -> LossSettings:
        return _policy(self)


@dataclass(frozen=True, slots=True)
class PpoLoss(Policy):
    """`workers.utils.losses.ppo_loss`: the policy loss, and what it adds. The entropy term is there whenever the batch has an entropy."""

    use_kl_loss: bool = False
    kl_loss_type: str = "low_var_kl"
    kl_loss_coef: float = 0.001
    entropy_coeff: float = 0.0

    def settings(self) -> LossSettings:
        policy = _policy(self)
        added = _aggregation(self, self.loss_agg_mode)
        kl = replace(pick("kl_loss_type", self.kl_loss_type, _KL_LOSSES), coef=self.kl_loss_coef, reduction=added)
        return replace(
            policy,
            kl=kl if self.use_kl_loss else None,
            entropy=Entropy(self.entropy_coeff, added, required=self.entropy_coeff != 0),
            mask_advantages=Masking.MULTIPLY,  # as verl's estimators return them
        )


_SAFE = Ratio(clamp=SAFE)
_GSPO = replace(PER_SEQUENCE, level=Level.SEQUENCE_TOKEN, clamp=Bounds(high=10.0))


def _policy(o: Policy) -> LossSettings:
    low = o.clip_ratio if o.clip_ratio_low is None else o.clip_ratio_low
    high = o.clip_ratio if o.clip_ratio_high is None else o.clip_ratio_high
    band = clip(low, high)
    truncated = Cispo(Bounds(high=o.clip_ratio_c))
    modes: dict[str, Callable[[], LossSettings]] = {
        "vanilla": lambda: LossSettings(Ppo(band, dual=o.clip_ratio_c), _SAFE),
        "dppo_tv": lambda: LossSettings(truncated, _SAFE, TrustRegion(Divergence.TV, low, high)),
        "dppo_kl": lambda: LossSettings(truncated, _SAFE, TrustRegion(Divergence.BINARY_KL, low, high)),
        "gspo": lambda: LossSettings(Ppo(band), _GSPO),
        "sapo": lambda: LossSettings(Sapo(o.tau_pos, o.tau_neg), _SAFE),
        "gpg": lambda: LossSettings(Reinforce()),
        "clip_cov": lambda: LossSettings(ClipCov(band, o.clip_cov_ratio, o.clip_cov_lb, o.clip_cov_ub)),
        "kl_cov": lambda: LossSettings(KlCov(o.kl_cov_ratio, o.ppo_kl_coef)),
        "geo_mean": lambda: _geo_mean(low, high),
        "dro": lambda: LossSettings(Dro(_positive(o.dro_beta))),
        "cispo": lambda: LossSettings(Cispo(band), _SAFE),
    }
    settings = pick("loss_mode", o.loss_mode, modes)()
    if o.loss_mode == "geo_mean":
        if o.rollout_is is not None:
            raise NanscopeError("geo_mean with rollout_is is not written down here: leave rollout_is out", slug="unknown-setting-value")
        return settings
    mode = "seq-mean-token-mean" if o.loss_mode == "sapo" else o.loss_agg_mode
    return replace(settings, reduction=_aggregation(o, mode), correction=_correction(o))


def _geo_mean(low: float, high: float) -> LossSettings:
    """core_algos.py:1928: one ratio and one advantage per row, and a plain mean over rows."""
    ratio = replace(PER_SEQUENCE, log_clip=Bounds(-low, high), signed=True, guard=Guard.EPSILON)
    return LossSettings(ImportanceSampling(), ratio, reduction=ROW_VALUES, mean_advantages=Guard.EPSILON)


def _positive(beta: float | None) -> float:
    if beta is None or beta <= 0:
        raise NanscopeError(f"loss_mode='dro' needs a positive dro_beta, not {beta}", slug="unknown-setting-value")
    return beta


def _correction(o: Policy) -> Correction | None:
    """rollout_corr_helper.py:522: exp of the clamped log-weight, 0 where masked, truncated or (with two bounds) dropped."""
    if o.rollout_is is None:
        return None
    levels = {"token": (Level.TOKEN, Masking.NONE), "sequence": (Level.SEQUENCE_SUM, Masking.WHERE)}
    level, masking = pick("rollout_is", o.rollout_is, levels)
    ends = [float(end) for end in str(o.rollout_is_threshold).split("_")]
    return Correction(
        level=level,
        mask_log_weight=masking,
        clamp=SAFE,
        mask_weight=True,
        bounds=Bounds(ends[0] if len(ends) == 2 else None, ends[-1]),
        drop=len(ends) == 2,
        normalise=o.rollout_is_batch_normalize,
    )


_FILE = "verl/trainer/ppo/core_algos.py"
_LEFT = "a masked NaN is selected away in the loss and leaves a NaN gradient"
_GEO = "loss_agg_mode, the global counts and dp_size are not read: a plain mean over the rows of a micro-batch"
_ENTROPY = "the entropy term is formed at entropy_coeff=0 as well: 0 · NaN is NaN"

ROWS = (
    Loss("verl.vanilla", Policy, f"{_FILE}:1285", "0.9.1", (("loss_mode", "vanilla"),)),
    Loss("verl.dppo_tv", Policy, f"{_FILE}:1379", "0.9.1", (("loss_mode", "dppo_tv"),), (_LEFT,)),
    Loss("verl.dppo_kl", Policy, f"{_FILE}:1460", "0.9.1", (("loss_mode", "dppo_kl"),), (_LEFT,)),
    Loss("verl.gspo", Policy, f"{_FILE}:1545", "0.9.1", (("loss_mode", "gspo"),)),
    Loss(
        "verl.sapo", Policy, f"{_FILE}:1622", "0.9.1", (("loss_mode", "sapo"),), ("loss_agg_mode is not read: always seq-mean-token-mean",)
    ),
    Loss("verl.gpg", Policy, f"{_FILE}:1707", "0.9.1", (("loss_mode", "gpg"),)),
    Loss("verl.clip_cov", Policy, f"{_FILE}:1743", "0.9.1", (("loss_mode", "clip_cov"),), ("the ratio has no clamp before exp",)),
    Loss("verl.kl_cov", Policy, f"{_FILE}:1848", "0.9.1", (("loss_mode", "kl_cov"),), ("the ratio has no clamp before exp",)),
    Loss("verl.geo_mean", Policy, f"{_FILE}:1928", "0.9.1", (("loss_mode", "geo_mean"),), (_GEO,)),
    Loss("verl.dro", Policy, f"{_FILE}:2014", "0.9.1", (("loss_mode", "dro"),), (_LEFT,)),
    Loss("verl.cispo", Policy, f"{_FILE}:2047", "0.9.1", (("loss_mode", "cispo"),), (_LEFT,)),
    Loss("verl.kl_loss", KlLoss, f"{_FILE}:2188", "0.9.1"),
    Loss("verl.ppo_loss", PpoLoss, "verl/workers/utils/losses.py:57", "0.9.1", flaws=(_ENTROPY,)),
)
