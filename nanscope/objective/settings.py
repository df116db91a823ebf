"""The vocabulary of a loss: what it reads, how its ratio is made, its trust region, its correction, its KL, its entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.given import check_fields, refused
from nanscope.objective.bounds import OPEN, Bounds
from nanscope.objective.reduction import Guard, Masking, Reduction
from nanscope.objective.surrogates import Ppo, Surrogate


def with_token_values(inputs: LossInputs, change: Callable[[Tensor], Tensor]) -> LossInputs:
    """Return the batch with every log-prob and the entropy changed; what is not there stays away."""
    names = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy")
    given = {name: tensor for name in names if (tensor := getattr(inputs, name)) is not None}
    return replace(inputs, **{name: change(tensor) for name, tensor in given.items()})


def on_leaf(inputs: LossInputs, dtype: torch.dtype | None = None) -> LossInputs:
    """Return a copy of the batch, with log-probs that collect a gradient, in another dtype if one is given."""

    def cast(tensor: Tensor) -> Tensor:
        return (tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)).detach().clone()

    copied = with_token_values(inputs, cast)
    return replace(copied, log_probs=copied.log_probs.requires_grad_(), advantages=cast(inputs.advantages), mask=cast(inputs.mask))


class Anchor(StrEnum):
    """The policy that a log-ratio is taken against."""

    OLD = "old"
    ROLLOUT = "rollout"
    REF = "ref"
    SELF = "self"  # sg ℓ: the ratio is 1, its gradient is that of ℓ
    SAMPLER = "sampler"  # the rollout engine if it reported, else old


class Level(StrEnum):
    """What shares one importance ratio. Values are exponents: exp follows."""

    TOKEN = "token"  # Δ
    SEQUENCE_MEAN = "sequence_mean"  # Σ Δm / Σ m, [B, 1]: GSPO, arXiv 2507.18071 eq. 7
    SEQUENCE_TOKEN = "sequence_token"  # ℓ − sg ℓ + sg of that mean: GSPO-token, eq. 14
    SEQUENCE_SUM = "sequence_sum"  # Σ Δm, [B, 1]
    SEQUENCE_LOG_PROBS = "sequence_log_probs"  # Σ ℓm − Σ ℓ_old m, [B, 1]: RLOO, arXiv 2402.14740; rounds as two sums of a whole row do


_FORMERLY = {f"{whose}logprobs": f"{whose}log_probs" for whose in ("", "old_", "ref_", "rollout_")}


class _Spelled(type):
    """Takes the fields of a batch under their former names, too; the former name wins, so that `dataclasses.replace` knows it."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        former = {_FORMERLY[name]: named.pop(name) for name in _FORMERLY if name in named}
        return super().__call__(*args, **named | former)


@dataclass(frozen=True, slots=True)
class LossInputs(metaclass=_Spelled):
    """One batch as the loss receives it, its fields named as roles. Only `log_probs` carries a gradient.

    log_probs:     [B, T], of the sampled tokens, as all log-probs here.
    old_log_probs: None is sg ℓ, as on the first update after sampling.
    advantages:    [B, T] or [B].
    mask:          [B, T], true or 1 where the loss counts a token.
    entropy:       [B, T], where the entropy enters the loss.
    Raises NanscopeError for what is no tensor, and for shapes that do not fit.
    """

    log_probs: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    advantages: Tensor
    mask: Tensor
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        for name in LossInputs.__slots__:
            given, needed = getattr(self, name), name in ("log_probs", "advantages", "mask")
            if not isinstance(given, Tensor) and (needed or given is not None):
                raise refused(f"LossInputs({name}=…)", "a tensor" if needed else "a tensor or None", given)
        _check_shapes(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor | None:
            if name not in _FORMERLY:
                raise AttributeError(f"a batch has no {name!r}")
            return getattr(self, _FORMERLY[name])


def _check_shapes(inputs: LossInputs) -> None:
    if not inputs.log_probs.is_floating_point():
        raise NanscopeError(f"log_probs are {inputs.log_probs.dtype}: they are floating-point numbers", slug="bad-argument")
    shape = inputs.log_probs.shape
    if len(shape) != 2:
        raise NanscopeError(f"log_probs is {tuple(shape)}: a batch is [B, T], rows by response tokens", slug="shape-mismatch")
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "mask", "entropy", "advantages"):
        tensor: Tensor | None = getattr(inputs, name)
        fits = tensor is None or tensor.shape == shape or (name == "advantages" and tensor.shape in (shape[:1], (shape[0], 1)))
        if tensor is not None and not fits:
            raise NanscopeError(
                f"{name} is {tuple(tensor.shape)} and log_probs is {tuple(shape)}: they must be alike", slug="shape-mismatch"
            )


@dataclass(frozen=True, slots=True)
class Ratio:
    """r = mask_ratio( exp( clamp( level( mask_log_ratio( ℓ − anchor ) ) ) ) ), in this order.

    guard: of the token count in a row mean. log_clip: GMPO's one-sided clip of Δ before the mean, in nat (arXiv 2507.20673 eq. 4).
    signed: the side is chosen by multiplying with the sign of A, as in the paper; otherwise A ≤ 0 clips from below.
    """

    against: Anchor = Anchor.OLD
    level: Level = Level.TOKEN
    mask_log_ratio: Masking = Masking.NONE
    log_clip: Bounds | None = None
    signed: bool = False
    guard: Guard = Guard.FLOOR
    clamp: Bounds = OPEN
    clamp_after: bool = False
    mask_ratio: Masking = Masking.NONE

    def __post_init__(self) -> None:
        check_fields(self)


PER_SEQUENCE = Ratio(level=Level.SEQUENCE_MEAN, mask_log_ratio=Masking.MULTIPLY)


class Divergence(StrEnum):
    """How far two policies are apart at the sampled token, seen as a choice between it and the rest."""

    TV = "tv"  # p − q: its sign is kept
    BINARY_KL = "binary_kl"


@dataclass(frozen=True, slots=True)
class TrustRegion:
    """DPPO: a token counts until its probability has moved too far in the direction that A pushes it, arXiv 2602.04879 eq. 13, 14.

    low, high: of the divergence, where A ≤ 0 and where A > 0. nan_passes: a NaN divergence is taken for inside.
    """

    divergence: Divergence = Divergence.TV
    low: float = 0.2
    high: float = 0.2
    nan_passes: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def holds(self, log_probs_BT: Tensor, old_BT: Tensor, advantages: Tensor) -> Tensor:
        """Return 1 where the token counts, else 0."""
        p, q = log_probs_BT.detach().exp(), old_BT.exp()
        if self.divergence is Divergence.TV:
            apart = p - q
            rising, falling = apart <= self.high, apart >= -self.low
        else:
            apart = q * (old_BT - log_probs_BT.detach()) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
            rising, falling = (apart <= self.high) | (p <= q), (apart <= self.low) | (p >= q)
        inside = torch.where(advantages > 0, rising, falling)
        return (inside | apart.isnan() if self.nan_passes else inside).to(log_probs_BT.dtype)


class Statistic(StrEnum):
    """What a gate looks at, between the trainer's old policy and the one that sampled."""

    RATIO = "ratio"  # exp of the level of δ
    BINARY_KL = "binary_kl"
    TV = "tv"


@dataclass(frozen=True, slots=True)
class Gate:
    """Drops tokens or rows whose statistic leaves the bounds.

    level: TOKEN, or SEQUENCE_MEAN and SEQUENCE_SUM for rows. whole_row: one token outside drops its row.
    nan_passes: a NaN statistic is taken for inside. from_mask: the mask loses them; otherwise the weight is 0 there.
    """

    bounds: Bounds
    statistic: Statistic = Statistic.RATIO
    level: Level = Level.TOKEN
    clamp: Bounds = OPEN
    guard: Guard = Guard.FLOOR
    finite_first: bool = False
    whole_row: bool = False
    nan_passes: bool = False
    from_mask: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Correction:
    """w = exp δ, δ = ℓ_against − ℓ_rollout: the weight between trainer and rollout engine.

    bounds: w is truncated there (TIS), or with drop 0 outside of them (IcePop, MIS). normalise: to mean 1 over tokens or rows.
    unscored: NaN in δ·m is taken for 0, a weight of 1. finite: a weight that is not finite becomes 0.
    weigh: False leaves the gates only.
    """

    against: Anchor = Anchor.OLD
    level: Level = Level.TOKEN
    mask_log_weight: Masking = Masking.NONE
    unscored: bool = False
    clamp: Bounds = OPEN
    finite: bool = False
    mask_weight: bool = False
    bounds: Bounds = OPEN
    drop: bool = False
    normalise: bool = False
    gates: tuple[Gate, ...] = ()
    weigh: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


class Estimator(StrEnum):
    """Of KL(π, π_ref) from one sample, with d = ℓ_ref − ℓ: J. Schulman, Approximating KL divergence, 2020."""

    K1 = "k1"  # −d
    K2 = "k2"  # d² / 2
    K3 = "k3"  # e^d − d − 1
    ABS = "abs"  # |d|


class KlWeight(StrEnum):
    """What multiplies the estimate, with its gradient."""

    NONE = "none"
    RATIO = "ratio"  # r of the policy term: DeepSeek-V3.2, arXiv 2512.02556 eq. 7
    SELF = "self"  # exp(ℓ − sg ℓ): 1, with the score function as gradient, arXiv 2506.09477
    ROLLOUT = "rollout"  # exp(ℓ − ℓ_rollout)


@dataclass(frozen=True, slots=True)
class Kl:
    """β·KL. `clamp` is on d before the estimate, `cap` on the estimate and its weight; both stop the gradient where they act.

    straight_through: the gradient is that of d²/2, unclamped; `importance` weighs it with sg min(r, importance).
    finite: a weight that is not finite becomes 0. reduction: None is the one of the policy term.
    clamp_after: the clamp bounds the result of the exp in k3 instead, as in `Ratio`; the other estimators have no exp and no clamp then.
    """

    coef: float
    estimator: Estimator = Estimator.K3
    against: Anchor = Anchor.REF
    clamp: Bounds = OPEN
    clamp_after: bool = False
    cap: Bounds = OPEN
    weight: KlWeight = KlWeight.NONE
    finite: bool = False
    straight_through: bool = False
    importance: float | None = None
    reduction: Reduction | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Entropy:
    """−c·H. reduction: None is the one of the policy term. required: False takes the term in where the batch has an entropy."""

    coef: float
    reduction: Reduction | None = None
    required: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class LossSettings:
    """A loss, completely. surrogate None: no policy term, the KL alone.

    mask_log_probs, mask_others: applied to ℓ, and to ℓ_old and ℓ_ref, before anything else.
    mask_advantages: A as the framework's estimators leave it, or untouched. mean_advantages: one A per row, divided as told.
    scale_advantages: the reduction divides A beforehand and the loss is a sum (SkyRL).
    drop_unscored: a token whose ℓ_old is not finite leaves the mask, and is counted all the same (torchtitan).
    """

    surrogate: Surrogate | None = field(default_factory=Ppo)
    ratio: Ratio = field(default_factory=Ratio)
    trust: TrustRegion | None = None
    correction: Correction | None = None
    kl: Kl | None = None
    entropy: Entropy | None = None
    reduction: Reduction = field(default_factory=Reduction)
    mask_log_probs: Masking = Masking.NONE
    mask_others: Masking = Masking.NONE
    mask_advantages: Masking = Masking.NONE
    mean_advantages: Guard | None = None
    scale_advantages: Reduction | None = None
    drop_unscored: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
