"""The policy terms: what is made of ratio, advantage and log-prob at each token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.objective.bounds import SAFE, Bounds
from nanscope.objective.reduction import Masking, masked, tokens

USUAL = Bounds(0.8, 1.2)  # of a ratio, ε = 0.2


@dataclass(frozen=True, slots=True)
class Terms:
    """What a surrogate may read."""

    log_probs_BT: Tensor
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

    clip: Bounds = USUAL
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
        loss = -t.advantages * t.log_probs_BT
        return torch.max(loss, -t.advantages * t.log_probs_BT) if self.twofold else loss


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """−ℓ: the advantages are not read."""

    def __call__(self, t: Terms) -> Tensor:
        return -t.log_probs_BT


@dataclass(frozen=True, slots=True)
class Cispo:
    """−sg[clip r]·A·ℓ, arXiv 2506.13585 eq. 4. drop: 0 outside of the interval instead of its bound."""

    clip: Bounds
    drop: bool = False

    def __call__(self, t: Terms) -> Tensor:
        clipped = self.clip.zero_outside(t.ratio) if self.drop else self.clip.clamp(t.ratio)
        return -clipped.detach() * t.advantages * t.log_probs_BT


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
        return -phi * t.advantages * t.log_probs_BT


@dataclass(frozen=True, slots=True)
class Dro:
    """−(ℓA − ½·β·Δ²), arXiv 2405.19107 eq. 3."""

    beta: float

    def __call__(self, t: Terms) -> Tensor:
        return -(t.log_probs_BT * t.advantages - 0.5 * self.beta * t.log_ratio_BT.square())


@dataclass(frozen=True, slots=True)
class ClipCov:
    """PPO, without the tokens whose covariance (A − Ā)(ℓ − ℓ̄) lies between the bounds, arXiv 2505.22617 eq. 10.

    share: of the valid tokens, at least one; more candidates than that are drawn with torch.randperm, as the frameworks do.
    mean: how masked tokens leave Ā and ℓ̄.
    """

    clip: Bounds = USUAL
    share: float = 0.0002
    low: float = 1.0
    high: float = 5.0
    mean: Masking = Masking.WHERE

    def __call__(self, t: Terms) -> Tensor:
        raw, clipped = -t.advantages * t.ratio, -t.advantages * self.clip.clamp(t.ratio)
        covariance_BT = _centred(t.advantages, t.mask_BT, self.mean) * _centred(t.log_probs_BT, t.mask_BT, self.mean)
        candidate_BT = (covariance_BT < self.high) & (covariance_BT > self.low) & (t.mask_BT > 0) & ~(clipped > raw)
        index_N2 = candidate_BT.nonzero()
        index_N2 = index_N2[torch.randperm(len(index_N2))[: max(int(self.share * tokens(t.mask_BT).item()), 1)]]
        kept_BT = torch.ones_like(t.log_probs_BT)
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
        advantages_N = t.advantages.expand_as(t.log_probs_BT).reshape(-1)[valid].detach()
        log_probs_N = t.log_probs_BT.reshape(-1)[valid].detach()
        covariance_N = (advantages_N - advantages_N.mean()) * (log_probs_N - log_probs_N.mean())
        most = min(max(1, int(len(valid) * self.share)), len(valid))
        picked = torch.zeros(t.log_probs_BT.numel(), dtype=torch.bool, device=raw.device)
        picked[valid[covariance_N.topk(most).indices]] = True
        return torch.where(picked.view_as(t.log_probs_BT), raw + self.coef * t.log_ratio_BT.abs(), raw)


Surrogate = Ppo | ImportanceSampling | Reinforce | CrossEntropy | Cispo | Sapo | Vespo | Dro | ClipCov | KlCov


def _centred(x: Tensor, mask_BT: Tensor, how: Masking) -> Tensor:
    x_BT = x.detach().expand_as(mask_BT)
    return x_BT - masked(x_BT, mask_BT, how).sum() / tokens(mask_BT).clamp(min=1.0)
