"""verl: rows checked against verl 0.9.1 (`workers/utils/losses.py`, `trainer/ppo/core_algos.py`).

Notable: the losses are ordinary functions in a registry, called by `ppo_loss`, which adds entropy and KL. They run in a Ray worker.
Δ is clamped to ±20 before exp in most modes, and not in clip_cov, kl_cov and geo_mean. The token modes of the aggregation replace masked
values (`where`), the sequence modes multiply them. No denominator has a floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanscope.errors import NanscopeError
from nanscope.frameworks.rows import ROW_VALUES, Folk, Framework, Loss, LossSite, Remedy, Settings, Term, Tries, clip, pick, roles
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

_EXP = ("exp_overflow", "inf_times_zero_mask", "inf_times_zero_coef", "where_grad_trap", "seq_ratio_overflow")
_VERSION = "0.9.1"
_SITE = "verl/workers/utils/losses.py"
_ALGOS = "verl/trainer/ppo/core_algos.py"

_ARGUMENTS = roles(
    log_probs="log_prob",
    old_log_probs="old_log_prob",
    advantages="advantages advantage",
    mask="response_mask valid_mask valid_positive_mask valid_negative_mask",
    is_weight="rollout_is_weights seq_is_weights",
    log_ratio="negative_approx_kl negative_approx_kl_seq log_seq_importance_ratio negative_approx_kl_clamp negative_approx_kl_min "
    "log_ratio ppo_kl abs_kl",
    ratio="ratio seq_importance_ratio truncated_ratio clipped_ratio clipped_ratio_sg",
    loss="pg_losses pg_losses1 pg_losses2 pg_losses3 clip_pg_losses1 clip_pg_losses2 pg_losses_kl pg_loss",
)
_CORRECTION = "config.policy_loss.rollout_correction"
_LIVE = (
    ("loss_agg_mode", "loss_agg_mode"),
    ("rollout_is", f"rollout_is_weights?{_CORRECTION}.rollout_is"),
    ("rollout_is_threshold", f"rollout_is_weights?{_CORRECTION}.rollout_is_threshold"),
)

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
class VerlAggregation:
    """What `agg_loss` reads: the mode, and the counts over all ranks and micro-batches; None counts what is here."""

    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    dp_size: int = 1
    batch_num_tokens: float | None = None
    global_batch_size: float | None = None


def _aggregation(o: VerlAggregation, mode: str) -> Reduction:
    how = pick("loss_agg_mode", mode, _AGGREGATION)
    horizon = o.loss_scale_factor if how.horizon is None else how.horizon
    return replace(how, count=o.batch_num_tokens if how.over is Over.TOKENS else o.global_batch_size, horizon=horizon, factor=o.dp_size)


@dataclass(frozen=True, slots=True)
class VerlKlLoss(VerlAggregation):
    """`agg_loss(kl_penalty(…))`, without coefficient."""

    kl_loss_type: str = "low_var_kl"

    def settings(self) -> LossSettings:
        kl = pick("kl_loss_type", self.kl_loss_type, _KL_LOSSES)
        return LossSettings(surrogate=None, kl=kl, reduction=_aggregation(self, self.loss_agg_mode))


@dataclass(frozen=True, slots=True)
class VerlPolicy(VerlAggregation):
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
class PpoLoss(VerlPolicy):
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


def _policy(o: VerlPolicy) -> LossSettings:
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


def _correction(o: VerlPolicy) -> Correction | None:
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


_LEFT = "a masked NaN is selected away in the loss and leaves a NaN gradient"
_GEO = "loss_agg_mode, the global counts and dp_size are not read: a plain mean over the rows of a micro-batch"
_BARE = "the ratio has no clamp before exp"
_ENTROPY = "the entropy term is formed at entropy_coeff=0 as well: 0 · NaN is NaN"

_LINES = {
    "vanilla": 1285, "dppo_tv": 1379, "dppo_kl": 1460, "gspo": 1545, "sapo": 1622, "gpg": 1707, "clip_cov": 1743, "kl_cov": 1848,
    "geo_mean": 1928, "dro": 2014, "cispo": 2047,
}  # fmt: skip
_FLAWS = {
    **dict.fromkeys(("dppo_tv", "dppo_kl", "dro", "cispo"), (_LEFT,)),
    **dict.fromkeys(("clip_cov", "kl_cov"), (_BARE,)),
    "sapo": ("loss_agg_mode is not read: always seq-mean-token-mean",),
    "geo_mean": (_GEO,),
}
_SEQUENCES: Settings = {"loss_agg_mode": "seq-mean-token-mean"}
_WALKED: dict[str, tuple[Settings, ...]] = {
    "vanilla": (
        *({"loss_agg_mode": mode} for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")),
        {"rollout_is": "token"},
        {"rollout_is": "sequence"},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
    ),
    **dict.fromkeys(("gspo", "cispo", "dppo_tv", "clip_cov", "kl_cov"), (_SEQUENCES,)),
}
_LOSSES = (
    *(
        Loss(
            f"verl.{mode}",
            VerlPolicy,
            f"{_ALGOS}:{line}",
            _VERSION,
            (("loss_mode", mode),),
            _FLAWS.get(mode, ()),
            _WALKED.get(mode, ()),
            (("dro_beta", 0.1),) if mode == "dro" else (),
        )
        for mode, line in _LINES.items()
    ),
    Loss(
        "verl.kl_loss",
        VerlKlLoss,
        f"{_ALGOS}:2188",
        _VERSION,
        walked=(*({"kl_loss_type": kind} for kind in ("k1", "abs", "k2", "k1+", "k2+", "k3+")), _SEQUENCES),
    ),
    Loss(
        "verl.ppo_loss",
        PpoLoss,
        f"{_SITE}:57",
        _VERSION,
        flaws=(_ENTROPY,),
        walked=({"use_kl_loss": True}, {"use_kl_loss": True, **_SEQUENCES}, {"entropy_coeff": 0.01}),
    ),
)


FRAMEWORK = Framework(
    name="verl",
    package="verl",
    version=_VERSION,
    files=("verl/trainer/", "verl/workers/"),
    options=(
        "verl/workers/config/actor.py",
        "verl/trainer/config/algorithm.py",
        "verl/workers/config/rollout.py",
        "verl/utils/torch_functional.py",
        "verl/trainer/config/actor/actor.yaml",
        "verl/utils/kernel/kernels.py",
    ),
    remedies=(
        Remedy(
            _EXP,
            "vanilla clamps the log-ratio to ±20 before exp; clip_cov, kl_cov and geo_mean do not",
            "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
            Term.RATIO,
        ),
        Remedy(
            (*_EXP, "nan_times_zero_mask", "inf_minus_inf"),
            "low_var_kl clamps its log-ratio to ±20 before exp; k2 and the types with a plus are open",
            "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
            Term.KL,
            unless=(("use_kl_loss", False),),
        ),
        Remedy(
            ("nan_times_zero_mask", "inf_times_zero_mask"),
            "token-mean selects the tokens that count; the sequence modes multiply by the mask, and 0 · NaN is NaN",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        ),
        Remedy(
            ("empty_mask_mean", "zero_div_zero", "zero_denominator"),
            "sums have no denominator that a fully masked batch makes 0",
            "actor_rollout_ref.actor.loss_agg_mode=token-sum",
        ),
        Remedy(
            ("plogp_zero", "inf_times_zero_coef", "nan_times_zero_mask"),
            "leaves the entropy out; at entropy_coeff=0 it is still formed, and 0 · NaN is NaN",
            "actor_rollout_ref.actor.calculate_entropy=False",
            Term.ENTROPY,
        ),
        Remedy(
            ("bad_input", "exp_overflow"),
            "rejects tokens that trainer and rollout engine disagree on, before they are weighed",
            "algorithm.rollout_correction.rollout_rs=token_k1",
            Term.ROLLOUT,
        ),
        Remedy(
            ("zero_div_zero", "inf_times_zero_coef", "cancellation_spike"),
            "leaves the division by a group's deviation out",
            "algorithm.norm_adv_by_std_in_grpo=False",
            Term.ADVANTAGES,
        ),
    ),
    guards=("the FSDP engines skip the optimizer step when grad_norm is not finite; a NaN loss with finite gradients passes",),
    sites=(
        LossSite(
            _SITE,
            "ppo_loss",
            roles(
                log_probs="log_prob log_probs",
                old_log_probs="old_log_prob old_log_probs",
                ref_log_probs="ref_log_prob",
                advantages="advantages",
                mask="response_mask",
                entropy="entropy",
                kl="kld",
                is_weight="rollout_is_weights",
                loss="pg_loss kl_loss entropy_loss policy_loss",
            ),
            "verl.ppo_loss",
            ("config",),
            tuple((name, f"data.{path}") for name, path in _LIVE[1:]),
        ),
        *(LossSite(_ALGOS, f"compute_policy_loss_{mode}", _ARGUMENTS, f"verl.{mode}", ("config",), _LIVE) for mode in _LINES),
        LossSite(
            _ALGOS,
            "compute_policy_loss_reinforce",
            roles(
                log_probs="log_prob",
                rollout_log_probs="rollout_log_prob",
                advantages="advantages",
                mask="response_mask",
                is_weight="rollout_is_weights",
                log_ratio="negative_approx_kl",
                kl="kl_divergence",
                loss="pg_losses pg_loss",
            ),
        ),
        LossSite(
            "verl/workers/utils/padding.py",
            "no_padding_2_padding",  # `ppo_loss` calls it before it selects what it reads of the batch
            (),
            beside=(
                ("rollout_log_probs", "data.rollout_log_probs"),
                ("old_log_probs", "data.old_log_probs"),
                ("mask", "data.response_mask"),
            ),
        ),
        LossSite(_SITE, "value_loss", roles(mask="response_mask", loss="vf_loss")),
        LossSite(_ALGOS, "compute_value_loss", roles(mask="response_mask", loss="vf_losses1 vf_losses2 clipped_vf_losses vf_loss")),
        LossSite(_ALGOS, "compute_policy_loss_sapo.<locals>.gate_function", roles(ratio="x")),
        LossSite(_ALGOS, "kl_penalty", roles(log_probs="logprob", ref_log_probs="ref_logprob", kl="forward_score backward_score")),
        LossSite(_ALGOS, "kl_penalty_forward", roles(log_probs="logprob", ref_log_probs="ref_logprob", log_ratio="kl", kl="ratio kld")),
        LossSite(_ALGOS, "agg_loss", roles(loss="loss_mat seq_losses loss", mask="loss_mask seq_mask")),
        LossSite("verl/utils/torch_functional.py", "masked_sum", roles(mask="mask")),
        LossSite("verl/utils/torch_functional.py", "masked_mean", roles(mask="mask")),
    ),
    losses=_LOSSES,
    folk=(  # as the threads on a model that prints "!!!!!" have it: token 0, which a NaN distribution decodes to
        Folk("actor.use_kl_loss=False", "use_kl_loss", Tries.LEAVES_OUT, False),
        Folk("a tenth of actor.kl_loss_coef", "kl_loss_coef", Tries.SCALES, 0.1),
        Folk("actor.kl_loss_coef=0", "kl_loss_coef", Tries.SCALES, 0.0, "0 still multiplies: 0 · NaN is NaN"),
        Folk("actor.kl_loss_type=low_var_kl", "kl_loss_type", Tries.CHOOSES, "low_var_kl"),
        Folk("algorithm.kl_ctrl.kl_coef=0", "kl_coef", Tries.NOTHING, 0.0, "the loss does not read it: it weighs the KL in the reward"),
    ),
)
