"""The policy objective of RL post-training, written once; what the frameworks do differently is a setting.

    trace = objective(LossInputs(log_probs, old, ref, rollout, advantages, mask), LossSettings(Ppo(clip=Bounds(0.8, 1.2)), kl=Kl(0.04)))
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

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.given import an
from nanscope.objective.bounds import OPEN, Bounds
from nanscope.objective.reduction import GUARDED, Guard, Masking, Over, Reduction, divisor, masked, reduce, tokens_B1
from nanscope.objective.settings import Anchor, Correction, Estimator, Gate, Kl, KlWeight, Level, LossInputs, LossSettings, Ratio, Statistic
from nanscope.objective.surrogates import Terms, Vespo
from nanscope.roles import Role

_ESTIMATE: dict[Estimator, Callable[[Tensor], Tensor]] = {
    Estimator.K1: torch.neg,
    Estimator.K2: lambda d: 0.5 * d.square(),
    Estimator.K3: lambda d: d.exp() - d - 1,
    Estimator.ABS: torch.abs,
}


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
    log_ratio_BT = batch.log_probs_BT - batch.anchor(settings.ratio.against)
    exponent = _exponent(log_ratio_BT, batch, settings.ratio)
    powered = settings.ratio.clamp.exp().clamp(exponent.exp()) if settings.ratio.clamp_after else exponent.exp()
    ratio = masked(powered, mask_BT, settings.ratio.mask_ratio)

    weight, gated_BT = _correct(batch, settings.correction)
    policy = policy_loss = None
    if settings.surrogate is not None:
        policy = settings.surrogate(Terms(batch.log_probs_BT, log_ratio_BT, ratio, advantages, mask_BT, weight))
        if settings.trust is not None:
            policy = policy * settings.trust.holds(batch.log_probs_BT, batch.anchor(settings.ratio.against), advantages)
        if weight is not None and not isinstance(settings.surrogate, Vespo):
            policy = policy * weight
        policy_loss = reduce(*batch.counted(policy, gated_BT), settings.reduction)

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


def corrected(inputs: LossInputs, how: Correction) -> tuple[Tensor | None, Tensor]:
    """Return what a correction multiplies the policy term by, [B, T] or [B, 1], None where it does not; and the mask behind its gates.

    Raises NanscopeError if the batch has no rollout log-probs, or if shapes do not fit.
    """
    return _correct(_Batch.of(inputs, LossSettings(correction=how)), how)


def _total(settings: LossSettings, policy: Tensor | None, kl: Tensor | None, entropy: Tensor | None) -> Tensor:
    """policy + β·kl − c·entropy, of those that are there: a coefficient of 0 does not take a NaN away."""
    terms = [] if policy is None else [policy]
    if kl is not None and settings.kl is not None:
        terms.append(settings.kl.coef * kl)
    if entropy is not None and settings.entropy is not None:
        terms.append(-settings.entropy.coef * entropy)
    return sum(terms[1:], start=terms[0])


def _present(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise NanscopeError(f"this loss reads {name}, and the batch has none: pass LossInputs({name}=…)", slug="missing-input")
    return tensor


@dataclass(frozen=True, slots=True)
class _Batch:
    """The inputs after the masks that come before everything else."""

    inputs: LossInputs
    log_probs_BT: Tensor
    advantages: Tensor
    sign: Tensor
    mask_BT: Tensor
    mask_others: Masking
    drop_unscored: bool

    @classmethod
    def of(cls, inputs: LossInputs, settings: LossSettings) -> _Batch:
        an("inputs", inputs, LossInputs, "a batch (LossInputs)")
        mask_BT = inputs.mask.to(inputs.log_probs.dtype)
        if settings.drop_unscored:
            mask_BT = mask_BT * torch.isfinite(_present(inputs.old_log_probs, "old_log_probs"))
        given = inputs.advantages.detach().unsqueeze(1) if inputs.advantages.dim() == 1 else inputs.advantages.detach()
        advantages = masked(given, mask_BT, settings.mask_advantages)
        sign = torch.sign(advantages)
        if settings.mean_advantages is not None:
            total_B1 = (advantages * mask_BT).sum(-1, keepdim=True)
            advantages = total_B1 / GUARDED[settings.mean_advantages](tokens_B1(mask_BT))
        if settings.scale_advantages is not None:
            advantages = advantages / divisor(mask_BT, settings.scale_advantages) * settings.scale_advantages.factor
        log_probs_BT = masked(inputs.log_probs, mask_BT, settings.mask_log_probs)
        return cls(inputs, log_probs_BT, advantages, sign, mask_BT, settings.mask_others, settings.drop_unscored)

    def counted(self, policy: Tensor, gated_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is summed and the mask that is counted: a token without a score leaves the sum, and was counted before that."""
        return (policy * gated_BT, self.inputs.mask.to(policy.dtype)) if self.drop_unscored else (policy, gated_BT)

    def anchor(self, which: Anchor) -> Tensor:
        """Return the log-probs that a ratio is taken against, [B, T], detached."""
        if which is Anchor.ROLLOUT or (which is Anchor.SAMPLER and self.inputs.rollout_log_probs is not None):
            return _present(self.inputs.rollout_log_probs, "rollout_log_probs").detach()
        if which is Anchor.REF:
            return masked(_present(self.inputs.ref_log_probs, "ref_log_probs").detach(), self.mask_BT, self.mask_others)
        if which is Anchor.SELF or self.inputs.old_log_probs is None:
            return self.log_probs_BT.detach()
        return masked(self.inputs.old_log_probs.detach(), self.mask_BT, self.mask_others)


def _exponent(log_ratio_BT: Tensor, batch: _Batch, how: Ratio) -> Tensor:
    """mask → clip → level → clamp: what exp is applied to, [B, T] or [B, 1]."""
    if how.level is Level.SEQUENCE_LOG_PROBS:
        rows = (masked(x_BT, batch.mask_BT, how.mask_log_ratio) for x_BT in (batch.log_probs_BT, batch.anchor(how.against)))
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
    mean_B1 = sum_B1 / GUARDED[guard](tokens_B1(batch.mask_BT))
    return mean_B1 if level is Level.SEQUENCE_MEAN else batch.log_probs_BT - batch.log_probs_BT.detach() + mean_B1.detach()


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
    raw_BT = batch.anchor(how.against) - batch.log_probs_BT
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
        log_ratio_BT = batch.log_probs_BT - batch.anchor(Anchor.OLD)
        pathwise_BT = Bounds(high=how.importance).clamp(log_ratio_BT.exp()).detach() * pathwise_BT
    return pathwise_BT - pathwise_BT.detach() + kl_BT.detach()


def _kl_weight(batch: _Batch, how: Kl) -> Tensor:
    against = Anchor.ROLLOUT if how.weight is KlWeight.ROLLOUT else Anchor.SELF
    weight_BT = (batch.log_probs_BT - batch.anchor(against)).exp()
    return torch.nan_to_num(weight_BT, nan=0.0, posinf=0.0, neginf=0.0) if how.finite else weight_BT
