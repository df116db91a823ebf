"""The policy objective of RL post-training, written once; what the frameworks do differently is a setting.

    trace = objective(LossInputs(logprobs, old, ref, rollout, advantages, mask), LossSettings(Ppo(clip=Bounds(0.8, 1.2)), kl=Kl(0.04)))
    trace.loss          one number, with its gradient
    trace.ratio         exp Δ, Δ = ℓ − ℓ_old; and so on for every intermediate

    L  =  reduce( w · S(r, A, ℓ) )  +  β · reduce( KL(ℓ, ℓ_ref) )  −  c · reduce( H )

Notable: the order of the steps is the subject, not a detail. A clamp before exp and a clamp after it give the same finite loss, and NaN
gradients in one case only. So each place where a framework may guard, clamp or mask has its own setting, and the steps run as the
framework runs them. A term is left out only by None: a coefficient of 0 still multiplies, and 0 · NaN is NaN.

Shapes:  B rows, T response tokens. `_BT` is [B, T], `_B1` is [B, 1], `_B` is [B], `_N` the valid tokens in one line;
         a name without suffix is [B, T] or [B, 1], by the level of the ratio.
Symbols: ℓ policy log-prob, Δ = ℓ − ℓ_old, r = exp Δ, d = ℓ_ref − ℓ, δ = ℓ_old − ℓ_rollout, A advantage, m ∈ {0, 1} mask,
         n_i = Σ_t m tokens of row i, sg stop-gradient. All logs in nat.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.roles import Role


class Masking(StrEnum):
    """How a mask is applied. Neither helps after an exp that overflowed: inf · 0 is NaN, forward in one case and backward in both."""

    NONE = "none"
    MULTIPLY = "multiply"  # x · m
    WHERE = "where"  # x where m, else 0


class Guard(StrEnum):
    """How a denominator n is kept from 0."""

    RAW = "raw"  # n, so that nothing valid gives 0/0
    FLOOR = "floor"  # max(n, 1)
    EPSILON = "epsilon"  # n + 1e-8


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
    SEQUENCE_LOGPROB = "sequence_logprob"  # Σ ℓm − Σ ℓ_old m, [B, 1]: RLOO, arXiv 2402.14740; rounds as two sums of a whole row do


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval; None is open on that side. Which unit it has is told by who holds it: a ratio or an exponent in nat."""

    low: float | None = None
    high: float | None = None

    def clamp(self, x: Tensor) -> Tensor:
        """Return x within the interval. The gradient is 0 outside of it and at NaN; an open interval is not an operation at all."""
        return x if self.low is None and self.high is None else torch.clamp(x, min=self.low, max=self.high)

    def exp(self) -> Bounds:
        """Return the interval that exp makes of this one, of exponents in nat."""
        low, high = (None if end is None else math.exp(min(end, 700.0)) for end in (self.low, self.high))  # e^710 is no float
        return Bounds(low, high)

    def holds(self, x: Tensor) -> Tensor:
        """Return where x is inside, bool; NaN is not."""
        return (x >= (-math.inf if self.low is None else self.low)) & (x <= (math.inf if self.high is None else self.high))

    def zero_outside(self, x: Tensor) -> Tensor:
        """Return x inside the interval and 0 elsewhere, also at NaN."""
        return torch.where(self.holds(x), x, 0.0)


OPEN = Bounds()
SAFE = Bounds(-20.0, 20.0)  # nat: exp(±20) is within fp32, and its gradient too


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One batch as the loss receives it. Log-probs are of the sampled tokens, [B, T]; only `logprobs` carries a gradient.

    old_logprobs: None is sg ℓ, as on the first update after sampling.
    advantages:   [B, T] or [B].
    mask:         [B, T], true or 1 where the loss counts a token.
    entropy:      [B, T], where the entropy enters the loss.
    """

    logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    advantages: Tensor
    mask: Tensor
    entropy: Tensor | None = None


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


PER_SEQUENCE = Ratio(level=Level.SEQUENCE_MEAN, mask_log_ratio=Masking.MULTIPLY)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a surrogate may read."""

    logprobs_BT: Tensor
    log_ratio_BT: Tensor
    ratio: Tensor
    advantages: Tensor
    mask_BT: Tensor
    weight: Tensor | None


@dataclass(frozen=True, slots=True)
class Ppo:
    """−min(rA, clip(r)A), arXiv 1707.06347 eq. 7.

    clip: of the ratio. cap: upper bound of the unclipped branch (two-sided clipping, INTELLECT-2, arXiv 2505.07291), after exp.
    dual: c of dual clip, −max(·, cA) where A < 0 (arXiv 1912.09729 eq. 5).
    """

    clip: Bounds = Bounds(0.8, 1.2)
    cap: float | None = None
    dual: float | None = None

    def __call__(self, t: Terms) -> Tensor:
        # min picks the clipped side: the loss stays finite, and 0 · inf appears only in the backward of exp
        loss = -torch.min(Bounds(high=self.cap).clamp(t.ratio) * t.advantages, self.clip.clamp(t.ratio) * t.advantages)
        return loss if self.dual is None else torch.where(t.advantages < 0, torch.min(loss, -t.advantages * self.dual), loss)


@dataclass(frozen=True, slots=True)
class ImportanceSampling:
    """−rA, unclipped. With the ratio against sg ℓ it is REINFORCE with the value −A."""

    def __call__(self, t: Terms) -> Tensor:
        return -(t.ratio * t.advantages)


@dataclass(frozen=True, slots=True)
class Reinforce:
    """−Aℓ. twofold: as the max of two equal terms (NeMo-RL); a tie halves the gradient and a NaN, which is no tie, does not."""

    twofold: bool = False

    def __call__(self, t: Terms) -> Tensor:
        loss = -t.advantages * t.logprobs_BT
        return torch.max(loss, -t.advantages * t.logprobs_BT) if self.twofold else loss


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """−ℓ: the advantages are not read."""

    def __call__(self, t: Terms) -> Tensor:
        return -t.logprobs_BT


@dataclass(frozen=True, slots=True)
class Cispo:
    """−sg[clip r]·A·ℓ, arXiv 2506.13585 eq. 4. drop: 0 outside of the interval instead of its bound."""

    clip: Bounds
    drop: bool = False

    def __call__(self, t: Terms) -> Tensor:
        clipped = self.clip.zero_outside(t.ratio) if self.drop else self.clip.clamp(t.ratio)
        return -clipped.detach() * t.advantages * t.logprobs_BT


@dataclass(frozen=True, slots=True)
class Sapo:
    """−(4/τ)·σ(τ(r − 1))·A with τ by the sign of A, arXiv 2511.20347 eq. 5."""

    positive: float = 1.0
    negative: float = 1.05

    def __call__(self, t: Terms) -> Tensor:
        temperature = torch.where(t.advantages > 0, self.positive, self.negative)
        return -(torch.sigmoid(temperature * (t.ratio - 1)) * (4 / temperature)) * t.advantages


@dataclass(frozen=True, slots=True)
class Vespo:
    """−φ(w)·A·ℓ with log φ = λ + k·log w − λw, log w = Σ Δm, k and λ by the sign of A; TRL grpo_trainer.py:2971.

    φ is not differentiated. A NaN φ becomes 0: the sequence is dropped without a word. The rollout correction enters log w.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __call__(self, t: Terms) -> Tensor:
        log_w_B1 = (SAFE.clamp(t.log_ratio_BT.detach()) * t.mask_BT).sum(-1, keepdim=True)
        limits = Bounds(math.log(1e-8), 20.0)
        if t.weight is not None:
            log_w_B1 = log_w_B1 + limits.clamp(torch.log(t.weight)).sum(-1, keepdim=True)
        log_w_B1 = limits.clamp(log_w_B1)
        rising = t.advantages >= 0
        k = torch.where(rising, self.k_positive, self.k_negative)
        rate = torch.where(rising, self.lambda_positive, self.lambda_negative).clamp(min=1e-4)
        phi = torch.exp(rate + k * log_w_B1 - rate * log_w_B1.exp()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return -phi * t.advantages * t.logprobs_BT


@dataclass(frozen=True, slots=True)
class Dro:
    """−(ℓA − ½·β·Δ²), arXiv 2405.19107 eq. 3."""

    beta: float

    def __call__(self, t: Terms) -> Tensor:
        return -(t.logprobs_BT * t.advantages - 0.5 * self.beta * t.log_ratio_BT.square())


@dataclass(frozen=True, slots=True)
class ClipCov:
    """PPO, without the tokens whose covariance (A − Ā)(ℓ − ℓ̄) lies between the bounds, arXiv 2505.22617 eq. 10.

    share: of the valid tokens, at least one; more candidates than that are drawn with torch.randperm, as the frameworks do.
    mean: how masked tokens leave Ā and ℓ̄.
    """

    clip: Bounds = Bounds(0.8, 1.2)
    share: float = 0.0002
    low: float = 1.0
    high: float = 5.0
    mean: Masking = Masking.WHERE

    def __call__(self, t: Terms) -> Tensor:
        raw, clipped = -t.advantages * t.ratio, -t.advantages * self.clip.clamp(t.ratio)
        covariance_BT = _centred(t.advantages, t.mask_BT, self.mean) * _centred(t.logprobs_BT, t.mask_BT, self.mean)
        candidate_BT = (covariance_BT < self.high) & (covariance_BT > self.low) & (t.mask_BT > 0) & ~(clipped > raw)
        index_N2 = candidate_BT.nonzero()
        index_N2 = index_N2[torch.randperm(len(index_N2))[: max(int(self.share * _tokens(t.mask_BT).item()), 1)]]
        kept_BT = torch.ones_like(t.logprobs_BT)
        kept_BT[index_N2[:, 0], index_N2[:, 1]] = 0
        return torch.maximum(raw, clipped) * kept_BT


@dataclass(frozen=True, slots=True)
class KlCov:
    """−rA, plus coef·|Δ| at the share of valid tokens (at least one) with the largest covariance, arXiv 2505.22617 eq. 11."""

    share: float = 0.0002
    coef: float = 1.0

    def __call__(self, t: Terms) -> Tensor:
        raw = -t.advantages * t.ratio
        valid = (t.mask_BT > 0).reshape(-1).nonzero().squeeze(-1)
        advantages_N = t.advantages.expand_as(t.logprobs_BT).reshape(-1)[valid].detach()
        logprobs_N = t.logprobs_BT.reshape(-1)[valid].detach()
        covariance_N = (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())
        most = min(max(1, int(len(valid) * self.share)), len(valid))
        picked = torch.zeros(t.logprobs_BT.numel(), dtype=torch.bool, device=raw.device)
        picked[valid[covariance_N.topk(most).indices]] = True
        return torch.where(picked.view_as(t.logprobs_BT), raw + self.coef * t.log_ratio_BT.abs(), raw)


Surrogate = Ppo | ImportanceSampling | Reinforce | CrossEntropy | Cispo | Sapo | Vespo | Dro | ClipCov | KlCov


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

    def holds(self, logprobs_BT: Tensor, old_BT: Tensor, advantages: Tensor) -> Tensor:
        """Return 1 where the token counts, else 0."""
        p, q = logprobs_BT.detach().exp(), old_BT.exp()
        if self.divergence is Divergence.TV:
            apart = p - q
            rising, falling = apart <= self.high, apart >= -self.low
        else:
            apart = q * (old_BT - logprobs_BT.detach()) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
            rising, falling = (apart <= self.high) | (p <= q), (apart <= self.low) | (p >= q)
        inside = torch.where(advantages > 0, rising, falling)
        return (inside | apart.isnan() if self.nan_passes else inside).to(logprobs_BT.dtype)


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


class Estimator(StrEnum):
    """Of KL(π, π_ref) from one sample, with d = ℓ_ref − ℓ: J. Schulman, Approximating KL divergence, 2020."""

    K1 = "k1"  # −d
    K2 = "k2"  # d² / 2
    K3 = "k3"  # e^d − d − 1
    ABS = "abs"  # |d|


_ESTIMATE: dict[Estimator, Callable[[Tensor], Tensor]] = {
    Estimator.K1: torch.neg,
    Estimator.K2: lambda d: 0.5 * d.square(),
    Estimator.K3: lambda d: d.exp() - d - 1,
    Estimator.ABS: torch.abs,
}


class KlWeight(StrEnum):
    """What multiplies the estimate, with its gradient."""

    NONE = "none"
    RATIO = "ratio"  # r of the policy term: DeepSeek-V3.2, arXiv 2512.02556 eq. 7
    SELF = "self"  # exp(ℓ − sg ℓ): 1, with the score function as gradient, arXiv 2506.09477
    ROLLOUT = "rollout"  # exp(ℓ − ℓ_rollout)


class Over(StrEnum):
    """What a reduction sums over, and what it divides by; N tokens, B rows, n_i tokens in row i."""

    TOKENS = "tokens"  # Σ_it x / N
    TOTAL = "total"  # Σ_it x
    ROW_MEANS = "row_means"  # Σ_i (Σ_t x / n_i) / B
    ROW_SUMS = "row_sums"  # Σ_i Σ_t x / B
    LONG_ROWS = "long_rows"  # Σ_i n_i (Σ_t x / T) / B, padding included: Liger's luspo
    VALUES = "values"  # the mean of what is there: one value per row


@dataclass(frozen=True, slots=True)
class Reduction:
    """From [B, T] to the scalar.

    mask:     how masked tokens leave the sum. empty: how rows without a token leave it; NONE: they count as rows, with 0.
    count:    N or B of the whole batch, over all ranks and micro-batches; None counts what is here.
    guard:    of that count. row_guard: of n_i. horizon: a constant that divides each row as well; None is T.
    factor:   data-parallel size and the like, on the result.
    """

    over: Over = Over.TOKENS
    mask: Masking = Masking.MULTIPLY
    empty: Masking = Masking.NONE
    count: float | None = None
    guard: Guard = Guard.FLOOR
    row_guard: Guard = Guard.FLOOR
    horizon: float | None = 1.0
    factor: float = 1.0


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


@dataclass(frozen=True, slots=True)
class Entropy:
    """−c·H. reduction: None is the one of the policy term. required: False takes the term in where the batch has an entropy."""

    coef: float
    reduction: Reduction | None = None
    required: bool = True


@dataclass(frozen=True, slots=True)
class LossSettings:
    """A loss, completely. surrogate None: no policy term, the KL alone.

    mask_logprobs, mask_others: applied to ℓ, and to ℓ_old and ℓ_ref, before anything else.
    mask_advantages: A as the framework's estimators leave it, or untouched. mean_advantages: one A per row, divided as told.
    scale_advantages: the reduction divides A beforehand and the loss is a sum (SkyRL).
    drop_unscored: a token whose ℓ_old is not finite leaves the mask (torchtitan).
    """

    surrogate: Surrogate | None = field(default_factory=Ppo)
    ratio: Ratio = field(default_factory=Ratio)
    trust: TrustRegion | None = None
    correction: Correction | None = None
    kl: Kl | None = None
    entropy: Entropy | None = None
    reduction: Reduction = field(default_factory=Reduction)
    mask_logprobs: Masking = Masking.NONE
    mask_others: Masking = Masking.NONE
    mask_advantages: Masking = Masking.NONE
    mean_advantages: Guard | None = None
    scale_advantages: Reduction | None = None
    drop_unscored: bool = False


@dataclass(frozen=True, slots=True)
class LossTrace:
    """Every intermediate of one evaluation, still attached to the graph. What a setting leaves out is None.

    advantages, mask_BT: as the loss used them. policy, token_loss: [B, T], or [B, 1] for a loss with one value per row.
    policy_loss, kl_loss, entropy_loss: reduced, without coefficients. loss = policy_loss + β·kl_loss − c·entropy_loss.
    """

    log_ratio_BT: Tensor
    exponent: Tensor
    ratio: Tensor
    advantages: Tensor
    mask_BT: Tensor
    weight: Tensor | None
    policy: Tensor | None
    kl_BT: Tensor | None
    entropy_BT: Tensor | None
    token_loss: Tensor
    policy_loss: Tensor | None
    kl_loss: Tensor | None
    entropy_loss: Tensor | None
    loss: Tensor

    def roles(self) -> dict[Role, Tensor]:
        """Return the tensors by what they mean."""
        found = {
            Role.LOG_RATIO: self.log_ratio_BT,
            Role.RATIO: self.ratio,
            Role.ADVANTAGES: self.advantages,
            Role.MASK: self.mask_BT,
            Role.IS_WEIGHT: self.weight,
            Role.KL: self.kl_BT,
            Role.ENTROPY: self.entropy_BT,
            Role.LOSS: self.loss,
        }
        return {role: tensor for role, tensor in found.items() if tensor is not None}


def objective(inputs: LossInputs, settings: LossSettings) -> LossTrace:
    """Evaluate the loss that `settings` describe on one batch.

    Raises NanscopeError if the settings read a log-prob or an entropy that the batch lacks, or if shapes do not fit.
    """
    batch = _Batch.of(inputs, settings)
    mask_BT, advantages = batch.mask_BT, batch.advantages
    log_ratio_BT = batch.logprobs_BT - batch.anchor(settings.ratio.against)
    exponent = _exponent(log_ratio_BT, batch, settings.ratio)
    powered = settings.ratio.clamp.exp().clamp(exponent.exp()) if settings.ratio.clamp_after else exponent.exp()
    ratio = masked(powered, mask_BT, settings.ratio.mask_ratio)

    weight, gated_BT = _correct(batch, settings.correction)
    policy = policy_loss = None
    if settings.surrogate is not None:
        policy = settings.surrogate(Terms(batch.logprobs_BT, log_ratio_BT, ratio, advantages, mask_BT, weight))
        if settings.trust is not None:
            policy = policy * settings.trust.holds(batch.logprobs_BT, batch.anchor(settings.ratio.against), advantages)
        if weight is not None and not isinstance(settings.surrogate, Vespo):
            policy = policy * weight
        policy_loss = reduce(policy, gated_BT, settings.reduction)

    kl_BT = kl_loss = None
    if settings.kl is not None:
        kl_BT = _kl(batch, ratio, settings.kl)
        kl_loss = reduce(kl_BT, mask_BT, settings.kl.reduction or settings.reduction)

    entropy_BT = entropy_loss = None
    if settings.entropy is not None and (settings.entropy.required or inputs.entropy is not None):
        entropy_BT = _present(inputs.entropy, "entropy")
        entropy_loss = reduce(entropy_BT, mask_BT, settings.entropy.reduction or settings.reduction)

    if policy is None and kl_BT is None:
        raise NanscopeError("a loss needs a surrogate or a KL term, and these settings have neither", slug="empty-loss")
    return LossTrace(
        log_ratio_BT=log_ratio_BT,
        exponent=exponent,
        ratio=ratio,
        advantages=advantages,
        mask_BT=gated_BT,
        weight=weight,
        policy=policy,
        kl_BT=kl_BT,
        entropy_BT=entropy_BT,
        token_loss=_total(settings, policy, kl_BT, entropy_BT),
        policy_loss=policy_loss,
        kl_loss=kl_loss,
        entropy_loss=entropy_loss,
        loss=_total(settings, policy_loss, kl_loss, entropy_loss),
    )


def _total(settings: LossSettings, policy: Tensor | None, kl: Tensor | None, entropy: Tensor | None) -> Tensor:
    """policy + β·kl − c·entropy, of those that are there: a coefficient of 0 does not take a NaN away."""
    terms = [] if policy is None else [policy]
    if kl is not None and settings.kl is not None:
        terms.append(settings.kl.coef * kl)
    if entropy is not None and settings.entropy is not None:
        terms.append(-settings.entropy.coef * entropy)
    return sum(terms[1:], start=terms[0])


def masked(x: Tensor, mask: Tensor, how: Masking) -> Tensor:
    """Return x with the mask applied; shapes broadcast."""
    return _MASKED[how](x, mask)


_MASKED: dict[Masking, Callable[[Tensor, Tensor], Tensor]] = {
    Masking.NONE: lambda x, mask: x,
    Masking.MULTIPLY: lambda x, mask: x * mask,
    Masking.WHERE: lambda x, mask: torch.where(mask > 0, x, 0.0),
}

_GUARDED: dict[Guard, Callable[[Tensor], Tensor]] = {
    Guard.RAW: lambda n: n,
    Guard.FLOOR: lambda n: n.clamp(min=1.0),
    Guard.EPSILON: lambda n: n + 1e-8,
}


def reduce(x: Tensor, mask_BT: Tensor, how: Reduction) -> Tensor:
    """Reduce a loss per token, [B, T] or [B, 1], to the scalar that is differentiated."""
    return _REDUCED[how.over](x, mask_BT, how) * how.factor


def _over_tokens(x: Tensor, mask_BT: Tensor, how: Reduction) -> Tensor:
    return masked(x, mask_BT, how.mask).sum() / _count(_tokens(mask_BT), how)


def _over_rows(x: Tensor, mask_BT: Tensor, how: Reduction) -> Tensor:
    tokens_B = _tokens_B1(mask_BT).squeeze(-1)
    row_B = masked(x, mask_BT, how.mask).sum(-1)
    if how.over is Over.ROW_MEANS:
        row_B = row_B / _GUARDED[how.row_guard](tokens_B)
    filled_B = (tokens_B > 0).to(x.dtype)
    rows = filled_B if how.empty is not Masking.NONE else torch.ones_like(filled_B)
    return masked(row_B, filled_B, how.empty).sum() / _count(_tokens(rows), how) / _horizon(mask_BT, how)


def _over_long_rows(x: Tensor, mask_BT: Tensor, how: Reduction) -> Tensor:
    return (x * _tokens_B1(mask_BT)).mean()


_REDUCED: dict[Over, Callable[[Tensor, Tensor, Reduction], Tensor]] = {
    Over.TOKENS: _over_tokens,
    Over.TOTAL: lambda x, mask_BT, how: masked(x, mask_BT, how.mask).sum(),
    Over.ROW_MEANS: _over_rows,
    Over.ROW_SUMS: _over_rows,
    Over.LONG_ROWS: _over_long_rows,
    Over.VALUES: lambda x, mask_BT, how: x.mean(),
}


def _tokens(mask_BT: Tensor) -> Tensor:
    """Return how many tokens a mask holds, in float32 at least: bfloat16 counts to 256 and stays there."""
    return mask_BT.sum(dtype=torch.promote_types(mask_BT.dtype, torch.float32))


def _tokens_B1(mask_BT: Tensor) -> Tensor:
    """Return the same for each row, [B, 1]."""
    return mask_BT.sum(-1, keepdim=True, dtype=torch.promote_types(mask_BT.dtype, torch.float32))


def _count(here: Tensor, how: Reduction) -> Tensor:
    return _GUARDED[how.guard](here if how.count is None else torch.full_like(here, how.count))


def _horizon(mask_BT: Tensor, how: Reduction) -> float:
    return float(mask_BT.shape[-1]) if how.horizon is None else how.horizon


def _divisor(mask_BT: Tensor, how: Reduction) -> Tensor:
    """Return what the sum of the tokens is divided by under this reduction: a scalar, or [B, 1] where it differs between rows."""
    if how.over is Over.TOKENS:
        return _count(_tokens(mask_BT), how)
    rows_B1 = torch.full_like(mask_BT[:, :1], len(mask_BT) * _horizon(mask_BT, how))
    return rows_B1 * _GUARDED[how.row_guard](_tokens_B1(mask_BT)) if how.over is Over.ROW_MEANS else rows_B1


def _present(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise NanscopeError(f"this loss reads {name}, and the batch has none: pass LossInputs({name}=…)", slug="missing-input")
    return tensor


@dataclass(frozen=True, slots=True)
class _Batch:
    """The inputs after the masks that come before everything else."""

    inputs: LossInputs
    logprobs_BT: Tensor
    advantages: Tensor
    sign: Tensor
    mask_BT: Tensor
    mask_others: Masking

    @classmethod
    def of(cls, inputs: LossInputs, settings: LossSettings) -> _Batch:
        _check(inputs)
        mask_BT = inputs.mask.to(inputs.logprobs.dtype)
        if settings.drop_unscored:
            mask_BT = mask_BT * torch.isfinite(_present(inputs.old_logprobs, "old_logprobs"))
        given = inputs.advantages.detach().unsqueeze(1) if inputs.advantages.dim() == 1 else inputs.advantages.detach()
        advantages = masked(given, mask_BT, settings.mask_advantages)
        sign = torch.sign(advantages)
        if settings.mean_advantages is not None:
            total_B1 = (advantages * mask_BT).sum(-1, keepdim=True)
            advantages = total_B1 / _GUARDED[settings.mean_advantages](_tokens_B1(mask_BT))
        if settings.scale_advantages is not None:
            advantages = advantages / _divisor(mask_BT, settings.scale_advantages) * settings.scale_advantages.factor
        logprobs_BT = masked(inputs.logprobs, mask_BT, settings.mask_logprobs)
        return cls(inputs, logprobs_BT, advantages, sign, mask_BT, settings.mask_others)

    def anchor(self, which: Anchor) -> Tensor:
        """Return the log-probs that a ratio is taken against, [B, T], detached."""
        if which is Anchor.ROLLOUT or (which is Anchor.SAMPLER and self.inputs.rollout_logprobs is not None):
            return _present(self.inputs.rollout_logprobs, "rollout_logprobs").detach()
        if which is Anchor.REF:
            return masked(_present(self.inputs.ref_logprobs, "ref_logprobs").detach(), self.mask_BT, self.mask_others)
        if which is Anchor.SELF or self.inputs.old_logprobs is None:
            return self.logprobs_BT.detach()
        return masked(self.inputs.old_logprobs.detach(), self.mask_BT, self.mask_others)


def _check(inputs: LossInputs) -> None:
    for name in ("logprobs", "advantages", "mask"):
        if not isinstance(getattr(inputs, name), Tensor):
            raise NanscopeError(f"{name} is {type(getattr(inputs, name)).__name__}: a batch needs it as a tensor", slug="missing-input")
    if not inputs.logprobs.is_floating_point():
        raise NanscopeError(f"logprobs are {inputs.logprobs.dtype}: they are floating-point numbers", slug="bad-argument")
    shape = inputs.logprobs.shape
    if len(shape) != 2:
        raise NanscopeError(f"logprobs is {tuple(shape)}: a batch is [B, T], rows by response tokens", slug="shape-mismatch")
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "mask", "entropy", "advantages"):
        tensor: Tensor | None = getattr(inputs, name)
        fits = tensor is None or tensor.shape == shape or (name == "advantages" and tensor.shape in (shape[:1], (shape[0], 1)))
        if tensor is not None and not fits:
            raise NanscopeError(
                f"{name} is {tuple(tensor.shape)} and logprobs is {tuple(shape)}: they must be alike", slug="shape-mismatch"
            )


def _exponent(log_ratio_BT: Tensor, batch: _Batch, how: Ratio) -> Tensor:
    """mask → clip → level → clamp: what exp is applied to, [B, T] or [B, 1]."""
    if how.level is Level.SEQUENCE_LOGPROB:
        rows = (masked(x_BT, batch.mask_BT, how.mask_log_ratio) for x_BT in (batch.logprobs_BT, batch.anchor(how.against)))
        own_B1, other_B1 = (x_BT.sum(-1, keepdim=True) for x_BT in rows)
        return own_B1 - other_B1 if how.clamp_after else how.clamp.clamp(own_B1 - other_B1)
    x_BT = log_ratio_BT if how.log_clip is None else _ONE_SIDED[how.signed](log_ratio_BT, batch.sign, how.log_clip)
    x = _at_level(masked(x_BT, batch.mask_BT, how.mask_log_ratio), how.level, batch, how.guard)
    return x if how.clamp_after else how.clamp.clamp(x)


def _at_level(x_BT: Tensor, level: Level, batch: _Batch, guard: Guard) -> Tensor:
    if level is Level.TOKEN:
        return x_BT
    sum_B1 = x_BT.sum(-1, keepdim=True)
    if level is Level.SEQUENCE_SUM:
        return sum_B1
    mean_B1 = sum_B1 / _GUARDED[guard](_tokens_B1(batch.mask_BT))
    return mean_B1 if level is Level.SEQUENCE_MEAN else batch.logprobs_BT - batch.logprobs_BT.detach() + mean_B1.detach()


def _by_sign(log_ratio_BT: Tensor, sign: Tensor, clip: Bounds) -> Tensor:
    """s·min(sΔ, s·clip Δ) with s the sign of A: PPO's pessimistic min, in log space. At A = 0 this is 0 · Δ, and 0 · inf is NaN."""
    return sign * torch.min(sign * log_ratio_BT, sign * clip.clamp(log_ratio_BT))


def _by_choice(log_ratio_BT: Tensor, sign: Tensor, clip: Bounds) -> Tensor:
    """min(Δ, clip Δ) where A > 0, max elsewhere: the same but at A = 0, where Δ is clipped from below."""
    clipped_BT = clip.clamp(log_ratio_BT)
    return torch.where(sign > 0, torch.minimum(log_ratio_BT, clipped_BT), torch.maximum(log_ratio_BT, clipped_BT))


_ONE_SIDED = {True: _by_sign, False: _by_choice}


def _correct(batch: _Batch, how: Correction | None) -> tuple[Tensor | None, Tensor]:
    """Return (weight of the policy term, [B, T] or [B, 1], or None; mask after the gates)."""
    if how is None:
        return None, batch.mask_BT
    old_BT, rollout_BT = batch.anchor(how.against), batch.anchor(Anchor.ROLLOUT)
    passing: list[Tensor] = []
    for gate in how.gates:
        inside = _inside(old_BT, rollout_BT, batch, gate)
        if gate.from_mask:
            batch = replace(batch, mask_BT=batch.mask_BT * inside)
        else:
            passing.append(inside)
    weight = _weight(old_BT - rollout_BT, batch, how) if how.weigh else None
    for inside in passing:
        weight = None if weight is None else torch.where(inside, weight, 0.0)
    return weight, batch.mask_BT


def _weight(delta_BT: Tensor, batch: _Batch, how: Correction) -> Tensor:
    delta_BT = masked(delta_BT, batch.mask_BT, how.mask_log_weight)
    if how.unscored:
        delta_BT = torch.nan_to_num(delta_BT, nan=0.0)
    weight = how.clamp.clamp(_at_level(delta_BT, how.level, batch, Guard.FLOOR)).exp()
    if how.finite:
        weight = torch.nan_to_num(weight, nan=0.0, posinf=0.0, neginf=0.0)
    if how.mask_weight:
        weight = weight * batch.mask_BT
    weight = how.bounds.zero_outside(weight) if how.drop else how.bounds.clamp(weight)
    if how.normalise:
        mean = _mean_weight(weight, batch.mask_BT, how.level)
        weight = torch.where(mean > 1e-8, weight / mean, weight)
    return weight


def _mean_weight(weight: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """Return the mean over tokens, or over rows with a token if a row has one weight."""
    over = Reduction(Over.TOKENS, mask=Masking.WHERE, guard=Guard.EPSILON)
    by_row = replace(over, over=Over.ROW_MEANS, empty=Masking.WHERE, guard=Guard.FLOOR, row_guard=Guard.EPSILON)
    return reduce(weight, mask_BT, over if level is Level.TOKEN else by_row)


def _inside(old_BT: Tensor, rollout_BT: Tensor, batch: _Batch, gate: Gate) -> Tensor:
    """Return where the gate lets pass, bool, [B, T] or [B, 1]."""
    p, q = rollout_BT.exp().clamp(1e-6, 1 - 1e-6), old_BT.exp().clamp(1e-6, 1 - 1e-6)  # the clamp keeps the logs finite
    delta_BT = old_BT - rollout_BT
    if gate.finite_first:
        delta_BT = torch.nan_to_num(delta_BT, nan=0.0, posinf=0.0, neginf=0.0)
    statistic_BT = {
        Statistic.RATIO: delta_BT,
        Statistic.BINARY_KL: p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log(),
        Statistic.TV: (p - q).abs(),
    }[gate.statistic]
    if gate.level is not Level.TOKEN:
        statistic_BT = masked(statistic_BT, batch.mask_BT, Masking.MULTIPLY)
    statistic = gate.clamp.clamp(_at_level(statistic_BT, gate.level, batch, gate.guard))
    if gate.statistic is Statistic.RATIO:
        statistic = statistic.exp()
    inside = gate.bounds.holds(statistic)
    if gate.nan_passes:
        inside = inside | statistic.isnan()
    return (inside | (batch.mask_BT == 0)).all(-1, keepdim=True) if gate.whole_row else inside


def _kl(batch: _Batch, ratio: Tensor, how: Kl) -> Tensor:
    """weight · estimate(clamp d), capped; or the value of that with the gradient of d²/2."""
    raw_BT = batch.anchor(how.against) - batch.logprobs_BT
    d_BT = raw_BT if how.clamp_after else how.clamp.clamp(raw_BT)
    if how.clamp_after and how.estimator is Estimator.K3:
        kl_BT = how.clamp.exp().clamp(d_BT.exp()) - d_BT - 1
    else:
        kl_BT = _ESTIMATE[how.estimator](d_BT)
    if how.weight is not KlWeight.NONE:
        weight = ratio if how.weight is KlWeight.RATIO else _kl_weight(batch, how)
        if how.weight is not KlWeight.RATIO and how.clamp != OPEN:
            weight = torch.where(raw_BT == d_BT, weight, weight.detach())  # where d was clamped, the weight has no gradient either
        kl_BT = kl_BT * weight
    kl_BT = how.cap.clamp(kl_BT)
    if not how.straight_through:
        return kl_BT
    pathwise_BT = 0.5 * raw_BT.square()
    if how.importance is not None:
        log_ratio_BT = batch.logprobs_BT - batch.anchor(Anchor.OLD)
        pathwise_BT = Bounds(high=how.importance).clamp(log_ratio_BT.exp()).detach() * pathwise_BT
    return pathwise_BT - pathwise_BT.detach() + kl_BT.detach()


def _kl_weight(batch: _Batch, how: Kl) -> Tensor:
    against = Anchor.ROLLOUT if how.weight is KlWeight.ROLLOUT else Anchor.SELF
    weight_BT = (batch.logprobs_BT - batch.anchor(against)).exp()
    return torch.nan_to_num(weight_BT, nan=0.0, posinf=0.0, neginf=0.0) if how.finite else weight_BT


def _centred(x: Tensor, mask_BT: Tensor, how: Masking) -> Tensor:
    x_BT = x.detach().expand_as(mask_BT)
    return x_BT - masked(x_BT, mask_BT, how).sum() / _tokens(mask_BT).clamp(min=1.0)
