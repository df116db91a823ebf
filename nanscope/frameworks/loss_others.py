"""torchtitan, AReaL, prime-rl, slime, and tinker's documented semantics: frameworks with one or two losses each.

Read in torchtitan 0.3.0, AReaL 4aef98d, prime-rl 559b447, slime 624b824, tinker 0.38.0. tinker computes on its servers: its rows follow
the documentation and were compared with no figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanscope.errors import NanscopeError
from nanscope.frameworks.options import TOKEN_MEAN, Loss, clip, pick
from nanscope.objective.bounds import Bounds
from nanscope.objective.reduction import Guard, Masking, Over, Reduction
from nanscope.objective.settings import PER_SEQUENCE, Anchor, Entropy, Estimator, Kl, LossSettings, Ratio, TrustRegion
from nanscope.objective.surrogates import Cispo, CrossEntropy, Dro, ImportanceSampling, Ppo, Sapo


@dataclass(frozen=True, slots=True)
class Torchtitan:
    """`DAPOLoss.Config`. Its old policy is the generator: pass the generator's log-probs as old_log_probs."""

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


@dataclass(frozen=True, slots=True)
class Areal:
    """`ppo_actor_loss_fn`. The ratio is against its proximal policy: pass proximal_logprobs as old_log_probs."""

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    importance_sampling_level: str = "token"

    def settings(self) -> LossSettings:
        return _areal(Ppo(clip(self.eps_clip, self.eps_clip_higher), dual=self.c_clip), self.importance_sampling_level, Masking.WHERE)


@dataclass(frozen=True, slots=True)
class ArealSapo:
    """`sapo_loss_fn`."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    importance_sampling_level: str = "token"

    def settings(self) -> LossSettings:
        return _areal(Sapo(self.tau_pos, self.tau_neg), self.importance_sampling_level, Masking.NONE)


def _areal(surrogate: Ppo | Sapo, level: str, mask_token_ratio: Masking) -> LossSettings:
    """The mask is a `where` after exp: the loss is clean, the gradient of an overflow is not."""
    sequence = replace(PER_SEQUENCE, mask_log_ratio=Masking.WHERE, mask_ratio=Masking.WHERE)
    levels = {"token": Ratio(mask_ratio=mask_token_ratio), "sequence": sequence}
    return LossSettings(
        surrogate=surrogate,
        ratio=pick("importance_sampling_level", level, levels),
        reduction=Reduction(Over.TOKENS, mask=Masking.WHERE),
        mask_advantages=Masking.MULTIPLY,
        mean_advantages=Guard.FLOOR if level == "sequence" else None,
    )


@dataclass(frozen=True, slots=True)
class PrimeRl:
    """`DefaultLossConfig`; rl_scale divides the sum over sequences, None counts the mask. Its old policy is the inference engine."""

    dppo_mask_low: float = 0.2
    dppo_mask_high: float = 0.2
    adv_tau: float = 1.0
    kl_tau: float = 1e-3
    rl_scale: float | None = None

    def settings(self) -> LossSettings:
        return LossSettings(
            surrogate=ImportanceSampling(),
            trust=TrustRegion(low=self.dppo_mask_low, high=self.dppo_mask_high, nan_passes=True),
            kl=Kl(2 * self.kl_tau, Estimator.K2, against=Anchor.OLD),  # kl_tau · Δ²
            reduction=replace(TOKEN_MEAN, count=self.rl_scale),
            scale_advantages=Reduction(Over.TOKENS, count=1.0, factor=self.adv_tau),
        )


@dataclass(frozen=True, slots=True)
class Slime:
    """`policy_loss_function`, reduced over tokens. The entropy term is there whenever the batch has an entropy."""

    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    entropy_coef: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    advantage_estimator: str = "grpo"

    def settings(self) -> LossSettings:
        return LossSettings(
            surrogate=Ppo(clip(self.eps_clip, self.eps_clip_high), dual=self.eps_clip_c),
            ratio=PER_SEQUENCE if self.advantage_estimator == "gspo" else Ratio(),
            kl=replace(pick("kl_loss_type", self.kl_loss_type, _SLIME_KL), coef=self.kl_loss_coef) if self.use_kl_loss else None,
            entropy=Entropy(self.entropy_coef, required=self.entropy_coef != 0),
        )


@dataclass(frozen=True, slots=True)
class SlimeKl:
    """`compute_approx_kl`, without coefficient."""

    kl_loss_type: str = "k1"

    def settings(self) -> LossSettings:
        return LossSettings(surrogate=None, kl=pick("kl_loss_type", self.kl_loss_type, _SLIME_KL))


_SLIME_KL = {
    "k1": Kl(1.0, Estimator.K1),
    "k2": Kl(1.0, Estimator.K2),
    "k3": Kl(1.0, Estimator.K3),
    "low_var_kl": Kl(1.0, Estimator.K3, cap=Bounds(-10.0, 10.0)),  # after exp: the value is bounded, its gradient is not
}


@dataclass(frozen=True, slots=True)
class Tinker:
    """A loss function of the tinker API: a sum over tokens, never a mean. Its old policy is the sampler."""

    loss_fn: str = "importance_sampling"
    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    beta: float | None = None

    def settings(self) -> LossSettings:
        return replace(pick("loss_fn", self.loss_fn, _TINKER)(self), reduction=Reduction(Over.TOTAL))


def _tinker_dro(o: Tinker) -> LossSettings:
    if o.beta is None:
        raise NanscopeError("tinker's dro needs beta", slug="unknown-setting-value")
    return LossSettings(Dro(o.beta))


_TINKER: dict[str, Callable[[Tinker], LossSettings]] = {
    "cross_entropy": lambda o: LossSettings(CrossEntropy()),
    "importance_sampling": lambda o: LossSettings(ImportanceSampling()),
    "ppo": lambda o: LossSettings(Ppo(Bounds(o.clip_low_threshold, o.clip_high_threshold))),
    "cispo": lambda o: LossSettings(Cispo(Bounds(o.clip_low_threshold, o.clip_high_threshold))),
    "dro": _tinker_dro,
}

_AFTER = "the mask is a `where` after exp: finite loss, NaN gradient at a masked overflow"
_LATE = "low_var_kl clamps after exp only: finite loss, NaN gradient"
_ENTROPY = "the entropy term is formed at entropy_coef=0 as well: 0 · NaN is NaN"

ROWS = (
    Loss("torchtitan.dapo", Torchtitan, "torchtitan/experiments/rl/losses/dapo.py:57", "0.3.0"),
    Loss("areal.ppo_actor", Areal, "areal/utils/functional/functional.py", "4aef98d", flaws=(_AFTER,)),
    Loss("areal.sapo", ArealSapo, "areal/utils/functional/functional.py", "4aef98d", flaws=(_AFTER,)),
    Loss("prime_rl.default", PrimeRl, "src/prime_rl/trainer/rl/loss.py:110", "559b447"),
    Loss("slime.policy", Slime, "slime/utils/ppo_utils.py:124", "624b824", flaws=(_ENTROPY,)),
    Loss("slime.kl_loss", SlimeKl, "slime/utils/ppo_utils.py:12", "624b824", flaws=(_LATE,)),
    *(Loss(f"tinker.{kind}", Tinker, "tinker-docs.thinkingmachines.ai/losses", "0.38.0", (("loss_fn", kind),)) for kind in _TINKER),
)
