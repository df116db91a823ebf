"""The mismatch between the sampler and the trainer: how far they are apart at the sampled tokens, and what importance weights make of it.

    sums = mismatch_sums(log_probs, rollout_log_probs, counted)      [len(Mismatch.__slots__)], on the device
    Mismatch.of(sums.tolist()).mean                                  mean |Δ| in nat

Δ = ℓ_trainer − ℓ_rollout, w = exp Δ. The sampler drew the tokens, so means over them estimate KL(rollout ‖ trainer): k1 is that of −Δ,
k3 that of w − 1 − Δ (J. Schulman, Approximating KL divergence, 2020). What is kept are sums: those of several micro-batches add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanscope.objective.bounds import OPEN, SAFE
from nanscope.objective.evaluate import corrected
from nanscope.objective.settings import Correction, Level, LossInputs

BEYOND, FAR = math.log(2.0), math.log(10.0)  # nat: a weight that leaves [1/2, 2], where frameworks truncate, and [1/10, 10]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over the counted tokens of a step.

    tokens: that the sampler has scored. unscored: that it has not (NaN), or whose Δ is infinite. apart, shift: of |Δ| and Δ, nat.
    largest: |Δ|. k3s: of w − 1 − Δ. beyond, far: tokens with |Δ| above `BEYOND` and `FAR`. weights, squares: of w, with Δ within ±20 nat.
    weighed: tokens to which the correction in force applies, 0 where there is none; dropped: of these, that its weight or mask takes out;
    cut: whose weight it truncates.
    """

    tokens: float = 0.0
    unscored: float = 0.0
    apart: float = 0.0
    shift: float = 0.0
    largest: float = 0.0
    k3s: float = 0.0
    beyond: float = 0.0
    far: float = 0.0
    weights: float = 0.0
    squares: float = 0.0
    weighed: float = 0.0
    dropped: float = 0.0
    cut: float = 0.0

    @staticmethod
    def of(sums: Sequence[float]) -> Mismatch:
        """Return the mismatch of `mismatch_sums`, once they are on the host."""
        return Mismatch(*sums)

    def joined(self, other: Mismatch) -> Mismatch:
        """Return the mismatch over two micro-batches."""
        added = {name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        return Mismatch(**{**added, "largest": max(self.largest, other.largest)})

    def _share(self, part: float, of: float | None = None) -> float | None:
        whole = self.tokens if of is None else of
        return part / whole if whole else None

    @property
    def mean(self) -> float | None:
        """Mean |Δ|, nat; None without a token, as all of these."""
        return self._share(self.apart)

    @property
    def k1(self) -> float | None:
        """KL(rollout ‖ trainer), nat: the estimate that has no bias, and may be negative."""
        return self._share(-self.shift)

    @property
    def k3(self) -> float | None:
        """The same, nat: with less variance, and never negative."""
        return self._share(self.k3s)

    @property
    def share_beyond(self) -> float | None:
        """Share of the tokens whose weight leaves [1/2, 2]."""
        return self._share(self.beyond)

    @property
    def share_far(self) -> float | None:
        """Share of the tokens whose weight leaves [1/10, 10]."""
        return self._share(self.far)

    @property
    def sample_size(self) -> float | None:
        """Effective sample size of the weights by token, as a share of the tokens: (Σw)² / (n Σw²), 1 where all are alike."""
        return self._share(self.weights * self.weights, self.tokens * self.squares)

    @property
    def share_dropped(self) -> float | None:
        """Share of the tokens that the correction in force takes out; None where there is no correction."""
        return self._share(self.dropped, self.weighed)

    @property
    def share_cut(self) -> float | None:
        """Share of the tokens whose weight it truncates."""
        return self._share(self.cut, self.weighed)


def mismatch_sums(
    own: Tensor, rollout: Tensor, counted: Tensor | None, correction: Correction | None = None, weight: Tensor | None = None
) -> Tensor:
    """Return the fields of `Mismatch` as one tensor, without waiting for the device.

    own, rollout: log-probs of the trainer and of the sampler, [B, T] or [N]. counted: bool, alike; None counts all. correction: in force.
    weight: what the loss multiplies a token by, where that is seen; alone it tells what is taken out, and not what is truncated.
    """
    own, rollout = own.detach().float(), rollout.detach().float()
    delta = own - rollout
    scored = torch.isfinite(delta)
    counted = torch.ones_like(scored) if counted is None else counted
    inside = counted & scored
    delta = torch.where(inside, delta, 0.0)
    apart, here = delta.abs(), inside.float()
    safe = SAFE.clamp(delta)
    importance = safe.exp()
    tokens = here.sum()
    sums = [tokens, (counted & ~scored).sum(), apart.sum(), delta.sum(), apart.amax() if apart.numel() else tokens]
    sums += [(importance - 1 - safe).sum(), (apart > BEYOND).sum(), (apart > FAR).sum(), (importance * here).sum()]
    sums.append((importance.square() * here).sum())
    zero, gone = torch.zeros_like(tokens), None if weight is None else weight.detach() == 0
    if correction is not None:
        sums += _under(correction, own, rollout, counted, gone)
    else:
        sums += [zero] * 3 if gone is None else [counted.sum(), (counted & gone).sum(), zero]
    return torch.stack([one.float() for one in sums])


def _under(correction: Correction, own: Tensor, rollout: Tensor, counted: Tensor, gone: Tensor | None) -> list[Tensor]:
    """Tokens that a correction applies to, that it takes out, and whose weight it truncates; none of tokens in one line, whose sequences
    nobody knows, where it weighs sequences. gone: tokens whose weight is seen to be 0."""
    if own.dim() != 2 and correction.level is not Level.TOKEN:
        return [own.new_zeros(())] * 3
    rows = [one if one.dim() == 2 else one.reshape(1, -1) for one in (own, rollout, counted)]
    weight, kept = effect(correction, *rows)
    free, _ = effect(replace(correction, bounds=OPEN, drop=False), *rows)
    out = (weight == 0) | (kept == 0)
    dropped, mask = rows[2] & (out if gone is None else out | gone.reshape(-1, gone.shape[-1])), rows[2]
    return [mask.sum(), dropped.sum(), (mask & ~dropped & (weight != free)).sum()]


def effect(correction: Correction, own: Tensor, rollout: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a correction multiplies each token's loss by, before it is normalised, and the mask behind its gates, both [B, T]."""
    mask = counted.to(own.dtype)
    inputs = LossInputs(own, own, None, rollout, own.new_zeros((len(own), 1)), mask)
    weight, kept = corrected(inputs, replace(correction, normalise=False))
    return (torch.ones_like(own) if weight is None else weight.expand_as(own)), kept.expand_as(own)
