"""The loss paths: every loss of every framework with its defaults, and under the settings that change how it fails.

    paths(["trl.grpo"])     trl.grpo, trl.grpo · beta=0.04, trl.grpo · importance_sampling_level=sequence, …

Notable: a variant stands here if it changes where exp, mask or clamp sit, or what is divided by what; settings that only scale do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.options import Setting


@dataclass(frozen=True, slots=True)
class LossPath:
    """A loss of a framework under certain settings, in the framework's own words."""

    key: str
    settings: tuple[tuple[str, Setting], ...] = ()

    @property
    def name(self) -> str:
        """Return `trl.grpo · beta=0.04`."""
        return " · ".join([self.key, *(f"{name}={_show(value)}" for name, value in self.settings)])

    @property
    def supposed(self) -> bool:
        """Return whether the framework has no such setting: nanscope adds a clamp, to show what it would do."""
        return any(name not in LOSSES[self.key].names() for name, _ in self.settings)

    @property
    def framework(self) -> str:
        """Return `trl`."""
        return self.key.split(".")[0]


def _show(value: Setting) -> str:
    return f"{list(value)}" if isinstance(value, (list, tuple)) else str(value)


_NEEDED: dict[str, dict[str, Setting]] = {"verl.dro": {"dro_beta": 0.1}, "tinker.dro": {"beta": 0.1}}  # these have no default

_KL: tuple[dict[str, Setting], ...] = ({"beta": 0.04}, {"beta": 0.04, "use_bias_correction_kl": False})
_SEQUENCE: dict[str, Setting] = {"importance_sampling_level": "sequence"}
_VLLM: tuple[dict[str, Setting], ...] = tuple(
    {"use_vllm": True, "vllm_importance_sampling_mode": mode}
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
)
_NO_KL: dict[str, Setting] = {"reference_policy_kl_penalty": 0.0}
_TIS = "truncated_importance_sampling"
_TRUNCATED: tuple[dict[str, Setting], ...] = (
    {f"{_TIS}_type": "tis", f"{_TIS}_ratio": 2.0},
    {f"{_TIS}_type": "icepop", f"{_TIS}_ratio": 5.0, f"{_TIS}_ratio_min": 0.5},
    {f"{_TIS}_type": "seq-mask-tis", f"{_TIS}_ratio": 1.3, f"{_TIS}_ratio_min": 0.999},
)

# before exp, and in the tempting order; the values are NeMo-RL's for its KL
_CLAMPED: tuple[dict[str, Setting], ...] = (
    {"log_ratio_clamp_value": 20.0},
    {"log_ratio_clamp_value": 20.0, "clamp_after_exp": True},
)
_ALL_CLAMPS: dict[str, Setting] = {"log_ratio_clamp_value": 20.0, "kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0}

# keys: what is set besides the defaults, one path each
_VARIANTS: dict[str, tuple[Mapping[str, Setting], ...]] = {
    "trl.grpo trl.bnpo": _KL,
    "trl.grpo": (
        _SEQUENCE,
        {"delta": 4.0},
        *_VLLM,
        {"entropy_coef": 0.01},
    ),
    "trl.luspo": (_SEQUENCE,),
    "trl.cispo": ({"epsilon_high": 5.0}, {"epsilon_high": 5.0, "beta": 0.04}),
    "trl.vespo": ({"beta": 0.04}, _VLLM[0]),
    "trl.gmpo": ({"epsilon": 0.2}, {"epsilon": 0.2, "beta": 0.04}),
    "liger.grpo liger.dapo liger.bnpo liger.luspo liger.cispo liger.sapo liger.vespo": ({"beta": 0.0},),
    "liger.dapo": ({"use_bias_correction_kl": True}, _ALL_CLAMPS),
    "liger.grpo": ({"beta": 0.0, **_SEQUENCE}, {"beta": 0.0, "delta": 4.0}, {"beta": 0.0, "use_vllm": True}),
    "liger.luspo": ({"beta": 0.0, **_SEQUENCE},),
    "liger.cispo": ({"beta": 0.0, "epsilon_high": 5.0},),
    "unsloth.grpo unsloth.dapo unsloth.cispo unsloth.sapo": ({"beta": 0.04},),
    "unsloth.grpo": (
        _SEQUENCE,
        {"rollout_logps_as_old": True},
        {"use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"},
        {"use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask"},
    ),
    "verl.vanilla": (
        *({"loss_agg_mode": mode} for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")),
        {"rollout_is": "token"},
        {"rollout_is": "sequence"},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
    ),
    "verl.gspo verl.cispo verl.dppo_tv verl.clip_cov verl.kl_cov": ({"loss_agg_mode": "seq-mean-token-mean"},),
    "verl.kl_loss": (
        *({"kl_loss_type": kind} for kind in ("k1", "abs", "k2", "k1+", "k2+", "k3+")),
        {"loss_agg_mode": "seq-mean-token-mean"},
    ),
    "verl.ppo_loss": (
        {"use_kl_loss": True},
        {"use_kl_loss": True, "loss_agg_mode": "seq-mean-token-mean"},
        {"entropy_coeff": 0.01},
    ),
    "nemo_rl.clipped_pg": (
        _NO_KL,
        {"kl_input_clamp_value": None},
        {"kl_input_clamp_value": None, "kl_output_clamp_value": None},
        {"reference_policy_kl_type": "k2"},
        {"reference_policy_kl_type": "k1"},
        {"use_on_policy_kl_approximation": True},
        {"ratio_clip_c": 3.0, **_NO_KL},
        {"token_level_loss": False, **_NO_KL},
        {"sequence_level_importance_ratios": True, "token_level_loss": False, **_NO_KL},
        {"use_cispo": True, "ratio_clip_max": 5.0, **_NO_KL},
        {"disable_ppo_ratio": True, **_NO_KL},
        {"force_on_policy_ratio": True, **_NO_KL},
        {"use_importance_sampling_correction": True, **_NO_KL},
        *({"use_importance_sampling_correction": True, **truncated, **_NO_KL} for truncated in _TRUNCATED),
    ),
    "skyrl.regular": (
        {"loss_reduction": "sequence_mean"},
        {"loss_reduction": "seq_mean_token_sum_norm"},
        {"tis_ratio_type": "token"},
        {"tis_ratio_type": "sequence"},
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.5, "geo_mask_high": 2.0},
        {"sequence_mask_metric": "product"},
        {"outlier_token_is_threshold_high": 100.0},
        {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0},
        {"use_kl_loss": True},
    ),
    "skyrl.gspo skyrl.sapo": ({"loss_reduction": "sequence_mean"},),
    "skyrl.dppo": ({"dppo_type": "binary_kl"},),
    "skyrl.kl_loss": tuple({"kl_estimator_type": kind} for kind in ("k1", "abs", "k2")),
    "openrlhf.ppo": (
        {"token_level_loss": False},
        {"through_actor": True},
        {"dual_clip": 3.0},
        {"is_correction_level": "token"},
        {"is_correction_level": "token", "is_correction_mode": "clip"},
        {"is_correction_level": "seq"},
        {"is_correction_level": "token", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.05)},
        {"is_correction_level": "seq", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.05)},
        {"is_correction_level": "token", "is_correction_gating": "tv", "is_correction_threshold": (0.0, 0.5)},
    ),
    "openrlhf.gspo": ({"is_correction_level": "token"}, {"through_actor": True}),
    "openrlhf.kl_loss": (
        {"unbiased_gradient": True},
        *({"kl_estimator": kind, "unbiased_gradient": unbiased} for kind in ("k2", "k3") for unbiased in (False, True)),
    ),
    "areal.ppo_actor": ({"c_clip": 3.0}, _SEQUENCE),
    "areal.sapo": (_SEQUENCE,),
    "slime.policy": (
        {"eps_clip_c": 3.0},
        {"advantage_estimator": "gspo"},
        {"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"},
    ),
    "trl.grpo nemo_rl.clipped_pg areal.ppo_actor slime.policy": _CLAMPED,
    "trl.dapo": ({"beta": 0.04, **_ALL_CLAMPS},),
    "slime.kl_loss": tuple({"kl_loss_type": kind} for kind in ("k2", "k3", "low_var_kl")),
}


def _all_paths() -> tuple[LossPath, ...]:
    """Every key with its defaults, and after it its variants."""
    settings: dict[str, list[Mapping[str, Setting]]] = {key: [_NEEDED.get(key, {})] for key in LOSSES}
    for keys, variants in _VARIANTS.items():
        for key in keys.split():
            settings[key] += [_NEEDED.get(key, {}) | dict(variant) for variant in variants]
    return tuple(LossPath(key, tuple(chosen.items())) for key, several in settings.items() for chosen in several)


PATHS = _all_paths()


def paths(prefixes: Iterable[str] | None = None) -> tuple[LossPath, ...]:
    """Return the paths whose name begins with one of the prefixes (`verl`, `trl.grpo`); None or nothing is all of them.

    Raises NanscopeError for a prefix that no path has.
    """
    wanted = tuple(prefixes or ())
    for prefix in wanted:
        if not any(path.name.startswith(prefix) for path in PATHS):
            frameworks = ", ".join(dict.fromkeys(path.framework for path in PATHS))
            message = f"no loss path begins with {prefix!r}: there are {frameworks}, and more after a dot, as in trl.grpo"
            raise NanscopeError(message, slug="unknown-loss")
    return tuple(path for path in PATHS if path.name.startswith(wanted or ""))
