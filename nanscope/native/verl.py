"""verl: the registered policy losses, `agg_loss(kl_penalty(…))` and `ppo_loss`, with verl's own actor config.

Notable: `ppo_loss` is what the actor worker runs. It takes the model's output without padding and a TensorDict, which are built here for
prompts of one token and responses of full width. Rollout weights come from verl's own helper, which refuses a batch without a valid token.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nanscope.frameworks.rows import Setting
from nanscope.native.adapter import Adapter, old_log_probs, only, per_token, present
from nanscope.objective.settings import LossInputs

_COUNTS = ("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")
_CORRECTION = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")


def load() -> tuple[ModuleType, ...]:
    """Import the policy losses, the config, the site that calls them, and the rollout correction."""
    names = (
        "trainer.ppo.core_algos",
        "workers.config",
        "workers.utils.losses",
        "trainer.ppo.rollout_corr_helper",
        "utils.tensordict_utils",
    )
    return tuple(importlib.import_module(f"verl.{name}") for name in names)


def call(kind: str, inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    """Return the loss of a registered mode, of the KL term alone (`kl_loss`) or of the whole site (`ppo_loss`)."""
    return {"kl_loss": _kl_loss, "ppo_loss": _site}.get(kind, _policy)(kind, inputs, settings)


def _policy(kind: str, inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    core, *_ = load()
    config = _config({**settings, "loss_mode": kind})
    loss: Tensor = core.get_policy_loss_fn(kind)(
        old_log_prob=old_log_probs(inputs),
        log_prob=inputs.log_probs,
        advantages=per_token(inputs.advantages, inputs.log_probs),
        response_mask=inputs.mask.bool(),
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=_weights(inputs, settings),
    )[0]
    return loss


def _kl_loss(kind: str, inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    core, *_ = load()
    config = _config(settings)
    kl_BT = core.kl_penalty(inputs.log_probs, present(inputs.ref_log_probs, "ref_log_probs"), config.kl_loss_type)
    loss: Tensor = core.agg_loss(kl_BT, inputs.mask.bool(), config.loss_agg_mode, **config.global_batch_info)
    return loss


def _site(kind: str, inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    """Return `ppo_loss`. Advantages are masked, as verl's estimators return them."""
    losses, tensordict = load()[2], load()[4]
    config = _config(settings)
    mask = inputs.mask.bool()
    tensors: dict[str, Tensor | None] = {
        "prompts": torch.zeros(len(mask), 1, dtype=torch.long),
        "responses": torch.zeros(mask.shape, dtype=torch.long),
        "attention_mask": torch.ones(len(mask), 1 + mask.shape[1], dtype=torch.long),
        "response_mask": mask,
        "old_log_probs": old_log_probs(inputs),
        "advantages": per_token(inputs.advantages, inputs.log_probs) * mask,
        "rollout_is_weights": _weights(inputs, settings),
        "ref_log_prob": present(inputs.ref_log_probs, "ref_log_probs") if config.use_kl_loss else None,
    }
    counts = {name: settings.get(name, 1 if name == "dp_size" else None) for name in _COUNTS[:3]}
    data = tensordict.get_tensordict({name: tensor for name, tensor in tensors.items() if tensor is not None}, counts)
    output = {"log_probs": _unpadded(inputs.log_probs)}
    if inputs.entropy is not None:
        output["entropy"] = _unpadded(inputs.entropy)
    loss: Tensor = losses.ppo_loss(config, output, data)[0]
    return loss


def _unpadded(x_BT: Tensor) -> Tensor:
    """Return the rows in one line, each with one value more: the prompt token predicts the first of the response, the last nothing."""
    return torch.cat([x_BT, torch.zeros_like(x_BT[:, :1])], 1).reshape(-1)


def _config(settings: Mapping[str, Setting]) -> Any:
    """Return verl's FSDP actor config under these settings; policy_loss holds those that are its own."""
    configs = load()[1]
    policy = {option.name for option in fields(configs.PolicyLossConfig)}
    actor = {option.name for option in fields(configs.FSDPActorConfig)}
    said = only(settings, {*policy, *actor, *_COUNTS, *_CORRECTION})
    return configs.FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=configs.PolicyLossConfig(**{name: value for name, value in said.items() if name in policy}),
        global_batch_info={name: value for name, value in said.items() if name in _COUNTS},
        **{name: value for name, value in said.items() if name in actor},
    )


def _weights(inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor | None:
    """Return the rollout correction weights of `rollout_corr_helper`, None without rollout_is."""
    if settings.get("rollout_is") is None:
        return None
    said = {name: value for name, value in settings.items() if name in _CORRECTION}
    log_ratio_BT = old_log_probs(inputs) - present(inputs.rollout_log_probs, "rollout_log_probs")
    weights: Tensor = load()[3].compute_rollout_correction_weights(log_ratio_BT, inputs.mask.bool(), **said)[0]
    return weights


ADAPTER = Adapter("verl", load, call)
