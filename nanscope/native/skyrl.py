"""SkyRL: the losses of its `PolicyLossRegistry`, on advantages that its own trainer function scales beforehand, with its own config.

Notable: the batch is one micro-batch and one prompt. The KL term is two calls inside the worker's training step (workers/worker.py:970);
they are made here in the same order. On Python 3.11 SkyRL's types do not import: pydantic wants TypedDict from typing_extensions there, and
gets it while SkyRL is imported.
"""

from __future__ import annotations

import importlib
import sys
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from nanscope.frameworks.rows import Setting
from nanscope.native.adapter import Adapter, old_log_probs, only, per_token, present
from nanscope.objective.settings import LossInputs

_ROOT = "skyrl.backends.skyrl_train.utils"


def load() -> ModuleType:
    """Import the registry with its losses."""
    name = f"{_ROOT}.ppo_utils"
    if name in sys.modules:
        return sys.modules[name]
    with _typed_dict():
        return importlib.import_module(name)


@contextmanager
def _typed_dict() -> Iterator[None]:
    """Let `from typing import TypedDict` find the one of typing_extensions on Pythons whose own pydantic refuses."""
    own = typing.TypedDict
    if sys.version_info < (3, 12):
        typing.TypedDict = importlib.import_module("typing_extensions").TypedDict
    try:
        yield
    finally:
        typing.TypedDict = own


def call(kind: str, inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    """Return the registered loss, plus coefficient · KL with use_kl_loss; or the KL term alone (`kl_loss`)."""
    ppo = load()
    if kind == "kl_loss":
        return _kl(inputs, settings)
    config = _config(ppo.AlgorithmConfig, only({**settings, "policy_loss_type": kind}, _names(ppo.AlgorithmConfig)))
    mask_BT = inputs.mask.to(inputs.log_probs.dtype)
    rows, columns = mask_BT.shape
    advantages_BT = ppo.apply_loss_reduction_to_advantages_minibatch(
        per_token(inputs.advantages, inputs.log_probs) * mask_BT,  # as SkyRL's estimators return them
        mask_BT,
        config.loss_reduction,
        micro_batch_size=rows,
        max_seq_len=columns if config.max_seq_len is None else config.max_seq_len,
        prompt_boundaries=[(0, rows)],
    )
    rollout = None if inputs.rollout_log_probs is None else inputs.rollout_log_probs.detach()
    loss: Tensor = ppo.PolicyLossRegistry.get(kind)(inputs.log_probs, old_log_probs(inputs), advantages_BT, config, mask_BT, rollout)[0]
    return loss + config.kl_loss_coef * _kl(inputs, settings) if settings.get("use_kl_loss", False) else loss


def _kl(inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    ppo = load()
    mask_BT = inputs.mask.to(inputs.log_probs.dtype)
    estimator = only(settings, _names(ppo.AlgorithmConfig)).get("kl_estimator_type", ppo.AlgorithmConfig().kl_estimator_type)
    kl_BT = ppo.compute_approx_kl(inputs.log_probs, present(inputs.ref_log_probs, "ref_log_probs"), mask_BT, estimator)
    loss: Tensor = ppo.masked_mean(kl_BT, mask_BT, dim=-1).mean()
    return loss


def _names(config: Any) -> set[str]:
    """Return the options of a config class and of those nested in it."""
    found: set[str] = set()
    for option in fields(config):
        nested: Any = option.default_factory
        found |= _names(nested) if is_dataclass(nested) else {option.name}
    return found


def _config(config: Any, settings: Mapping[str, Setting]) -> Any:
    """Return a config object under these settings; a nested one takes those that are its own (`cispo.cispo_eps_clip_low`)."""
    said: dict[str, Any] = {}
    for option in fields(config):
        nested: Any = option.default_factory
        if is_dataclass(nested):
            said[option.name] = _config(nested, settings)
        elif option.name in settings:
            said[option.name] = settings[option.name]
    return config(**said)


ADAPTER = Adapter("skyrl", load, call)
